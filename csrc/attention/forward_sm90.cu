// Forward of attention on Hopper, one pass over the keys.   Formula, shapes and masks: attention.h
// Tiles, shared memory, work items and the producer: forward_sm90_pipeline.cuh
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 1; Shah et al. 2024, FlashAttention-3,
//   arXiv:2407.08608, for warp specialisation and the two overlaps.
// Grid: a block per multiprocessor. It computes one work item (batch, head, tile of kBlockM queries) after the other:
//   the last queries of a head first, as they have the longest loop under a causal mask, and together the heads whose
//   keys and values fit in the L2 cache.
// Short sequences, Lq and Lk up to 128, head dimension up to 128: a (batch, head) is one tile of queries and one of
//   keys, so that everything is read once, in one launch. At head dimension 64, 128 queries and keys, a tile reads and
//   writes 64 KiB, 2.1 us of a multiprocessor's share of 4 TB/s. k of the next tile is copied at the same time, q and v
//   after the product of the scores. The sm_80 kernel reads the same bytes, with two blocks a multiprocessor, and
//   mma.sync at half the rate; only a record can show which is faster. Beyond head dimension 128 the keys are two
//   tiles. Up to 128 keys there are no lists: every tile is a partial one.
// Roles: one thread of the producer warpgroup copies by TMA; each consumer warpgroup owns 64 queries.
// Registers of a consumer thread: scores (kBlockN / 2), their exponentials packed (kBlockN / 4), sum (kHeadDim / 2).
// Shared memory: the queries, two stages of keys and of values, the output before it is stored.
// Overlap: while a warpgroup computes the softmax of tile i, tensor cores compute its P V of tile i - 1 and, as
//   warpgroups issue in turns, the products of another warpgroup.
// Work: 2 (Dk + Dv) FLOPs a score of a visited tile; bytes: q and out once, k and v once a query tile, mostly from L2.
// Compiled offline, nvcc 13.0 (no GPU has timed it yet): nothing spills, and all exponentials of a tile, 64 a thread
//   and two factors, are between the wait for its scores and the wait for the last P V. tests/codegen asserts both.
// Bias of 16 bits in pairs, a tile of 64 x 128 scores: 32 loads a thread, 16 under way at a time, and 320 instructions;
//   elements that are not in pairs: 64 loads, 940 instructions. With a branch on the type at each element it was 64
//   loads, each waited for before the next, and 1500 instructions. Estimated, from two latencies of L2 a tile where
//   there were 64: over twice as fast. With 32 loads under way 2 to 10 registers are spilled.
// Dropped: 240 registers for a consumer and 24 for the producer, which then spills 32 to 44 bytes; a template parameter
//   for the kind of mask: once loaded, band, intervals and bits are one word a row, and full tiles have no mask code.
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
// exponents. kFolded: one multiply-add an element; else the maximum is subtracted first, as a bias of finfo.min times
// log2(e) would overflow.
template <bool kMasked, bool kFolded, int kCount>
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
    shift[r] = kMasked && max[r] == -kInfinity ? 0.0f : kFolded ? max[r] * unit : max[r];
    rows[r].rescale = exp2_approximate(kFolded ? rows[r].max * unit - shift[r] : (rows[r].max - shift[r]) * unit);
    rows[r].max = max[r];
    rows[r].sum *= rows[r].rescale;
  }
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    s[i] = exp2_approximate(kFolded ? fmaf(s[i], unit, -shift[row_of(i)]) : (s[i] - shift[row_of(i)]) * unit);
    rows[row_of(i)].sum += s[i];
  }
}

template <class T, class Tiles, bool kGeneral>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, Shared<Tiles>& shared)
      : a_(a), shared_(shared), group_(threadIdx.x / kGroup - 1), thread_(threadIdx.x % kGroup), dropout_(a.p.dropout) {
  }

  __device__ __forceinline__ void run() {
    if (group_ == Tiles::kConsumers - 1) named_barrier_arrive(kTurn, 2 * kGroup);  // group 0 has the first turn
    for (int turn = 0;; turn ^= 1) {
      shared_.full_q.wait(turn);
      const int index = shared_.item;
      if (index < 0) break;
      attend(item_at<Tiles>(a_, index));
    }
    if (thread_ == 0) bulk_wait<0>();
  }

 private:
  static constexpr int kHeadDim = Tiles::kHeadDim, kBlockN = Tiles::kBlockN;
  using Yes = std::integral_constant<bool, true>;
  using No = std::integral_constant<bool, false>;

  __device__ __forceinline__ void attend(const WorkItem& item) {
    float out[kHeadDim / 2], s[kBlockN / 2];
    uint32_t p[kBlockN / 16][4];
    RowState rows[2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i++) out[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++)
      rows[r].m = item.m0 + group_ * kGroupRows + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * r;
    // Without kGeneral the scale is folded into the exponent's unit: it is positive, so the maximum may be scaled
    // later.
    const float unit = kGeneral ? kLog2e : a_.p.softmax_scale * kLog2e;

    // The first tile is always treated as a masked one. The first key of a tile is read one tile ahead, from memory.
    const int masked_tiles = kGeneral || item.loop.count == 0 ? item.loop.count : max(item.loop.partial, 1);
    const auto first_key = [&](int i) { return i < masked_tiles ? item.loop.tile(i) * kBlockN : 0; };
    int n0 = first_key(0), next_n0 = first_key(1);

    if (item.loop.count > 0) {
      shared_.full_k[keys_.stage].wait(keys_.phase);
      wgmma_fence();
      start_scores(s);
      wgmma_wait<0>(s);
      release_keys();
      load_mask(item, n0, rows);
      if constexpr (kGeneral) general_scores(s, item, n0, rows);
      softmax<true, !kGeneral>(s, rows, unit);
      clear_values(item, n0);
      pack(p, s, item, n0, rows);
    }
    // Tile i: its scores and the P V of tile i - 1 are started together, and its softmax overlaps the P V.
    const auto step = [&](int i, auto kind) {
      constexpr bool masked = decltype(kind)::value;
      if (masked) n0 = next_n0, next_n0 = first_key(i + 1);
      shared_.full_k[keys_.stage].wait(keys_.phase);
      shared_.full_v[values_.stage].wait(values_.phase);
      named_barrier_sync(kTurn + group_, 2 * kGroup);
      wgmma_fence(out, p);
      start_scores(s);
      start_sum(out, p);
      named_barrier_arrive(kTurn + (group_ + 1) % Tiles::kConsumers, 2 * kGroup);
      if (masked) load_mask(item, n0, rows);
      wgmma_wait<1>(s);
      release_keys();
      if constexpr (kGeneral) general_scores(s, item, n0, rows);
      softmax<masked, !kGeneral>(s, rows, unit);
      // Never true. Without a memory access that depends on the softmax, ptxas moves the wait to before the softmax.
      shared_.full_q.arrive_if(rows[0].sum + rows[1].sum < 0.0f);
      wgmma_wait<0>(out);
      release_values();
      if (masked) clear_values(item, n0);
      pack(p, s, item, n0, rows);
#pragma unroll
      for (int j = 0; j < kHeadDim / 2; j++) out[j] *= rows[row_of(j)].rescale;
    };
    int i = 1;
#pragma unroll 1
    for (; i < masked_tiles; i++) step(i, Yes{});
    if constexpr (!kGeneral) {
#pragma unroll 1
      for (; i < item.loop.count; i++) step(i, No{});
    }
    if (!Tiles::kOutOverQueries && item.loop.count > 0) release_queries();
    if (item.loop.count > 0) {
      shared_.full_v[values_.stage].wait(values_.phase);
      wgmma_fence(out, p);
      start_sum(out, p);
      wgmma_wait<0>(out);
      release_values();
    }
    store(item, out, rows, unit);
    if (Tiles::kOutOverQueries || item.loop.count == 0) release_queries();
  }

  // s = q k^T
  __device__ __forceinline__ void start_scores(float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int column = 0; column < kHeadDim; column += 16)
      wgmma<T, kBlockN, false, false>(s, along_columns<Tiles::kBlockM>(shared_.q, group_ * kGroupRows, column),
                                      along_columns<kBlockN>(shared_.k[keys_.stage], 0, column), column > 0);
    wgmma_commit();
  }

  // out += p v
  __device__ __forceinline__ void start_sum(float (&out)[kHeadDim / 2], const uint32_t (&p)[kBlockN / 16][4]) {
#pragma unroll
    for (int line = 0; line < kBlockN; line += 16)
      wgmma<T, kHeadDim, true>(out, p[line / 16], along_lines<kBlockN>(shared_.v[values_.stage], line, 0), true);
    wgmma_commit();
  }

  // Which keys of the tile from n0 on are visible to the two rows.
  __device__ __forceinline__ void load_mask(const WorkItem& item, int n0, RowState (&rows)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
      rows[r].visible =
          visible_bits<kBlockN>(a_.p.mask, item.b, item.h, rows[r].m, a_.p.shape.seqlen_q, n0, a_.p.shape.seqlen_k);
  }

  // Scaled scores, the bias added.
  __device__ __forceinline__ void general_scores(float (&s)[kBlockN / 2], const WorkItem& item, int n0,
                                                 const RowState (&rows)[2]) const {
    const float scale = a_.p.softmax_scale;
    if (a_.p.bias.data == nullptr) {
#pragma unroll
      for (int j = 0; j < kBlockN / 2; j++) s[j] *= scale;
    } else {
      constexpr int kPart = 64;  // keys whose bias is read at the same time: with more, registers are spilled
#pragma unroll
      for (int from = 0; from < kBlockN; from += kPart) {
        const uint32_t visible[2] = {rows[0].visible >> from / 4, rows[1].visible >> from / 4};
        if (((visible[0] | visible[1]) & first_bits(kPart / 4)) == 0) continue;
        for_each_bias<T, kPart>(a_.p.bias, item.b, item.h, rows[0].m, n0 + from, visible,
                                [&](int i, float bias) { s[from / 2 + i] = fmaf(s[from / 2 + i], scale, bias); });
      }
    }
  }

  // Sets values of keys that take no part to zero, in the tile from n0 on: they may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_values(const WorkItem& item, int n0) {
    const Mask& mask = a_.p.mask;
    if (mask.columns == nullptr || all_columns_take_part<kBlockN>(mask, item.b, n0)) return;
    shared_.full_v[values_.stage].wait(values_.phase);
    const int line = thread_, n = n0 + line;
    if (line < kBlockN && n < a_.p.shape.seqlen_k && !takes_part(mask, item.b, n))
      clear_line(shared_.v[values_.stage], line);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
  }

  // p = dropout(s) without its factor, as the A of the next product.
  __device__ __forceinline__ void pack(uint32_t (&p)[kBlockN / 16][4], float (&s)[kBlockN / 2], const WorkItem& item,
                                       int n0, const RowState (&rows)[2]) const {
    if (kGeneral && dropout_.active()) {
      const int64_t first = (static_cast<int64_t>(item.b) * a_.p.shape.heads + item.h) * a_.p.shape.seqlen_q;
#pragma unroll
      for (int column = 0; column < kBlockN; column += 32) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint32_t kept = dropout_.kept_by_quad(first + rows[r].m, (n0 + column) / 8) >> thread_ % 4 * 2;
#pragma unroll
          for (int j = 0; j < 8; j++)
            if ((kept >> (j / 2 * 8 + j % 2) & 1) == 0) s[column / 2 + j / 2 * 4 + 2 * r + j % 2] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBlockN / 4; j++) p[j / 4][j % 4] = pack_word<T>(s[2 * j], s[2 * j + 1]);
  }

  __device__ __forceinline__ void store(const WorkItem& item, const float (&out)[kHeadDim / 2], RowState (&rows)[2],
                                        float unit) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = quad_sum(rows[r].sum);
      const bool empty = sum == 0.0f;
      factor[r] = empty ? 0.0f : (kGeneral && dropout_.active() ? dropout_.scale() : 1.0f) / sum;
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
      stmatrix(shared_.out_panel(column / kPanel) + swizzled(line, column % kPanel / 8 + lane / 16), words);
    }
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    if (thread_ == 0) {
      const int first = group_ * kGroupRows;
#pragma unroll
      for (int panel = 0; panel < Tiles::kPanels; panel++)
        tma_store(a_.out, shared_.out_panel(panel) + first * kLineBytes, panel * kPanel, item.m0 + first, item.h,
                  item.b);
      bulk_commit();
      if (Tiles::kOutOverQueries) bulk_wait_read<0>();
    }
    __syncwarp();  // before the next item's products
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
  Ring keys_, values_;
};

// kGeneral: with a bias, dropout or a scale that is not positive.
template <class T, class Tiles, bool kGeneral>
__global__ void __launch_bounds__(Tiles::Registers::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ Arguments a) {
  Shared<Tiles>& shared = shared_memory<Shared<Tiles>>();
  if (threadIdx.x == 0) {
    shared.full_q.init(1), shared.empty_q.init(Tiles::kConsumers);
    for (int stage = 0; stage < kStages; stage++) {
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
    Consumer<T, Tiles, kGeneral>(a, shared).run();
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
  // If all items need the same time, blocks use a fixed stride, which saves the launch that clears the counter.
  const bool alike = s.seqlen_q <= Tiles::kBlockM && s.seqlen_k <= kMaxShort;
  const Arguments a{p,
                    matrix_map(p.q, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, Tiles::kBlockM),
                    matrix_map(p.k, s.head_dim_k, keys.first, keys.count, s.key_heads, s.batch, Tiles::kBlockN),
                    matrix_map(p.v, s.head_dim_v, keys.first, keys.count, s.key_heads, s.batch, Tiles::kBlockN),
                    matrix_map(p.out, s.head_dim_v, 0, s.seqlen_q, s.heads, s.batch, kGroupRows),
                    keys.first,
                    items,
                    heads_together(s.batch * s.key_heads, key_bytes) * (s.heads / s.key_heads),
                    items > blocks && !alike ? next_item : nullptr};
  if (a.next_item != nullptr) FASTATTN_CHECK(cudaMemsetAsync(next_item, 0, sizeof(int), stream));
  const bool general = p.bias.data != nullptr || p.dropout.rng_state != nullptr || p.softmax_scale <= 0.0f;
  launch_with_registers<typename Tiles::Registers>(
      "forward_sm90_kernel", general ? forward_sm90_kernel<T, Tiles, true> : forward_sm90_kernel<T, Tiles, false>,
      dim3(blocks), sizeof(Shared<Tiles>), stream, a);
}

}  // namespace

TileSize forward_sm90_tile(int head_dim) {
  return with_tiles<Tiles>(head_dim, [](auto tiles) { return TileSize{tiles.kBlockM, tiles.kBlockN}; });
}

void forward_sm90(const Forward& p, int* next_item, cudaStream_t stream) {
  with_tiles<Tiles>(std::max(p.shape.head_dim_k, p.shape.head_dim_v), [&](auto tiles) {
    using Size = decltype(tiles);
    p.dtype == DType::bfloat16 ? run<__nv_bfloat16, Size>(p, next_item, stream)
                               : run<__half, Size>(p, next_item, stream);
  });
}

}  // namespace fastattn::attention
