// dq on Hopper, by a kernel whose blocks own what they write.   Formulas: backward.h
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2, with the loops exchanged; Shah et al. 2024,
//   FlashAttention-3, arXiv:2407.08608, for warp specialisation.
// Grid: a block per (batch, head, 128 queries): the last queries of a head first, as they have the longest loop under a
//   causal mask, and together the heads whose keys and values fit in the L2 cache. It loops over the keys.
// Roles: one thread of the producer warpgroup copies by TMA; each of two consumer warpgroups owns 64 queries. In
//   dq += dS k, dS is an operand in registers.
// Registers of a consumer thread: S and dP (kBlockN / 2 each), dq (kHeadDim / 2); packed dS replaces S and dP.
// Shared memory: q and dout; two stages of k; two stages of v, or one beyond a head dimension of 128, where the next v
//   is loaded during dq's product.
// Overlap: exponentials overlap dP's product; the other work on scores overlaps products of the other warpgroup.
// Work: 2 (2 Dk + Dv) FLOPs a visited score; bytes: q, dout and dq once, k and v once a query tile, mostly from L2.
//
// Who uses it: calls with a bias, and head dimensions beyond 128. For all others backward_sum_sm90 adds up dq in memory
//   and needs 5 products, where this kernel and that of dk and dv need 7: on an H200 they were 5 to 68 % slower in each
//   of 24 calls (512, 2048, 8192 tokens, D 64 and 128, with and without a causal mask and dropout).
// Compiled offline, nvcc 13.0: nothing spills, which tests/codegen asserts, and all exponentials are between the wait
//   for S and the wait for dP. With a bias, a tile of 64 x 128 scores up to P: 32 loads of pairs a thread, 8 under way
//   at a time, and 800 instructions; with a branch on the type at each element it was 64 loads, each waited for before
//   the next, and 2600 instructions. With more loads under way registers are spilled.
#include "attention/backward_scores_sm90.cuh"
#include "common/check.h"

namespace fastattn::attention {
namespace {

enum NamedBarrier { kGroupBarrier = 1 };  // one for each consumer

template <int kHeadDimPadded>
struct Tiles {
  static constexpr int kHeadDim = kHeadDimPadded, kPanels = kHeadDim / kPanel;
  static constexpr int kBlockM = kGroupRows * kConsumers, kBlockN = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kValueStages = kHeadDim <= 128 ? kStages : 1;  // shared memory is full
};

template <class Tiles>
struct alignas(1024) Shared {
  static constexpr int kPanels = Tiles::kPanels, kBytesN = Tiles::kBlockN * kLineBytes;
  unsigned char q[kPanels][Tiles::kBlockM * kLineBytes], dout[kPanels][Tiles::kBlockM * kLineBytes];  // last, q is dq
  unsigned char k[kStages][kPanels][kBytesN], v[Tiles::kValueStages][kPanels][kBytesN];
  Barrier full_q, full_k[kStages], empty_k[kStages], full_v[Tiles::kValueStages], empty_v[Tiles::kValueStages];
};

struct WorkItem {
  int b, h, m0;
  TileLoop loop;
};

template <class Tiles>
__device__ __forceinline__ WorkItem block_item(const Arguments& a) {
  const Shape& shape = a.p.shape;
  const int tiles = ceil_div(shape.seqlen_q, Tiles::kBlockM);
  const auto [head, tile] = item_in_order(blockIdx.x, shape.batch * shape.heads, tiles, a.heads_together);
  const int b = head / shape.heads, h = head % shape.heads, m0 = (tiles - 1 - tile) * Tiles::kBlockM;
  const Mask& mask = a.p.by_query;
  return {b, h, m0, plan_tiles<Tiles::kBlockN>(mask, b, h, m0, Tiles::kBlockM, shape.seqlen_q, shape.seqlen_k)};
}

template <class Tiles>
__device__ __forceinline__ void produce(const Arguments& a, Shared<Tiles>& shared, const WorkItem& item) {
  for (const TensorMap* map : {&a.k, &a.v, &a.q, &a.dout, &a.dq}) prefetch(*map);
  const int h_k = item.h / (a.p.shape.heads / a.p.shape.key_heads);
  load_panels(shared.q, a.q, shared.full_q, item.m0, item.h, item.b);
  load_panels(shared.dout, a.dout, shared.full_q, item.m0, item.h, item.b);
  Ring keys;
  RingOf<Tiles::kValueStages> values;
  const auto load = [&](auto& ring, auto& tiles, const TensorMap& map, auto& full, auto& empty, int i) {
    empty[ring.stage].wait(ring.phase ^ 1);
    load_panels(tiles[ring.stage], map, full[ring.stage], item.loop.tile(i) * Tiles::kBlockN - a.key_begin, h_k,
                item.b);
    ring.advance();
  };
#pragma unroll 1
  for (int i = 0; i < item.loop.count; i++) {
    load(keys, shared.k, a.k, shared.full_k, shared.empty_k, i);
    load(values, shared.v, a.v, shared.full_v, shared.empty_v, i);
  }
}

template <class T, class Tiles>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, Shared<Tiles>& shared, const WorkItem& item)
      : a_(a), shared_(shared), item_(item), group_(threadIdx.x / kGroup - 1), thread_(threadIdx.x % kGroup), rows_(a) {
  }

  __device__ __forceinline__ void run() {
    const TileLoop& loop = item_.loop;
    rows_.load_rows(item_.b, item_.h, item_.m0 + group_ * kGroupRows);
    shared_.full_q.wait(0);
    float dq[kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; i++) dq[i] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < loop.count; i++) step(dq, loop.tile(i) * kBlockN);
    const int first = group_ * kGroupRows;
    write_lines<T, kHeadDim>(shared_.q, first, thread_, dq, a_.p.softmax_scale);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
    if (thread_ > 0) return;
#pragma unroll
    for (int panel = 0; panel < Tiles::kPanels; panel++)
      tma_store(a_.dq, shared_.q[panel] + first * kLineBytes, panel * kPanel, item_.m0 + first, item_.h, item_.b);
    bulk_commit();
    bulk_wait<0>();
  }

 private:
  static constexpr int kHeadDim = Tiles::kHeadDim, kBlockN = Tiles::kBlockN;

  // Adds the tile of keys from n0 on to dq.
  __device__ __forceinline__ void step(float (&dq)[kHeadDim / 2], int n0) {
    float s[kBlockN / 2], dp[kBlockN / 2];
    shared_.full_k[keys_.stage].wait(keys_.phase);
    wgmma_fence();
    multiply_lines<T, kHeadDim, kBlockN>(s, shared_.q, group_ * kGroupRows, shared_.k[keys_.stage]);
    shared_.full_v[values_.stage].wait(values_.phase);
    wgmma_fence();
    multiply_lines<T, kHeadDim, kBlockN>(dp, shared_.dout, group_ * kGroupRows, shared_.v[values_.stage]);
    rows_.load_mask(n0);
    wgmma_wait<1>(s);
    rows_.make_probabilities(s);
    shared_.full_q.arrive_if(are_negative_zeros(s));
    wgmma_wait<0>(dp);
    release(shared_.empty_v, values_);
    rows_.finish_gradients(dp);
    rows_.make_score_gradients(s, dp);
    uint32_t ds[kBlockN / 16][4];
#pragma unroll
    for (int j = 0; j < kBlockN / 4; j++) ds[j / 4][j % 4] = pack_word<T>(s[2 * j], s[2 * j + 1]);
    clear_excluded(n0);
    wgmma_fence(dq, ds);
    add_lines<T, kHeadDim>(dq, ds, shared_.k[keys_.stage]);
    wgmma_wait<0>(dq);
    release(shared_.empty_k, keys_);
  }

  // Sets keys of the tile from n0 on that take no part to zero: they may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_excluded(int n0) {
    const Mask& mask = a_.p.by_query;
    if (mask.columns == nullptr || all_columns_take_part<kBlockN>(mask, item_.b, n0)) return;
    const int n = n0 + thread_;
    if (thread_ < kBlockN && n < a_.p.shape.seqlen_k && !takes_part(mask, item_.b, n))
      clear_line(shared_.k[keys_.stage], thread_);
    fence_async_proxy();
    named_barrier_sync(kGroupBarrier + group_, kGroup);
  }

  const Arguments& a_;
  Shared<Tiles>& shared_;
  const WorkItem item_;
  const int group_, thread_;
  QueryRows<T, Tiles::kBlockN> rows_;
  Ring keys_;
  RingOf<Tiles::kValueStages> values_;
};

template <class T, class Tiles>
__global__ void __launch_bounds__(Registers::kThreads, 1) backward_dq_sm90_kernel(const __grid_constant__ Arguments a) {
  Shared<Tiles>& shared = shared_memory<Shared<Tiles>>();
  if (threadIdx.x == 0) {
    shared.full_q.init(2);
    for (int stage = 0; stage < kStages; stage++) shared.full_k[stage].init(1), shared.empty_k[stage].init(kConsumers);
    for (int stage = 0; stage < Tiles::kValueStages; stage++)
      shared.full_v[stage].init(1), shared.empty_v[stage].init(kConsumers);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<Registers::kProducer>();
    const WorkItem item = block_item<Tiles>(a);
    if (threadIdx.x == 0) produce<Tiles>(a, shared, item);
  } else {
    more_registers<Registers::kConsumer>();
    Consumer<T, Tiles>(a, shared, block_item<Tiles>(a)).run();
  }
}

template <class T, class Tiles>
void run(const Backward& p, const PaddedRows& rows, cudaStream_t stream) {
  const Shape& s = p.shape;
  Arguments a = arguments(p, rows, Tiles::kBlockM, Tiles::kBlockN);
  const int64_t key_bytes = int64_t{2} * s.seqlen_k * (s.head_dim_k + s.head_dim_v);
  a.heads_together = heads_together(s.batch * s.key_heads, key_bytes) * (s.heads / s.key_heads);
  a.dq = dq_map(p);
  launch_with_registers<Registers>("backward_dq_sm90_kernel", backward_dq_sm90_kernel<T, Tiles>,
                                   dim3(s.batch * s.heads * ceil_div(s.seqlen_q, Tiles::kBlockM)),
                                   sizeof(Shared<Tiles>), stream, a);
}

}  // namespace

TileSize backward_dq_sm90_tile(int head_dim) {
  return with_tiles<Tiles>(head_dim, [](auto tiles) { return TileSize{tiles.kBlockM, tiles.kBlockN}; });
}

void backward_dq_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream) {
  with_tiles<Tiles>(head_dim(p.shape), [&](auto tiles) {
    using Size = decltype(tiles);
    p.dtype == DType::bfloat16 ? run<__nv_bfloat16, Size>(p, rows, stream) : run<__half, Size>(p, rows, stream);
  });
}

}  // namespace fastattn::attention
