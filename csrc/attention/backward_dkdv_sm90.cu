// dk and dv on Hopper, and dq where it may be added up in memory.   Formulas: backward.h
// Tiles, shared memory, work items and the producer: backward_dkdv_sm90_pipeline.cuh
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2; Shah et al. 2024, FlashAttention-3,
//   arXiv:2407.08608.
// Grid: a block per (batch, key head, kBlockN keys): the first keys of a head first, as they have the longest loop
//   under a causal mask, and together the heads whose queries fit in the L2 cache. It loops over the queries of every
//   head of its group, so that their dk and dv add up.
// Roles: one thread of the producer warpgroup copies by TMA; each of two consumer warpgroups owns 64 keys. Their scores
//   are transposed, keys by queries: in dv += P^T dout and dk += dS^T q, P^T and dS^T are operands in registers.
// Registers of a consumer thread: S^T and dP^T (kBlockM / 2 each), dk and dv (kHeadDim / 2 each). Beyond a head
//   dimension of 128 these do not fit: there are two launches then, one for dk and one for dv, which needs no dP.
// Shared memory: k and v; q and dout, two stages (one of dout beyond 128, where memory is full).
// Overlap: exponentials overlap dP's product; with 64 queries a tile, the work on dS overlaps dv's product.
// Work: 4 (Dk + Dv) FLOPs a visited score, 4 products, or 5 beyond 128; bytes: k, v, dk and dv once, q and dout once a
//   key tile, mostly from L2.
// With dq (Outputs::dk_dv_dq; backward_sum_sm90), 5 products in all, without a bias and up to head dimension 128: both
//   consumers write dS to shared memory, double buffered. Each starts dk's product, waits for the other's dS, and
//   computes a half of the tile's dq. It keeps this half in registers, and hands it over while the product of the next
//   scores runs: handed over at once, tensor cores were idle for 200 to 350 of a tile's 4500 clocks (counted). A warp
//   of the producer's warpgroup, one for each consumer, adds it to a float32 sum in memory: 16 KiB in the order of the
//   accumulators, so that shared memory has no bank conflicts.
//   A counter of each part of the sum says how many tiles of keys were added. A warp waits for its turn,
//   adds, waits until the sum is in memory, and raises the counter; the first one stores, so that nothing is cleared.
//   All blocks go from the last query to the first: under a causal mask and in a window they then rarely wait for each
//   other, but for the first tile.
//   2 Dk more FLOPs a score, and 4 Dk more bytes for each query and tile, read and written in L2.
// Compiled offline, nvcc 13.0: nothing spills, which tests/codegen asserts. Instructions of a thread for a full tile of
//   the kernel that sums dq: D 128 425, with dropout, whose draws are not counted, 769, D 64 with dropout 1154. When
//   each product computed its descriptors from an address they were 630, 996 and 1337. Limits of a tile, in clocks of
//   tensor cores, shared memory, issue: D 128 2560, 2944, 850 / 1538; D 64 with dropout 2560, 2816, 2308.
// H200, bf16, the whole backward, ms, cuDNN's in brackets (large products reach 794 TFLOP/s); measured before those
//   changes, which changed no time by over 2 %:
//   2 x 16 heads, 8192 tokens, D 128             5.13 (4.88), 536 TFLOP/s; causal 2.56 (2.57), 537 TFLOP/s
//   2 x 32 heads, 8192 tokens, D 64              5.59 (5.96), 492 TFLOP/s, tensor cores busy for 54 % of the time
//   1 x 8 heads, 8192 tokens                     D 128: 1.30, with dropout 1.72; D 64: 0.711, with dropout 1.27
//   16 x 32 heads, 1024 tokens, D 64, padding    0.682 (1.40)
//   8 x 32 heads, 2048 tokens, D 64, half of the 64 x 64 blocks masked: 1.87 (2.60)
// Bias at head dimension 64, a tile of 64 x 128 scores up to P^T: 64 loads a thread, 16 under way at a time, and 1000
//   instructions; with a branch on the type at each element each load was waited for before the next, and it was 2300
//   instructions. More loads under way spill registers.
// Dropped: all exponentials before the wait for dP with 128 queries, without dropout. ptxas has a quarter of them
//   there, and an H200 needs 2 to 5 % less time: 2 x 32 heads, 8192 tokens 5.72 ms, and 5.99 with all; dq added in any
//   order, on an H200 at most 4 % faster, in long causal calls 5 to 12 %, and with other bits in
//   every run; pairs of a bias. They are along keys, and a lane has neighbouring queries: each pair needs a shuffle,
//   which uses the unit of the load that it saves, and as many lines of the cache are read; one kernel with a branch
//   for dk and dv beyond 128: each alone spills nothing, both together 72 to 396 bytes; dv's product overlapping the
//   work on dS with 128 queries, for which P, S and dP would need 160 registers; dq in float32 by TMA in rows of 32
//   floats, whose stores to shared memory had bank conflicts; 80 queries a tile at head dimension 128, as the product
//   of dq takes queries by 64; more registers for the senders, which serialised wgmma; dq handed over after dP's
//   product has started, which spills 256 to 384 bytes; the next scores' product started before the wait for dq, which
//   made ptxas serialise wgmma.
// Open. Dq in any order, 4 % and in long causal calls 5 to 12 % faster, bounds what each of these can bring:
//   a poll of the counter by relaxed loads and one fence: an acquiring load empties the L1 cache, with the mask's bits;
//   two buffers of dq a consumer, so that a late sender does not hold it up: at head dimension 128 they need all of
//     shared memory and `tiles` behind the swizzled tiles, at 64 they fit only without dropout;
//   a larger bound in heads_together() here: a chain of blocks that wait for each other is as long as the number of
//     multiprocessors divided by the heads;
//   without a mask, blocks that start at different tiles of queries, in groups that are certainly resident together.
//   In public: FlashAttention 3 in order at D 64 without a mask, 1024, 4096 and 16384 tokens, has 298, 394 and 507
//     TFLOP/s, with shifted starts 339, 468 and 514 (its pull request 2207); causal, D 128, 8192 tokens: 575 in any
//     order, 464 from the last query, as here (1893).
#include "attention/backward_dkdv_sm90_pipeline.cuh"
#include "common/check.h"

namespace fastattn::attention {
namespace {

// Kernels for scores without anything, with dropout, and with all that the kernels without dq take: a bias, dropout.
enum class Scores { plain, dropout, general };

template <class T, class Tiles, Scores kScores, Outputs kOutputs>
class Consumer {
 public:
  static constexpr bool kGeneral = kScores == Scores::general;
  static constexpr bool kDk = kOutputs != Outputs::dv, kDv = kOutputs != Outputs::dk;
  static constexpr bool kSumsDq = kOutputs == Outputs::dk_dv_dq;

  __device__ __forceinline__ Consumer(const Arguments& a, Shared<Tiles, kOutputs>& shared)
      : a_(a), shared_(shared), item_(shared.item), group_(warpgroup() - 1), thread_(threadIdx.x % kGroup),
        dropout_(a.p.dropout) {}

  __device__ __forceinline__ void run() {
    float dk[kDk ? kHeadDim / 2 : 1], dv[kDv ? kHeadDim / 2 : 1];
    for (float& sum : dk) sum = 0.0f;
    for (float& sum : dv) sum = 0.0f;
    shared_.full_kv.wait(0);
    if constexpr (kDk) clear_keys();
    if constexpr (kSumsDq) {
#pragma unroll 1
      for (;;) {
        shared_.full_q[places_.queries().stage].wait(places_.queries().phase);
        const QueryTile tile = shared_.tiles[places_.number];
        if (tile.m0 < 0) break;
        tile.is_partial ? step<true>(dk, dv, tile.h, tile.m0) : step<false>(dk, dv, tile.h, tile.m0);
      }
      hand_over_dq();
      named_barrier_sync(kEmpty + group_, kGroup + 32);
      named_barrier_arrive(kFull + group_, kGroup + 32);
      named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both have read k
    } else {
      for_each_tile(dk, dv);
    }
    if constexpr (kDk) write_lines<T, kHeadDim>(shared_.k, group_ * kGroupRows, thread_, dk, a_.p.softmax_scale);
    if constexpr (kDv)
      write_lines<T, kHeadDim>(shared_.v, group_ * kGroupRows, thread_, dv,
                               drops() ? dropout_.scale() : 1.0f);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    if (thread_ > 0) return;
    const int first = group_ * kGroupRows;
#pragma unroll
    for (int panel = 0; panel < Tiles::kPanels; panel++) {
      if (kDk)
        tma_store(a_.dk, shared_.k[panel] + first * kLineBytes, panel * kPanel, item_.n0 + first, item_.h_k, item_.b);
      if (kDv)
        tma_store(a_.dv, shared_.v[panel] + first * kLineBytes, panel * kPanel, item_.n0 + first, item_.h_k, item_.b);
    }
    bulk_commit();
    bulk_wait<0>();
  }

 private:
  static constexpr int kHeadDim = Tiles::kHeadDim, kBlockM = Tiles::kBlockM;
  using Sum = float[kHeadDim / 2];
  using Tile = float[kBlockM / 2];
  using Packed = uint32_t[kBlockM / 16][4];  // an operand of the next product

  __device__ __forceinline__ bool drops() const {
    return kScores == Scores::dropout || (kGeneral && dropout_.active());
  }

  template <class Dk, class Dv>
  __device__ __forceinline__ void for_each_tile(Dk& dk, Dv& dv) {
#pragma unroll 1
    for (int h = item_.h_k * item_.group; h < (item_.h_k + 1) * item_.group; h++) {
      const TileLoop loop = loop_of<Tiles, kOutputs>(a_, item_, h);
      key_sum_[0] = key_sum_[1] = 0.0f;
#pragma unroll 1
      for (int i = 0; i < loop.count; i++) step<true>(dk, dv, h, loop.tile(i) * kBlockM);
      if (kDk) store_key_sums(h);
    }
  }

  // The tile of queries from m0 on of head h. The order of work depends on what fits into registers.
  template <bool kMasked, class Dk, class Dv>
  __device__ __forceinline__ void step(Dk& dk, Dv& dv, int h, int m0) {
    Packed p, ds;  // here, since products read them until the wait of finish_step
    if constexpr (kOutputs == Outputs::dk)
      step_dk<kMasked>(dk, ds, h, m0);
    else if constexpr (kOutputs == Outputs::dv)
      step_dv<kMasked>(dv, p, h, m0);
    else if constexpr (kBlockM == 64)
      step_64_queries<kMasked>(dk, dv, p, ds, h, m0);
    else
      step_128_queries<kMasked>(dk, dv, p, ds, h, m0);
    if constexpr (!kSumsDq) finish_step<0>(dk, dv);
  }

  // kUnderWay: products that use neither the queries nor their gradients.
  template <int kUnderWay, class Dk, class Dv>
  __device__ __forceinline__ void finish_step(Dk& dk, Dv& dv) {
    wgmma_wait<kUnderWay>(dk, dv);
    if (thread_ == 0) {
      shared_.empty_q[places_.queries().stage].arrive();
      shared_.empty_dout[places_.gradients().stage].arrive();
    }
    places_.advance();
  }

  // S^T and dP^T are started together; the exponentials overlap dP's product, the work on dS overlaps dv's.
  template <bool kMasked>
  __device__ __forceinline__ void step_64_queries(Sum& dk, Sum& dv, Packed& p, Packed& ds, int h, int m0) {
    Tile s, dp;
    uint32_t bits[2];
    start_products<kMasked>(s, dp, m0);
    load_mask<kMasked>(bits, h, m0);
    draw_dropout(h, m0);
    wgmma_wait<1>(s);
    make_probabilities<kMasked>(s, h, m0, bits);
    pack(p, s);
    wgmma_fence(dv, p);
    add_lines<T, kHeadDim>(dv, p, dout());
    wgmma_wait<1>(dp);
    make_gradients(ds, s, dp);
    add_dk(dk, dv, ds);
  }

  // With 128 queries S, dP and P together would need too many registers: P is packed after dS, then dv's product
  // starts.
  template <bool kMasked>
  __device__ __forceinline__ void step_128_queries(Sum& dk, Sum& dv, Packed& p, Packed& ds, int h, int m0) {
    Tile s, dp;
    uint32_t bits[2];
    start_products<kMasked>(s, dp, m0);
    load_mask<kMasked>(bits, h, m0);
    wgmma_wait<1>(s);
    make_probabilities<kMasked>(s, h, m0, bits);
    draw_dropout(h, m0);  // not earlier: likewise
    wgmma_wait<0>(dp);
    make_gradients(ds, s, dp);
    if (kScores == Scores::dropout) __syncwarp();  // as the next loads would come earlier, into too few registers
    pack(p, s);
    wgmma_fence(dv, p);
    add_lines<T, kHeadDim>(dv, p, dout());
    add_dk(dk, dv, ds);
  }

  // dk only; another block computes dv.
  template <bool kMasked>
  __device__ __forceinline__ void step_dk(Sum& dk, Packed& ds, int h, int m0) {
    Tile s, dp;
    uint32_t bits[2];
    start_products<kMasked>(s, dp, m0);
    load_mask<kMasked>(bits, h, m0);
    draw_dropout(h, m0);
    wgmma_wait<1>(s);
    make_probabilities<kMasked>(s, h, m0, bits);
    shared_.full_kv.arrive_if(are_negative_zeros(s));
    wgmma_wait<0>(dp);
    make_gradients(ds, s, dp);
    add_lines_to_dk(dk, ds);
  }

  // dv only, which needs no dP.
  template <bool kMasked>
  __device__ __forceinline__ void step_dv(Sum& dv, Packed& p, int h, int m0) {
    Tile s;
    uint32_t bits[2];
    start_scores<kMasked>(s, m0);
    shared_.full_dout[places_.gradients().stage].wait(places_.gradients().phase);
    load_mask<kMasked>(bits, h, m0);
    draw_dropout(h, m0);
    wgmma_wait<0>(s);
    make_probabilities<kMasked>(s, h, m0, bits);
    fence_async_proxy_after_reads();  // of shift; all four warps, as wgmma needs all
    pack(p, s);
    wgmma_fence(dv, p);
    add_lines<T, kHeadDim>(dv, p, dout());
  }

  __device__ __forceinline__ auto& q() { return shared_.q[places_.queries().stage]; }
  __device__ __forceinline__ auto& dout() { return shared_.dout[places_.gradients().stage]; }

  // s = k q^T and dp = v dout^T. While the first runs, the last tile's part of dq goes to its sender; of a partial tile
  // before it, as ptxas would wait for the product first.
  template <bool kMasked>
  __device__ __forceinline__ void start_products(Tile& s, Tile& dp, int m0) {
    if constexpr (kSumsDq && kMasked) hand_over_dq();
    start_scores<kMasked>(s, m0);
    if constexpr (kSumsDq && !kMasked) hand_over_dq();
    shared_.full_dout[places_.gradients().stage].wait(places_.gradients().phase);
    wgmma_fence();
    multiply_lines<T, kHeadDim, kBlockM>(dp, shared_.v, group_ * kGroupRows, dout());
  }
  template <bool kMasked>
  __device__ __forceinline__ void start_scores(Tile& s, int m0) {
    shared_.full_q[places_.queries().stage].wait(places_.queries().phase);
    if (kMasked) clear_queries(m0);
    wgmma_fence();
    multiply_lines<T, kHeadDim, kBlockM>(s, shared_.k, group_ * kGroupRows, q());
  }

  // Starts dk += ds q. If dq is computed here, it also finishes the step.
  __device__ __forceinline__ void add_dk(Sum& dk, Sum& dv, Packed& ds) {
    if constexpr (kSumsDq)
      add_dk_and_dq(dk, dv, ds);
    else
      add_lines_to_dk(dk, ds);
  }
  __device__ __forceinline__ void add_lines_to_dk(Sum& dk, Packed& ds) {
    fence_async_proxy_after_reads();
    wgmma_fence(dk, ds);
    add_lines<T, kHeadDim>(dk, ds, q());
  }

  // s = exp(S - lse)
  template <bool kMasked>
  __device__ __forceinline__ void make_probabilities(Tile& s, int h, int m0, const uint32_t (&bits)[2]) const {
    if (kGeneral && a_.p.bias.data != nullptr) return make_biased_probabilities(s, h, m0, bits);
    const float unit = a_.p.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kBlockM / 2; j += 4) {
      const float2 shift = query_pair(shared_.shift[places_.queries().stage], j);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[j + e] = exp2_approximate(s[j + e] * unit - (e % 2 == 0 ? shift.x : shift.y));
        if (kMasked && !is_visible(bits, j, e)) s[j + e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void make_biased_probabilities(Tile& s, int h, int m0, const uint32_t (&bits)[2]) const {
    constexpr int kPart = 32;  // queries whose bias is read at the same time: with more, registers are spilled
#pragma unroll
    for (int from = 0; from < kBlockM; from += kPart) {
      const uint32_t visible[2] = {bits[0] >> from / 4, bits[1] >> from / 4};
      if (((visible[0] | visible[1]) & first_bits(kPart / 4)) != 0) {
        for_each_bias<T, kPart, true>(a_.p.bias, item_.b, h, first_key(), m0 + from, visible, [&](int i, float bias) {
          const float2 shift = query_pair(shared_.shift[places_.queries().stage], from / 2 + i / 4 * 4);
          float& score = s[from / 2 + i];
          const float above = fmaf(score, a_.p.softmax_scale, bias) - (i % 2 == 0 ? shift.x : shift.y);
          score = is_visible(visible, i / 4 * 4, i % 4) ? exp2_approximate(above * kLog2e) : 0.0f;
        });
      } else {
#pragma unroll
        for (int i = 0; i < kPart / 2; i++) s[from / 2 + i] = 0.0f;
      }
    }
  }

  // ds = dS, packed as an operand.
  __device__ __forceinline__ void make_gradients(Packed& ds, const Tile& s, Tile& dp) {
#pragma unroll
    for (int j = 0; j < kBlockM / 2; j += 4) {
      const float2 delta = query_pair(shared_.delta[places_.gradients().stage], j);
      const uint32_t kept = drops() ? kept_bits(j) : ~0u;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (drops()) dp[j + e] = is_kept(kept, e) ? dp[j + e] * dropout_.scale() : 0.0f;
        dp[j + e] = s[j + e] * (dp[j + e] - (e % 2 == 0 ? delta.x : delta.y));
        if (kGeneral) key_sum_[e / 2] += dp[j + e];
      }
#pragma unroll
      for (int r = 0; r < 2; r++) ds[j / 8][j / 4 % 2 * 2 + r] = pack_word<T>(dp[j + 2 * r], dp[j + 2 * r + 1]);
    }
  }

  // p = s, or 0 where it is dropped, as an operand.
  __device__ __forceinline__ void pack(Packed& p, const Tile& s) const {
#pragma unroll
    for (int j = 0; j < kBlockM / 2; j += 4) {
      const uint32_t kept = drops() ? kept_bits(j) : ~0u;
#pragma unroll
      for (int r = 0; r < 2; r++)
        p[j / 8][j / 4 % 2 * 2 + r] = pack_word<T>(is_kept(kept, 2 * r) ? s[j + 2 * r] : 0.0f,
                                                   is_kept(kept, 2 * r + 1) ? s[j + 2 * r + 1] : 0.0f);
    }
  }

  // dk's product, and the tile's part of dq, which needs the dS of both warpgroups: each computes a half of it.
  __device__ __forceinline__ void add_dk_and_dq(Sum& dk, Sum& dv, Packed& ds) {
    auto& ds_tile = shared_.ds[places_.queries().stage];
    const int lane = thread_ % 32, line = group_ * kGroupRows + thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < kBlockM; column += 16)
      stmatrix(ds_tile[column / kPanel] + swizzled(line, column % kPanel / 8 + lane / 16), ds[column / 16]);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    wgmma_fence(dk, ds);
    add_lines<T, kHeadDim>(dk, ds, q());
    named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both wrote dS and read the last one
    const int row = Tiles::kDqByColumns ? 0 : group_ * kGroupRows, column = Tiles::kDqByColumns ? group_ * kPanel : 0;
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < kBlockN; key += 16)
      wgmma<T, kPanel, true, true>(dq_, along_lines<kBlockN>(ds_tile, key, row),
                                   along_lines<kBlockN>(shared_.k, key, column), key > 0);
    wgmma_commit();
    finish_step<1>(dk, dv);
    wgmma_wait<0>(dq_);
    has_dq_ = true;
  }

  // Gives the last tile's part of dq to its sender.
  __device__ __forceinline__ void hand_over_dq() {
    if (!has_dq_) return;
    named_barrier_sync(kEmpty + group_, kGroup + 32);
#pragma unroll
    for (int i = 0; i < kPanel / 8; i++)
      shared_.dq[group_][i][thread_] = make_float4(dq_[4 * i], dq_[4 * i + 1], dq_[4 * i + 2], dq_[4 * i + 3]);
    fence_async_proxy();
    named_barrier_arrive(kFull + group_, kGroup + 32);
  }

  // The queries of the tile that see the thread's two keys.
  template <bool kMasked>
  __device__ __forceinline__ void load_mask(uint32_t (&bits)[2], int h, int m0) {
#pragma unroll
    for (int r = 0; kMasked && r < 2; r++)
      bits[r] = visible_bits<kBlockM>(a_.p.by_key, item_.b, h, first_key() + 8 * r, a_.p.shape.seqlen_k, m0,
                                      a_.p.shape.seqlen_q);
  }

  // Sets keys that take no part and their values to zero: they may be NaN, and 0 * NaN is NaN in dS and in dq.
  __device__ __forceinline__ void clear_keys() {
    const Mask& mask = a_.p.by_query;
    if (mask.columns == nullptr) return;
    const int line = threadIdx.x - kGroup, n = item_.n0 + line;
    if (line < kBlockN && n < a_.p.shape.seqlen_k && !takes_part(mask, item_.b, n))
      clear_line(shared_.k, line), clear_line(shared_.v, line);
    fence_async_proxy();
    named_barrier_sync(kBothBarrier, kConsumers * kGroup);
  }

  // The same for queries that may attend to nothing, and their gradients. Each warpgroup does it for itself.
  __device__ __forceinline__ void clear_queries(int m0) {
    const auto is_empty = [&](int line) {
      return m0 + line < a_.p.shape.seqlen_q && shared_.shift[places_.queries().stage][line] == kInfinity;
    };
    bool some = false;
    for (int line = thread_ % 32; line < kBlockM; line += 32) some |= is_empty(line);
    if (__ballot_sync(0xffffffffu, some) == 0) return;  // all warps decide the same
    shared_.full_dout[places_.gradients().stage].wait(places_.gradients().phase);
    if (thread_ < kBlockM && is_empty(thread_))
      clear_line(q(), thread_), clear_line(dout(), thread_);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
  }

  // Dropout of the warp's 16 keys, for all queries of the tile.
  __device__ __forceinline__ void draw_dropout(int h, int m0) {
    if (!drops()) return;
    const DropoutMask mask(a_.p.dropout);  // with the seed, which would need registers all the time
    const int warp = group_ * 4 + thread_ / 32, n = item_.n0 + warp * 16;
    const int64_t row0 = (static_cast<int64_t>(item_.b) * a_.p.shape.heads + h) * a_.p.shape.seqlen_q + m0;
    __syncwarp();
    for (int i = thread_ % 32; i < 2 * kBlockM; i += 32)
      shared_.kept[warp][i / 2][i % 2] = static_cast<unsigned char>(mask.kept(row0 + i / 2, n / 8 + i % 2));
    __syncwarp();
  }

  // Accumulators j .. j + 3 are two queries by two keys. Their dropout, a byte for each half of the keys:
  __device__ __forceinline__ uint32_t kept_bits(int j) const {
    const auto* const bytes = &shared_.kept[group_ * 4 + thread_ / 32][2 * j + thread_ % 4 * 2][0];
    return *reinterpret_cast<const uint32_t*>(bytes) >> thread_ % 32 / 4;
  }
  static __device__ __forceinline__ bool is_kept(uint32_t kept, int e) {
    return (kept >> (e % 2 * 16 + e / 2 * 8) & 1) != 0;
  }
  // Whether accumulator j + e is visible:
  static __device__ __forceinline__ bool is_visible(const uint32_t (&bits)[2], int j, int e) {
    return (bits[e / 2] >> (j / 2 + e % 2) & 1) != 0;
  }
  // The values of the two queries:
  __device__ __forceinline__ float2 query_pair(const float (&values)[kBlockM], int j) const {
    return *reinterpret_cast<const float2*>(&values[2 * j + thread_ % 4 * 2]);
  }
  // The first of the thread's two keys; the second is 8 later.
  __device__ __forceinline__ int first_key() const {
    return item_.n0 + group_ * kGroupRows + thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  // dS of the thread's keys, summed over the queries of head h.
  __device__ __forceinline__ void store_key_sums(int h) const {
    if (a_.p.dbias_keys == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = quad_sum(key_sum_[r]);
      const int n = first_key() + 8 * r;
      if (thread_ % 4 == 0 && n < a_.p.shape.seqlen_k)
        a_.p.dbias_keys[(static_cast<int64_t>(item_.b) * a_.p.shape.heads + h) * a_.p.shape.seqlen_k + n] = sum;
    }
  }

  const Arguments& a_;
  Shared<Tiles, kOutputs>& shared_;
  const WorkItem& item_;  // in shared memory: there are too few registers
  const int group_, thread_;
  const DropoutMask dropout_;
  Places<Tiles> places_;
  float key_sum_[2];
  float dq_[kSumsDq ? kPanel / 2 : 1];  // the last tile's part, until it is handed over
  bool has_dq_ = false;
};

template <class T, class Tiles, Scores kScores, Outputs kOutputs>
__global__ void __launch_bounds__(Registers::kThreads, 1)
    backward_dkdv_sm90_kernel(const __grid_constant__ Arguments a) {
  auto& shared = shared_memory<Shared<Tiles, kOutputs>>();
  if (threadIdx.x == 0) {
    shared.full_kv.init(1);
    for (Barrier& full : shared.full_q) full.init(1);
    for (Barrier& full : shared.full_dout) full.init(1);
    for (Barrier& empty : shared.empty_q) empty.init(kConsumers);
    for (Barrier& empty : shared.empty_dout) empty.init(kConsumers);
    fence_barrier_init();
    shared.item = block_item<Tiles, kOutputs>(a);
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<Registers::kProducer>();
    if (threadIdx.x == 0) produce<Tiles>(a, shared);
    if constexpr (kOutputs == Outputs::dk_dv_dq) {
      const int warp = threadIdx.x / 32;
      if (warp == 1 || warp == 2) send_dq<Tiles>(a, shared, warp - 1);
    }
  } else {
    more_registers<Registers::kConsumer>();
    Consumer<T, Tiles, kScores, kOutputs>(a, shared).run();
  }
}

template <Outputs kOutputs, class T, class Tiles, Scores kScores>
void start(Arguments a, cudaStream_t stream) {
  const Shape& s = a.p.shape;
  const int64_t rows = int64_t{s.seqlen_q} * (s.heads / s.key_heads);
  const int row_bytes = 2 * (s.head_dim_k + s.head_dim_v) + (kOutputs == Outputs::dk_dv_dq ? 4 * s.head_dim_k : 0);
  a.heads_together = heads_together(s.batch * s.key_heads, rows * row_bytes);
  a.dk = matrix_map(a.p.dk, s.head_dim_k, 0, s.seqlen_k, s.key_heads, s.batch, kGroupRows);
  a.dv = matrix_map(a.p.dv, s.head_dim_v, 0, s.seqlen_k, s.key_heads, s.batch, kGroupRows);
  launch_with_registers<Registers>("backward_dkdv_sm90_kernel", backward_dkdv_sm90_kernel<T, Tiles, kScores, kOutputs>,
                                   dim3(s.batch * s.key_heads * ceil_div(s.seqlen_k, kBlockN)),
                                   sizeof(Shared<Tiles, kOutputs>), stream, a);
}

template <class T, class Tiles>
void run(const Backward& p, const PaddedRows& rows, cudaStream_t stream) {
  const Arguments a = arguments(p, rows, Tiles::kBlockM, kBlockN);
  if constexpr (Tiles::kSplit) {
    start<Outputs::dk, T, Tiles, Scores::general>(a, stream);
    start<Outputs::dv, T, Tiles, Scores::general>(a, stream);
  } else {
    start<Outputs::dk_dv, T, Tiles, Scores::general>(a, stream);
  }
}

template <class T, class Tiles>
void run_with_sum(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream) {
  Arguments a = arguments(p, rows, Tiles::kBlockM, kBlockN);
  a.sums = sums;
  p.dropout.rng_state != nullptr ? start<Outputs::dk_dv_dq, T, Tiles, Scores::dropout>(a, stream)
                                 : start<Outputs::dk_dv_dq, T, Tiles, Scores::plain>(a, stream);
}

}  // namespace

TileSize backward_dkdv_sm90_tile(int head_dim) {
  return with_tiles<Tiles>(head_dim, [](auto tiles) { return TileSize{kBlockN, tiles.kBlockM}; });
}

void backward_dkdv_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream) {
  with_tiles<Tiles>(head_dim(p.shape), [&](auto tiles) {
    using Size = decltype(tiles);
    p.dtype == DType::bfloat16 ? run<__nv_bfloat16, Size>(p, rows, stream) : run<__half, Size>(p, rows, stream);
  });
}

void backward_sum_sm90(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream) {
  const auto with_type = [&](auto t) {
    head_dim(p.shape) <= 64 ? run_with_sum<decltype(t), Tiles<64>>(p, rows, sums, stream)
                            : run_with_sum<decltype(t), Tiles<128>>(p, rows, sums, stream);
  };
  p.dtype == DType::bfloat16 ? with_type(__nv_bfloat16{}) : with_type(__half{});
}

}  // namespace fastattn::attention
