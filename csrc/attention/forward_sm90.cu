// Forward of attention on Hopper, one pass over the keys.   Formula, shapes and masks: attention.h
// Tiles, shared memory, work items and the producer: forward_sm90_pipeline.cuh
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 1; Shah et al. 2024, FlashAttention-3,
//   arXiv:2407.08608, for warp specialisation and the two overlaps.
// Grid: a block per multiprocessor. It computes one work item (batch, head, tile of kBlockM queries) after the other:
//   the last queries of a head first, as they have the longest loop under a causal mask, and together the heads whose
//   keys and values fit in the L2 cache.
// Tiles: 192 queries by 128 keys at head dimension 64, beyond it 128 by 128. A warpgroup whose queries are all past the
//   end computes nothing.
// Order: blocks take items from a counter, which a memset clears first. There is none where the items are equal, where
//   all heads fit in L2, so that items only get shorter, or where blocks get at most two items: blocks then take theirs
//   in turns of alternating direction. With several groups of heads in L2 and a causal mask that would cost 5 to 30 %.
// Bool matrix, a separate kernel: of a partial tile a warpgroup computes only the visible 64 x 64 blocks, two or one of
//   them at once, and tests only partial ones. There it takes no turns. At head dimension 64 it has four stages.
// Scores are tested against the mask only in partial tiles, and scaled in the exponent. Dropout, a kernel apart, is a
//   mask of packed pairs: one AND for two probabilities.
// Roles: one thread of the producer warpgroup copies by TMA; each consumer warpgroup owns 64 queries.
// Registers of a consumer thread: scores (kBlockN / 2), their exponentials packed (kBlockN / 4), sum (kHeadDim / 2).
// Shared memory: the queries, two stages of keys and of values, the output before it is stored.
// Overlap: while a warpgroup computes the softmax of tile i, tensor cores compute its P V of tile i - 1 and, as
//   warpgroups issue in turns, the products of another warpgroup.
// Work: 2 (Dk + Dv) FLOPs a score of a visited tile; bytes: q and out once, k and v once a query tile, mostly from L2.
// Compiled offline, nvcc 13.0: nothing spills, and all exponentials of a tile, 64 a thread and two factors, are between
//   the wait for its scores and the wait for the last P V. tests/codegen asserts both. Instructions of a thread for a
//   full tile, without / with dropout: D 128 477 / 942, D 64 428 / 890. When each product computed its descriptors from
//   an address they were 554 / 1018 and 457 / 937. An item without a partial tile has 342 fewer since its first tile is
//   not treated as one. Of a bool matrix, D 64, in partial tiles: 451 for two full blocks, 299 for one, 801 and 592 for
//   partial ones, 61 for none. Limits of a tile, in clocks of tensor cores, shared memory, issue:
//   D 128 2048, 1790, 954 / 1884; D 64 1536, 1216, 1284 / 2670, exponentials 1536.
// H200, before that change, bf16, ms, cuDNN's in brackets (large products reach 794 TFLOP/s):
//   2 x 16 heads, 8192 tokens, D 128             1.79 (1.74), 616 TFLOP/s; causal 0.874 (0.935), 629 TFLOP/s
//   2 x 32 heads, 8192 tokens, D 64              2.15 (2.41), 512 TFLOP/s, tensor cores busy for 55 % of the time
//   16 x 32 heads, 1024 tokens, D 64, padding    0.296 (0.604)
//   8 x 32 heads, 2048 tokens, D 64, half of the 64 x 64 blocks masked: 0.841 (1.11), tensor cores 33 %, when 98 % of
//     the tiles were visited and tested as a whole, 4421 clocks each. By blocks 0.3 to 0.4 (estimated): a warpgroup has
//     two, one or no block of a tile in 24, 52 and 24 % of them, 1520 clocks a tile.
//   4 x 8 heads, 4096 tokens, D 64, with the backward: 1.03, by PyTorch 1.08; with dropout 1.83 by either
// Dropped: tiles of 128 queries where they pad less; H200, 8 heads, ms by 128 / 192: 64 x 128 tokens 0.0229 / 0.0226,
//   32 x 256 0.0287 / 0.0284, 16 x 512 0.0391 / 0.0358, 8 x 1024 0.0583 / 0.0540; 240 registers for a consumer and 24
//   for the producer, which then spills 32 to 44 bytes; a template parameter for the kind of mask: once loaded, band,
//   intervals and bits are one word a row, and full tiles have no mask code; dropout drawn before the softmax at 192
//   rows: 10 to 17 accesses of spilled registers.
// Open: at head dimension 128 without a mask, tiles of 128 x 176 and clusters of two blocks that share keys and values
//   by multicast, as in FlashAttention 3: 4 to 7 % (estimated). The output then has to be over the values in shared
//   memory, and masks have to keep 128 keys, as their bits come in such blocks.
#include "attention/forward_sm90_pipeline.cuh"
#include "common/check.h"
#include "common/mma.cuh"
#include "common/philox.cuh"
#include "common/softmax.cuh"

namespace fastattn::attention {
namespace {

enum NamedBarrier { kGroupBarrier = 1, kTurn = 4 };  // one of each kind for each consumer

// The state of one of a consumer thread's two rows, group * 64 + warp * 16 + lane / 4 + {0, 8} of the tile.
struct RowState {
  int m;
  float max = -kInfinity, sum = 0.0f;
  uint32_t visible = ~0u;  // in this tile: bit 2j + e is column 8j + 2 (lane % 4) + e
  float rescale = 1.0f;    // factor of the sums up to the last tile
};

// Replaces scores by exponentials of base 2, and updates the rows' maxima and sums. unit: factor from scores to
// exponents. kMayBeFirst: of the item's tiles.
template <bool kMasked, bool kMayBeFirst, int kCount>
__device__ __forceinline__ void softmax(float (&s)[kCount], RowState (&rows)[2], float unit) {
  if (kMasked) {
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if ((rows[row_of(i)].visible >> (i / 4 * 2 + i % 2) & 1) == 0) s[i] = -kInfinity;
  }
  float max[2] = {rows[0].max, rows[1].max}, shift[2];
#pragma unroll
  for (int i = 0; i < kCount; i++) max[row_of(i)] = fmaxf(max[row_of(i)], s[i]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    max[r] = quad_max(max[r]);
    // A row without a visible key so far has the maximum -inf; 0 instead avoids -inf - -inf.
    shift[r] = kMayBeFirst && max[r] == -kInfinity ? 0.0f : max[r] * unit;
    rows[r].rescale = exp2_approximate(rows[r].max * unit - shift[r]);
    rows[r].max = max[r];
    rows[r].sum *= rows[r].rescale;
  }
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    s[i] = exp2_approximate(fmaf(s[i], unit, -shift[row_of(i)]));
    rows[row_of(i)].sum += s[i];
  }
}

template <class T, class Tiles, bool kDropout>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, Shared<Tiles>& shared)
      : a_(a), shared_(shared), group_(warpgroup() - 1), thread_(threadIdx.x % kGroup), dropout_(a.p.dropout) {}

  __device__ __forceinline__ void run() {
    if (group_ == Tiles::kConsumers - 1) named_barrier_arrive(kTurn, 2 * kGroup);  // group 0 has the first turn
    for (int turn = 0;; turn ^= 1) {
      shared_.full_q.wait(turn);
      // With dropout a copy, in registers: ptxas serialises wgmma by blocks with the one in the other's place.
      const std::conditional_t<kDropout, const WorkItem, const WorkItem&> item = shared_.items[turn];
      if (item.count < 0) break;
      item.m0 + group_* kGroupRows < a_.p.shape.seqlen_q ? attend(item) : skip(item);
    }
    if (thread_ == 0) bulk_wait<0>();
  }

 private:
  static constexpr int kHeadDim = Tiles::kHeadDim, kBlockN = Tiles::kBlockN;
  // Before the softmax, where there are registers for what is kept: ptxas then draws between the exponentials.
  static constexpr bool kDrawsEarly = Tiles::kConsumers == 2;
  using Yes = std::integral_constant<bool, true>;
  using No = std::integral_constant<bool, false>;

  __device__ __forceinline__ void attend(const WorkItem& item) {
    float out[kHeadDim / 2], s[kBlockN / 2];
    uint32_t p[kBlockN / 16][4];
    RowState rows[2];
#pragma unroll
    for (float& sum : out) sum = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++)
      rows[r].m = item.m0 + group_ * kGroupRows + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * r;
    // The scale is folded into the exponent's unit: it is positive, and the maximum is scaled later.
    const float unit = a_.p.softmax_scale * kLog2e;

    int i = 0;
    if constexpr (Tiles::kBlocks) {
#pragma unroll 1
      for (; i < item.partial; i++) add_blocks(item, out, rows, s, p, unit);
    }
    const bool has_more = i < item.count;
    if (has_more) {
      const bool masked = !Tiles::kBlocks && item.partial > 0;
      shared_.full_k[keys_.stage].wait(keys_.phase);
      const int n0 = shared_.first_keys[keys_.phase][keys_.stage];
      wgmma_fence();
      start_scores(s);
      if (masked) load_mask<kBlockN>(item, n0, rows);
      if constexpr (kDropout && kDrawsEarly) draw<kBlockN>(item, n0, rows);
      wgmma_wait<0>(s);
      release_keys();
      masked ? softmax<true, true>(s, rows, unit) : softmax<false, true>(s, rows, unit);
      if constexpr (kDropout && !kDrawsEarly) draw<kBlockN>(item, n0, rows);
      if (masked) clear_values<kBlockN>();
      pack(p, s);
      if (Tiles::kBlocks) rescale(out, rows);
      i++;
    }
    // Tile i: its scores and the P V of tile i - 1 are started together, and its softmax overlaps the P V.
    const auto step = [&](auto kind) {
      constexpr bool masked = decltype(kind)::value;
      shared_.full_k[keys_.stage].wait(keys_.phase);
      shared_.full_v[values_.stage].wait(values_.phase);
      const int n0 = shared_.first_keys[keys_.phase][keys_.stage];
      take_turn();
      wgmma_fence(out, p);
      start_scores(s);
      start_sum(out, p);
      give_turn();
      if (masked) load_mask<kBlockN>(item, n0, rows);
      if constexpr (kDropout && kDrawsEarly) draw<kBlockN>(item, n0, rows);
      wgmma_wait<1>(s);
      release_keys();
      softmax<masked, masked>(s, rows, unit);
      // Never true. Without a memory access that depends on the softmax, ptxas moves the wait to before the softmax.
      shared_.full_q.arrive_if(rows[0].sum + rows[1].sum < 0.0f);
      if constexpr (kDropout && !kDrawsEarly) draw<kBlockN>(item, n0, rows);
      wgmma_wait<0>(out);
      release_values();
      if (masked) clear_values<kBlockN>();
      pack(p, s);
      rescale(out, rows);
    };
    if constexpr (!Tiles::kBlocks) {
#pragma unroll 1
      for (; i < item.partial; i++) step(Yes{});
    }
#pragma unroll 1
    for (; i < item.count; i++) step(No{});
    if (item.count > 0) release_queries();
    if (has_more) {
      shared_.full_v[values_.stage].wait(values_.phase);
      wgmma_fence(out, p);
      start_sum(out, p);
      wgmma_wait<0>(out);
      release_values();
    }
    store(item, out, rows, unit);
    if (item.count == 0) release_queries();
  }

  // A partial tile by blocks of 64 x 64. Warpgroups take no turns, as each has other blocks; while one computes a
  // softmax, tensor cores compute the products of others. all_s, all_p: of full tiles; in others ptxas spills.
  __device__ __forceinline__ void add_blocks(const WorkItem& item, float (&out)[kHeadDim / 2], RowState (&rows)[2],
                                             float (&all_s)[kBlockN / 2], uint32_t (&all_p)[kBlockN / 16][4],
                                             float unit) {
    shared_.full_k[keys_.stage].wait(keys_.phase);
    const int n0 = shared_.first_keys[keys_.phase][keys_.stage];
    const uint32_t classes = shared_.classes[keys_.phase][keys_.stage] >> 4 * group_ & 15;
    with_visible_part(classes, [&](auto columns, auto kind, int first) {
      constexpr int kN = decltype(columns)::value;
      constexpr bool masked = decltype(kind)::value;
      auto& s = *reinterpret_cast<float (*)[kN / 2]>(&all_s);
      auto& p = *reinterpret_cast<uint32_t (*)[kN / 16][4]>(&all_p);
      wgmma_fence();
      start_scores(s, first);
      if (masked) load_mask<kN>(item, n0 + first, rows);
      if constexpr (kDropout && kDrawsEarly) draw<kN>(item, n0 + first, rows);
      wgmma_wait<0>(s);
      softmax<masked, true>(s, rows, unit);
      if constexpr (kDropout && !kDrawsEarly) draw<kN>(item, n0 + first, rows);
      if (masked) clear_values<kN>(first);
      pack(p, s);
      rescale(out, rows);
      shared_.full_v[values_.stage].wait(values_.phase);
      wgmma_fence(out, p);
      start_sum(out, p, first);
      wgmma_wait<0>(out);
    });
    if (classes == 0) {
      // Loaded: then the stage's values before it were released by all, also by a warpgroup that still had them when it
      // had released its keys.
      shared_.full_v[values_.stage].wait(values_.phase);
      named_barrier_sync(kGroupBarrier + group_, kGroup);  // all have seen the tile
    }
    release_keys();
    release_values();
    __syncwarp();  // before the next products
  }

  static __device__ __forceinline__ void rescale(float (&out)[kHeadDim / 2], const RowState (&rows)[2]) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 2; j++) out[j] *= rows[row_of(j)].rescale;
  }

  // Of a warpgroup whose rows all start past the last query: it only takes its turns and releases what it gets.
  __device__ __forceinline__ void skip(const WorkItem& item) {
#pragma unroll 1
    for (int i = 0; i < item.count; i++) {
      if (!Tiles::kBlocks && i > 0) take_turn(), give_turn();  // by blocks there is no full tile here
      if (thread_ == 0) {
        shared_.full_k[keys_.stage].wait(keys_.phase);
        shared_.full_v[values_.stage].wait(values_.phase);
      }
      __syncwarp();
      release_keys();
      release_values();
    }
    named_barrier_sync(kGroupBarrier + group_, kGroup);  // all have seen the item
    release_queries();
  }

  // s = q k^T, for the keys of the tile from line `first` on.
  template <int kCount>
  __device__ __forceinline__ void start_scores(float (&s)[kCount], int first = 0) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16)
      wgmma<T, 2 * kCount, false, false>(s, along_columns<Tiles::kBlockM>(shared_.q, group_ * kGroupRows, column),
                                         along_columns<kBlockN>(shared_.k[keys_.stage], first, column), column > 0);
    wgmma_commit();
  }

  // out += p v, likewise.
  template <int kSteps>
  __device__ __forceinline__ void start_sum(float (&out)[kHeadDim / 2], const uint32_t (&p)[kSteps][4], int first = 0) {
#pragma unroll
    for (int step = 0; step < kSteps; step++)
      wgmma<T, kHeadDim, true>(out, p[step], along_lines<kBlockN>(shared_.v[values_.stage], first + 16 * step, 0),
                               true);
    wgmma_commit();
  }

  // Which of the kN keys from n0 on are visible to the two rows, and whether some of them, or that of this thread's
  // line, take no part.
  template <int kN>
  __device__ __forceinline__ void load_mask(const WorkItem& item, int n0, RowState (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++)
      rows[r].visible =
          visible_bits<kN>(a_.p.mask, item.b, item.h, rows[r].m, a_.p.shape.seqlen_q, n0, a_.p.shape.seqlen_k);
    if (a_.p.mask.columns == nullptr) return;
    const uint4 words = column_words(a_.p.mask, item.b, n0);
    const int word = thread_ % 8 / 2, bit = n0 % kBitBlock / 4 + thread_ / 8 * 2 + thread_ % 2;
    const uint32_t mine = word < 2 ? (word == 0 ? words.x : words.y) : word == 2 ? words.z : words.w;
    some_excluded_ = (~(words.x & words.y & words.z & words.w) >> n0 % kBitBlock / 4 & first_bits(kN / 4)) != 0;
    excluded_ = thread_ < kN && (mine >> bit & 1) == 0;
  }

  // Which probabilities of the kN keys from n0 on are kept.
  template <int kN>
  __device__ __forceinline__ void draw(const WorkItem& item, int n0, const RowState (&rows)[2]) {
    const int64_t first = (static_cast<int64_t>(item.b) * a_.p.shape.heads + item.h) * a_.p.shape.seqlen_q;
#pragma unroll
    for (int i = 0; i < kN / 16; i++)
      kept_[i / 2][i % 2] = dropout_.kept_in_quad(first + rows[i % 2].m, n0 / 8 + 4 * (i / 2));
  }

  // Sets values of keys that take no part to zero, among the keys of load_mask(), which are the lines of the tile from
  // `first` on: they may be NaN, and 0 * NaN is NaN.
  template <int kN>
  __device__ __forceinline__ void clear_values(int first = 0) {
    if (!some_excluded_) return;
    shared_.full_v[values_.stage].wait(values_.phase);
    if (excluded_) clear_line(shared_.v[values_.stage], first + thread_);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
  }

  // p = dropout(s) without its factor, as the A of the next product.
  template <int kSteps>
  __device__ __forceinline__ void pack(uint32_t (&p)[kSteps][4], const float (&s)[8 * kSteps]) const {
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int j = i / 2 * 8 + k * 2 + i % 2;
        p[j / 4][j % 4] = pack_word<T>(s[2 * j], s[2 * j + 1]);
        if (kDropout) p[j / 4][j % 4] &= DropoutMask::pair_mask(kept_[i / 2][i % 2], k);
      }
    }
  }

  __device__ __forceinline__ void store(const WorkItem& item, const float (&out)[kHeadDim / 2], RowState (&rows)[2],
                                        float unit) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = quad_sum(rows[r].sum);
      const bool empty = sum == 0.0f;
      factor[r] = empty ? 0.0f : (kDropout && dropout_.active() ? dropout_.scale() : 1.0f) / sum;
      if (thread_ % 4 == 0 && rows[r].m < a_.p.shape.seqlen_q)
        a_.p.lse[(static_cast<int64_t>(item.b) * a_.p.shape.heads + item.h) * a_.p.shape.seqlen_q + rows[r].m] =
            empty ? -kInfinity : rows[r].max * (unit * kLn2) + logf(sum);
    }
    if (thread_ == 0) bulk_wait_read<0>();
    __syncwarp();
    named_barrier_sync(kGroupBarrier + group_, kGroup);  // the last output has left shared memory
    const int lane = thread_ % 32, line = group_ * kGroupRows + thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const int i = column / 2 + 2 * word;
        const float f = factor[row_of(i)];
        words[word] = f == 0.0f ? 0 : pack_word<T>(out[i] * f, out[i + 1] * f);  // of an empty row the sum may be NaN
      }
      stmatrix(shared_.out[column / kPanel] + swizzled(line, column % kPanel / 8 + lane / 16), words);
    }
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    if (thread_ == 0) {
      const int first = group_ * kGroupRows;
#pragma unroll
      for (int panel = 0; panel < Tiles::kPanels; panel++)
        tma_store(a_.out, shared_.out[panel] + first * kLineBytes, panel * kPanel, item.m0 + first, item.h, item.b);
      bulk_commit();
    }
    __syncwarp();  // before the next item's products
  }

  // Warpgroups start their products one after the other.
  __device__ __forceinline__ void take_turn() const { named_barrier_sync(kTurn + group_, 2 * kGroup); }
  __device__ __forceinline__ void give_turn() const {
    named_barrier_arrive(kTurn + (group_ + 1) % Tiles::kConsumers, 2 * kGroup);
  }

  // This warpgroup needs the tile no longer, as its products are done: the shared memory may be overwritten.
  __device__ __forceinline__ void release_queries() {
    if (thread_ == 0) shared_.empty_q.arrive();
  }
  __device__ __forceinline__ void release_keys() {
    if (thread_ == 0) shared_.empty_k[keys_.stage].arrive();
    keys_.advance();
  }
  __device__ __forceinline__ void release_values() {
    if (thread_ == 0) shared_.empty_v[values_.stage].arrive();
    values_.advance();
  }

  const Arguments& a_;
  Shared<Tiles>& shared_;
  const int group_, thread_;
  const DropoutMask dropout_;
  Ring<Tiles::kStages> keys_, values_;
  bool some_excluded_ = false, excluded_ = false;
  uint32_t kept_[kBlockN / 32][2];
};

template <class T, class Tiles, bool kDropout>
__global__ void __launch_bounds__(Tiles::Registers::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ Arguments a) {
  Shared<Tiles>& shared = shared_memory<Shared<Tiles>>();
  if (threadIdx.x == 0) {
    shared.full_q.init(1), shared.empty_q.init(Tiles::kConsumers);
    for (int stage = 0; stage < Tiles::kStages; stage++) {
      shared.full_k[stage].init(1), shared.empty_k[stage].init(Tiles::kConsumers);
      shared.full_v[stage].init(1), shared.empty_v[stage].init(Tiles::kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<Tiles::Registers::kProducer>();
    if (threadIdx.x == 0) produce<Tiles>(a, shared);
  } else {
    more_registers<Tiles::Registers::kConsumer>();
    Consumer<T, Tiles, kDropout>(a, shared).run();
  }
}

template <class T, class Tiles>
void run(const Forward& p, int* next_item, cudaStream_t stream) {
  const Shape& s = p.shape;
  const KeyRange keys = keys_in_band(s, p.mask.band_lo, p.mask.band_hi);
  const int64_t key_bytes = int64_t{2} * s.seqlen_k * (s.head_dim_k + s.head_dim_v);
  int device, multiprocessors;
  FASTATTN_CHECK(cudaGetDevice(&device));
  FASTATTN_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int items = s.batch * s.heads * ceil_div(s.seqlen_q, Tiles::kBlockM), blocks = std::min(items, multiprocessors);
  const int together = heads_together(s.batch * s.key_heads, key_bytes) * (s.heads / s.key_heads);
  // Items that need equally long, or ever less time, need no counter, which costs a launch that clears it.
  const bool unmasked = p.mask.band_lo <= 1 - s.seqlen_q && p.mask.band_hi >= s.seqlen_k - 1;
  const bool ordered = p.mask.tiles == nullptr && (unmasked || together == s.batch * s.heads);
  const Arguments a{p,
                    matrix_map(p.q, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, Tiles::kBlockM),
                    matrix_map(p.k, s.head_dim_k, keys.first, keys.count, s.key_heads, s.batch, Tiles::kBlockN),
                    matrix_map(p.v, s.head_dim_v, keys.first, keys.count, s.key_heads, s.batch, Tiles::kBlockN),
                    matrix_map(p.out, s.head_dim_v, 0, s.seqlen_q, s.heads, s.batch, kGroupRows),
                    keys.first,
                    items,
                    together,
                    ordered || items <= 2 * blocks ? nullptr : next_item};
  if (a.next_item != nullptr) FASTATTN_CHECK(cudaMemsetAsync(next_item, 0, sizeof(int), stream));
  const bool drops = p.dropout.rng_state != nullptr;
  const auto kernel = drops ? forward_sm90_kernel<T, Tiles, true> : forward_sm90_kernel<T, Tiles, false>;
  launch_with_registers<typename Tiles::Registers>("forward_sm90_kernel", kernel, dim3(blocks), sizeof(Shared<Tiles>),
                                                   stream, a);
}

}  // namespace

TileSize forward_sm90_tile(int head_dim) {
  return with_tiles<Tiles>(head_dim, [](auto tiles) { return TileSize{tiles.kBlockM, tiles.kBlockN}; });
}

void forward_sm90(const Forward& p, int* next_item, cudaStream_t stream) {
  const auto with_size = [&](auto tiles) {
    using Size = decltype(tiles);
    p.dtype == DType::bfloat16 ? run<__nv_bfloat16, Size>(p, next_item, stream)
                               : run<__half, Size>(p, next_item, stream);
  };
  p.mask.has_matrix() ? with_tiles<BlockTiles>(head_dim(p.shape), with_size)
                      : with_tiles<Tiles>(head_dim(p.shape), with_size);
}

}  // namespace fastattn::attention
