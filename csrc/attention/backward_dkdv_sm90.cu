// dk and dv on Hopper, and dq, which is added up in memory.   Formulas: backward.h
// Tiles, shared memory, work items and the producer: backward_dkdv_sm90_pipeline.cuh
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2; Shah et al. 2024, FlashAttention-3,
//   arXiv:2407.08608.
// Grid: a block per (batch, key head, kBlockN keys): the first keys of a head first, as they have the longest loop
//   under a causal mask, and together the heads whose queries fit in the L2 cache. It loops over the queries of every
//   head of its group, so that their dk and dv add up.
// Roles: one thread of the producer warpgroup copies by TMA; each of two consumer warpgroups owns 64 keys. Their scores
//   are transposed, keys by queries: in dv += P^T dout and dk += dS^T q, P^T and dS^T are operands in registers.
// Registers of a consumer thread: S^T and dP^T (kBlockM / 2 each), dk and dv (kHeadDim / 2 each), a part of dq (32).
// Shared memory: k and v; two stages of q and dout, and of dS; a part of dq for each consumer.
// Overlap: exponentials overlap dP's product; with 64 queries a tile, the work on dS overlaps dv's product.
// dq: both consumers write dS to shared memory, double buffered. Each starts dk's product, waits for the other's dS,
//   and computes a half of the tile's dq. It keeps this half in registers, and hands it over while the product of the
//   next scores runs: handed over at once, tensor cores were idle for 200 to 350 of a tile's 4500 clocks (counted). A
//   warp of the producer's warpgroup, one for each consumer, adds it to a float32 sum in memory: 16 KiB in the order of
//   the accumulators, so that shared memory has no bank conflicts.
//   A counter of each part of the sum says how many tiles of keys were added. A warp waits for its turn,
//   adds, waits until the sum is in memory, and raises the counter; the first one stores, so that nothing is cleared.
//   All blocks go from the last query to the first: under a causal mask and in a window they then rarely wait for each
//   other, but for the first tile.
// Bool matrix, a separate kernel: a warpgroup computes only the visible 64 x 64 blocks of a tile, two or one of them
//   at once. dq is computed as a whole, from dS that is 0 elsewhere: with branches in it ptxas serialises wgmma.
// Work: 6 Dk + 4 Dv FLOPs a visited score, 5 products; bytes: k, v, dk and dv once, q, dout and twice dq's sum, in
//   float32, once a key tile, mostly from L2.
// Compiled offline, nvcc 13.0: nothing spills, which tests/codegen asserts. Instructions of a thread for a full tile of
//   the kernel: D 128 425, with dropout, whose draws are not counted, 769, D 64 with dropout 1154. When
//   each product computed its descriptors from an address they were 630, 996 and 1337. Of a bool matrix, D 64: 555 for
//   two full blocks, 395 for one, 912 and 698 for partial ones, 125 for none. Limits of a tile, in clocks of
//   tensor cores, shared memory, issue: D 128 2560, 2944, 850 / 1538; D 64 with dropout 2560, 2816, 2308.
// H200, bf16, the whole backward, ms, cuDNN's in brackets (large products reach 794 TFLOP/s); measured before those
//   changes, which changed no time by over 2 %:
//   2 x 16 heads, 8192 tokens, D 128             5.13 (4.88), 536 TFLOP/s; causal 2.56 (2.57), 537 TFLOP/s
//   2 x 32 heads, 8192 tokens, D 64              5.59 (5.96), 492 TFLOP/s, tensor cores busy for 54 % of the time
//   1 x 8 heads, 8192 tokens                     D 128: 1.30, with dropout 1.72; D 64: 0.711, with dropout 1.27
//   16 x 32 heads, 1024 tokens, D 64, padding    0.682 (1.40)
//   8 x 32 heads, 2048 tokens, D 64, half of the 64 x 64 blocks masked: 1.87 (2.60), when all were computed.
//     1.0 to 1.2 by blocks (estimated): the slower warpgroup has two in 47 % of the tiles, and one in the others
// Dropped: all exponentials before the wait for dP with 128 queries, without dropout. ptxas has a quarter of them
//   there, and an H200 needs 2 to 5 % less time: 2 x 32 heads, 8192 tokens 5.72 ms, and 5.99 with all; dq added in any
//   order, on an H200 at most 4 % faster, in long causal calls 5 to 12 %, and with other bits in
//   every run; a kernel for dq and another one for dk and dv, with 7 products: 5 to 68 % slower in each of 24 calls
//   (512, 2048, 8192 tokens, D 64 and 128, with and without a causal mask and dropout); dv's product overlapping the
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

template <class T, class Tiles, bool kDropout>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, Shared<Tiles>& shared)
      : a_(a), shared_(shared), item_(shared.item), group_(warpgroup() - 1), thread_(threadIdx.x % kGroup),
        dropout_(a.p.dropout) {}

  __device__ __forceinline__ void run() {
    Sum dk, dv;
    for (float& sum : dk) sum = 0.0f;
    for (float& sum : dv) sum = 0.0f;
    shared_.full_kv.wait(0);
    clear_keys();
#pragma unroll 1
    for (;;) {
      shared_.full_q[place_.stage()].wait(place_.phase());
      const QueryTile tile = shared_.tiles[place_.number];
      if (tile.m0 < 0) break;
      if constexpr (Tiles::kBlocks) {
        constexpr int kAcross = kBlockM / kGroupRows;  // blocks
        const uint32_t classes = tile.kind >> 2 * kAcross * group_ & ((1 << 2 * kAcross) - 1);
        const auto compute = [&](auto queries, auto masked, int first) {
          step<decltype(masked)::value, decltype(queries)::value>(dk, dv, tile, first);
        };
        if constexpr (kAcross == 2) {
          classes == 0 ? skip(dk, dv) : with_visible_part(classes, compute);
        } else if (classes == 3) {  // first: otherwise ptxas waits for the product before it hands over dq
          step<false, 64>(dk, dv, tile);
        } else {
          classes == 0 ? skip(dk, dv) : step<true, 64>(dk, dv, tile);
        }
      } else {
        tile.kind != 0 ? step<true, kBlockM>(dk, dv, tile) : step<false, kBlockM>(dk, dv, tile);
      }
    }
    hand_over_dq();
    named_barrier_sync(kEmpty + group_, kGroup + 32);
    named_barrier_arrive(kFull + group_, kGroup + 32);
    named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both have read k
    write_lines<T, kHeadDim>(shared_.k, group_ * kGroupRows, thread_, dk, a_.p.softmax_scale);
    write_lines<T, kHeadDim>(shared_.v, group_ * kGroupRows, thread_, dv, kDropout ? dropout_.scale() : 1.0f);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    if (thread_ > 0) return;
    const int first = group_ * kGroupRows;
#pragma unroll
    for (int panel = 0; panel < Tiles::kPanels; panel++) {
      tma_store(a_.dk, shared_.k[panel] + first * kLineBytes, panel * kPanel, item_.n0 + first, item_.h_k, item_.b);
      tma_store(a_.dv, shared_.v[panel] + first * kLineBytes, panel * kPanel, item_.n0 + first, item_.h_k, item_.b);
    }
    bulk_commit();
    bulk_wait<0>();
  }

 private:
  static constexpr int kHeadDim = Tiles::kHeadDim, kBlockM = Tiles::kBlockM;
  using Sum = float[kHeadDim / 2];
  template <int kQueries>
  using Tile = float[kQueries / 2];
  template <int kQueries>
  using Packed = uint32_t[kQueries / 16][4];  // an operand of the next product

  // The kQueries of the tile from line `first` on. The order of work depends on what fits into registers.
  template <bool kMasked, int kQueries>
  __device__ __forceinline__ void step(Sum& dk, Sum& dv, const QueryTile& tile, int first = 0) {
    Packed<kQueries> p, ds;  // here, since products read them until the wait of end_tile
    if constexpr (kQueries == 64)
      step_64_queries<kMasked>(dk, dv, p, ds, tile.h, tile.m0 + first, first);
    else
      step_128_queries<kMasked>(dk, dv, p, ds, tile.h, tile.m0);
    end_tile(dk, dv);
  }

  // A tile of queries that its keys do not see. To dq they add 0.
  __device__ __forceinline__ void skip(Sum& dk, Sum& dv) {
    hand_over_dq();
    write_ds(Packed<kBlockM>{}, 0);
    fence_async_proxy();
    end_tile(dk, dv);
  }

  // S^T and dP^T are started together; the exponentials overlap dP's product, the work on dS overlaps dv's.
  template <bool kMasked>
  __device__ __forceinline__ void step_64_queries(Sum& dk, Sum& dv, Packed<64>& p, Packed<64>& ds, int h, int m0,
                                                  int first) {
    Tile<64> s, dp;
    uint32_t bits[2];
    start_products<kMasked, 64>(s, dp, m0, first);
    load_mask<kMasked, 64>(bits, h, m0);
    draw_dropout<64>(h, m0);
    wgmma_wait<1>(s);
    make_probabilities<kMasked>(s, bits, first);
    pack(p, s);
    wgmma_fence(dv, p);
    add_lines<T, kHeadDim>(dv, p, dout(), first);
    wgmma_wait<1>(dp);
    make_gradients(ds, s, dp, first);
    add_dk(dk, ds, first);
  }

  // With 128 queries S, dP and P together would need too many registers: P is packed after dS, then dv's product
  // starts.
  template <bool kMasked>
  __device__ __forceinline__ void step_128_queries(Sum& dk, Sum& dv, Packed<128>& p, Packed<128>& ds, int h, int m0) {
    Tile<128> s, dp;
    uint32_t bits[2];
    start_products<kMasked, 128>(s, dp, m0, 0);
    load_mask<kMasked, 128>(bits, h, m0);
    wgmma_wait<1>(s);
    make_probabilities<kMasked>(s, bits, 0);
    draw_dropout<128>(h, m0);  // not earlier: likewise
    wgmma_wait<0>(dp);
    make_gradients(ds, s, dp, 0);
    if (kDropout) __syncwarp();  // as the next loads would come earlier, into too few registers
    pack(p, s);
    wgmma_fence(dv, p);
    add_lines<T, kHeadDim>(dv, p, dout(), 0);
    add_dk(dk, ds, 0);
  }

  __device__ __forceinline__ auto& q() { return shared_.q[place_.stage()]; }
  __device__ __forceinline__ auto& dout() { return shared_.dout[place_.stage()]; }

  // s = k q^T and dp = v dout^T. While the first runs, the last tile's part of dq goes to its sender; of a partial tile
  // before it, as ptxas would wait for the product first.
  template <bool kMasked, int kQueries>
  __device__ __forceinline__ void start_products(Tile<kQueries>& s, Tile<kQueries>& dp, int m0, int first) {
    if (kMasked) hand_over_dq();
    shared_.full_q[place_.stage()].wait(place_.phase());
    if (kMasked) clear_queries<kQueries>(m0, first);
    wgmma_fence();
    multiply_lines<T, kHeadDim, kQueries>(s, shared_.k, group_ * kGroupRows, q(), first);
    if (!kMasked) hand_over_dq();
    shared_.full_dout[place_.stage()].wait(place_.phase());
    wgmma_fence();
    multiply_lines<T, kHeadDim, kQueries>(dp, shared_.v, group_ * kGroupRows, dout(), first);
  }
  // s = exp(S - lse)
  template <bool kMasked, int kCount>
  __device__ __forceinline__ void make_probabilities(float (&s)[kCount], const uint32_t (&bits)[2], int first) const {
    const float unit = a_.p.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float2 shift = query_pair(shared_.shift[place_.stage()], first, j);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[j + e] = exp2_approximate(s[j + e] * unit - (e % 2 == 0 ? shift.x : shift.y));
        if (kMasked && !is_visible(bits, j, e)) s[j + e] = 0.0f;
      }
    }
  }

  // ds = dS, packed as an operand.
  template <int kCount>
  __device__ __forceinline__ void make_gradients(uint32_t (&ds)[kCount / 8][4], const float (&s)[kCount],
                                                 float (&dp)[kCount], int first) {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float2 delta = query_pair(shared_.delta[place_.stage()], first, j);
      const uint32_t kept = kDropout ? kept_bits(j) : ~0u;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (kDropout) dp[j + e] = is_kept(kept, e) ? dp[j + e] * dropout_.scale() : 0.0f;
        dp[j + e] = s[j + e] * (dp[j + e] - (e % 2 == 0 ? delta.x : delta.y));
      }
#pragma unroll
      for (int r = 0; r < 2; r++) ds[j / 8][j / 4 % 2 * 2 + r] = pack_word<T>(dp[j + 2 * r], dp[j + 2 * r + 1]);
    }
  }

  // p = s, or 0 where it is dropped, as an operand.
  template <int kCount>
  __device__ __forceinline__ void pack(uint32_t (&p)[kCount / 8][4], const float (&s)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const uint32_t kept = kDropout ? kept_bits(j) : ~0u;
#pragma unroll
      for (int r = 0; r < 2; r++)
        p[j / 8][j / 4 % 2 * 2 + r] = pack_word<T>(is_kept(kept, 2 * r) ? s[j + 2 * r] : 0.0f,
                                                   is_kept(kept, 2 * r + 1) ? s[j + 2 * r + 1] : 0.0f);
    }
  }

  // The queries from line `first` of the tile on.
  template <int kSteps>
  __device__ __forceinline__ void write_ds(const uint32_t (&ds)[kSteps][4], int first) {
    const int lane = thread_ % 32, line = group_ * kGroupRows + thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < 16 * kSteps; column += 16)
      stmatrix(shared_.ds[place_.stage()][(first + column) / kPanel] + swizzled(line, column % kPanel / 8 + lane / 16),
               ds[column / 16]);
  }

  // Starts dk's product, and writes dS for dq's.
  template <int kSteps>
  __device__ __forceinline__ void add_dk(Sum& dk, uint32_t (&ds)[kSteps][4], int first) {
    write_ds(ds, first);
    if constexpr (16 * kSteps < kBlockM) write_ds(Packed<64>{}, kPanel - first);  // 0 for the other half
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    wgmma_fence(dk, ds);
    add_lines<T, kHeadDim>(dk, ds, q(), first);
  }

  // The tile's part of dq, which needs the dS of both warpgroups: each computes a half of it.
  __device__ __forceinline__ void end_tile(Sum& dk, Sum& dv) {
    named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both wrote dS and read the last one
    const int row = Tiles::kDqByColumns ? 0 : group_ * kGroupRows, column = Tiles::kDqByColumns ? group_ * kPanel : 0;
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < kBlockN; key += 16)
      wgmma<T, kPanel, true, true>(dq_, along_lines<kBlockN>(shared_.ds[place_.stage()], key, row),
                                   along_lines<kBlockN>(shared_.k, key, column), key > 0);
    wgmma_commit();
    wgmma_wait<1>(dk, dv);
    if (thread_ == 0) shared_.empty[place_.stage()].arrive();
    place_.advance();
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

  // Which of the kQueries from m0 on see the thread's two keys.
  template <bool kMasked, int kQueries>
  __device__ __forceinline__ void load_mask(uint32_t (&bits)[2], int h, int m0) {
#pragma unroll
    for (int r = 0; kMasked && r < 2; r++)
      bits[r] = visible_bits<kQueries>(a_.p.by_key, item_.b, h, first_key() + 8 * r, a_.p.shape.seqlen_k, m0,
                                       a_.p.shape.seqlen_q);
  }

  // Sets keys that take no part and their values to zero: they may be NaN, and 0 * NaN is NaN in dS and in dq.
  __device__ __forceinline__ void clear_keys() {
    const Mask& mask = a_.p.mask;
    if (mask.columns == nullptr) return;
    const int line = threadIdx.x - kGroup, n = item_.n0 + line;
    if (line < kBlockN && n < a_.p.shape.seqlen_k && !takes_part(mask, item_.b, n))
      clear_line(shared_.k, line), clear_line(shared_.v, line);
    fence_async_proxy();
    named_barrier_sync(kBothBarrier, kConsumers * kGroup);
  }

  // The same for queries that may attend to nothing, and their gradients. Each warpgroup does it for itself.
  template <int kQueries>
  __device__ __forceinline__ void clear_queries(int m0, int first) {
    const auto is_empty = [&](int line) {
      return m0 + line < a_.p.shape.seqlen_q && shared_.shift[place_.stage()][first + line] == kInfinity;
    };
    bool some = false;
    for (int line = thread_ % 32; line < kQueries; line += 32) some |= is_empty(line);
    if (__ballot_sync(0xffffffffu, some) == 0) return;  // all warps decide the same
    shared_.full_dout[place_.stage()].wait(place_.phase());
    if (thread_ < kQueries && is_empty(thread_)) clear_line(q(), first + thread_), clear_line(dout(), first + thread_);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
  }

  // Dropout of the warp's 16 keys, for kQueries from m0 on.
  template <int kQueries>
  __device__ __forceinline__ void draw_dropout(int h, int m0) {
    if (!kDropout) return;
    const DropoutMask mask(a_.p.dropout);  // with the seed, which would need registers all the time
    const int warp = group_ * 4 + thread_ / 32, n = item_.n0 + warp * 16;
    const int64_t row0 = (static_cast<int64_t>(item_.b) * a_.p.shape.heads + h) * a_.p.shape.seqlen_q + m0;
    __syncwarp();
    for (int i = thread_ % 32; i < 2 * kQueries; i += 32)
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
  // The values of the two queries, from line `first` on:
  __device__ __forceinline__ float2 query_pair(const float (&values)[kBlockM], int first, int j) const {
    return *reinterpret_cast<const float2*>(&values[first + 2 * j + thread_ % 4 * 2]);
  }
  // The first of the thread's two keys; the second is 8 later.
  __device__ __forceinline__ int first_key() const {
    return item_.n0 + group_ * kGroupRows + thread_ / 32 * 16 + thread_ % 32 / 4;
  }

  const Arguments& a_;
  Shared<Tiles>& shared_;
  const WorkItem& item_;  // in shared memory: there are too few registers
  const int group_, thread_;
  const DropoutMask dropout_;
  Place place_;
  float dq_[kPanel / 2];  // the last tile's part, until it is handed over
  bool has_dq_ = false;
};

template <class T, class Tiles, bool kDropout>
__global__ void __launch_bounds__(Registers::kThreads, 1)
    backward_dkdv_sm90_kernel(const __grid_constant__ Arguments a) {
  auto& shared = shared_memory<Shared<Tiles>>();
  if (threadIdx.x == 0) {
    shared.full_kv.init(1);
    for (Barrier& full : shared.full_q) full.init(1);
    for (Barrier& full : shared.full_dout) full.init(1);
    for (Barrier& empty : shared.empty) empty.init(kConsumers);
    fence_barrier_init();
    shared.item = block_item(a);
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<Registers::kProducer>();
    if (threadIdx.x == 0) produce<Tiles>(a, shared);
    const int warp = threadIdx.x / 32;
    if (warp == 1 || warp == 2) send_dq<Tiles>(a, shared, warp - 1);
  } else {
    more_registers<Registers::kConsumer>();
    Consumer<T, Tiles, kDropout>(a, shared).run();
  }
}

template <class T, class Tiles>
void run(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream) {
  const Shape& s = p.shape;
  const KeyRange keys = keys_in_band(s, p.mask.band_lo, p.mask.band_hi);
  const int64_t row_bytes = 2 * (s.head_dim_k + s.head_dim_v) + 4 * s.head_dim_k;
  const Arguments a{p,
                    rows,
                    sums,
                    matrix_map(p.q, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, Tiles::kBlockM),
                    matrix_map(p.k, s.head_dim_k, keys.first, keys.count, s.key_heads, s.batch, kBlockN),
                    matrix_map(p.v, s.head_dim_v, keys.first, keys.count, s.key_heads, s.batch, kBlockN),
                    matrix_map(p.dout, s.head_dim_v, 0, s.seqlen_q, s.heads, s.batch, Tiles::kBlockM),
                    matrix_map(p.dk, s.head_dim_k, 0, s.seqlen_k, s.key_heads, s.batch, kGroupRows),
                    matrix_map(p.dv, s.head_dim_v, 0, s.seqlen_k, s.key_heads, s.batch, kGroupRows),
                    keys.first,
                    heads_together(s.batch * s.key_heads, row_bytes * s.seqlen_q * (s.heads / s.key_heads))};
  const bool drops = p.dropout.rng_state != nullptr;
  launch_with_registers<Registers>(
      "backward_dkdv_sm90_kernel",
      drops ? backward_dkdv_sm90_kernel<T, Tiles, true> : backward_dkdv_sm90_kernel<T, Tiles, false>,
      dim3(s.batch * s.key_heads * ceil_div(s.seqlen_k, kBlockN)), sizeof(Shared<Tiles>), stream, a);
}

}  // namespace

TileSize backward_sm90_tile(int head_dim) {
  return with_tiles<Tiles>(head_dim, [](auto tiles) { return TileSize{kBlockN, tiles.kBlockM}; });
}

void backward_sm90(const Backward& p, cudaStream_t stream) {
  const int64_t count = padded_rows(p.shape), parts = parts_of(p.shape);
  const PaddedRows rows{p.delta, p.delta + count};
  float* const sum = p.delta + 2 * count;
  int* const counters = reinterpret_cast<int*>(sum + parts * kPartSize);
  const PartialSums sums{sum, counters, counters + parts + 1};
  backward_rows_sm90(p, rows, sums, stream);
  const auto with_size = [&](auto tiles) {
    using Size = decltype(tiles);
    p.dtype == DType::bfloat16 ? run<__nv_bfloat16, Size>(p, rows, sums, stream)
                               : run<__half, Size>(p, rows, sums, stream);
  };
  p.mask.has_matrix() ? with_tiles<BlockTiles>(head_dim(p.shape), with_size)
                      : with_tiles<Tiles>(head_dim(p.shape), with_size);
  backward_round_sm90(p, sums, stream);
}

}  // namespace fastattn::attention
