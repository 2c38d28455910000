// dbias on Hopper, of a bias that has queries and keys: dS, summed over the batches and heads that share it.
//   Formulas: backward.h; why it is a separate kernel: bias_gradient.cu
//
// Grid: a block per (batch or part, head or 1, 128 queries, 128 keys) of dbias. It loops, in a fixed order, over the
//   batches and heads that are summed.
// Roles: a warp of the producer warpgroup finds those whose tile is not fully masked, and copies their operands by TMA,
//   64 columns at a time: of q and k for S, of dout and v for dP. Each of two consumer warpgroups owns 64 queries.
// Registers of a consumer thread: S and dP (64 each). Any head dimension: heads are never loaded as a whole.
// Shared memory: a ring of parts, 128 x 64 of both operands; the sum of dS, for which there are too few registers: 96
//   to 216 bytes were spilled.
// Overlap: exponentials overlap the product of dP's first part.
// Work: 2 (Dk + Dv) FLOPs a score in tiles that are not fully masked; bytes: 512 (Dk + Dv) a tile, from L2: 64 FLOPs a
//   byte, so that L2, at 5.5 TB/s, allows 350 TFLOP/s. No larger tile fits into registers; multicast of the operands
//   that neighbours share would help.
#include "attention/backward_scores_sm90.cuh"

namespace fastattn::attention {
namespace {

constexpr int kBlock = 128, kParts = 4;  // stages of the ring
using BiasRegisters = RegisterSplit<kConsumers, 56, 224>;

struct alignas(1024) Shared {
  unsigned char x[kParts][1][kBlock * kLineBytes], y[kParts][1][kBlock * kLineBytes];
  float sum[kBlock / 2][kConsumers * kGroup];  // of each consumer thread's scores
  int head[kParts];                            // b * H + h of the part; -1 after the last
  Barrier full[kParts], empty[kParts];
};

struct Target {
  void* dbias;
  int batch, heads;  // of dbias
};

// The tile of dbias of a block.
struct WorkItem {
  int b, h, m0, n0;
};
__device__ __forceinline__ WorkItem block_item(const Shape& shape, const Target& target) {
  const int tiles_n = ceil_div(shape.seqlen_k, kBlock), tiles_m = ceil_div(shape.seqlen_q, kBlock);
  const int matrix = blockIdx.x / tiles_n / tiles_m;
  return {matrix / target.heads, matrix % target.heads, static_cast<int>(blockIdx.x) / tiles_n % tiles_m * kBlock,
          static_cast<int>(blockIdx.x) % tiles_n * kBlock};
}

// Whether anything of the tile is visible. Called by a warp.
__device__ __forceinline__ bool is_any_visible(const Backward& p, int b, int h, int m0, int n0) {
  const int rows = min(kBlock, p.shape.seqlen_q - m0), lane = threadIdx.x % 32;
  bool some = false;
  for (int row = lane; row < rows; row += 32)
    for (int c = 0; c < kBitWords; c++)
      some |= visible_word<kBlock>(p.by_query, b, h, m0 + row, n0, p.shape.seqlen_k, c) != 0;
  return __ballot_sync(0xffffffffu, some) != 0;
}

// Called by the first warp; its first lane copies.
__device__ __forceinline__ void produce(const Arguments& a, const Target& target, Shared& shared) {
  const Shape& shape = a.p.shape;
  const WorkItem item = block_item(shape, target);
  RingOf<kParts> ring;
  const auto load = [&](const TensorMap& x, const TensorMap& y, int columns, int b, int h) {
    for (int column = 0; column < columns; column += kPanel, ring.advance()) {
      if (threadIdx.x > 0) continue;
      Barrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      shared.head[ring.stage] = b * shape.heads + h;
      full.arrive_expect(sizeof shared.x[0] + sizeof shared.y[0]);
      tma_load(shared.x[ring.stage], x, full, column, item.m0, h, b);
      tma_load(shared.y[ring.stage], y, full, column, item.n0 - a.key_begin, h / (shape.heads / shape.key_heads), b);
    }
  };
  for (int b = item.b; b < shape.batch; b += target.batch) {
    for (int h = item.h; h < shape.heads; h += target.heads) {
      if (!is_any_visible(a.p, b, h, item.m0, item.n0)) continue;
      load(a.q, a.k, shape.head_dim_k, b, h);
      load(a.dout, a.v, shape.head_dim_v, b, h);
    }
  }
  if (threadIdx.x > 0) return;
  shared.empty[ring.stage].wait(ring.phase ^ 1);
  shared.head[ring.stage] = -1;
  shared.full[ring.stage].arrive();
}

template <class T>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Arguments& a, const Target& target, Shared& shared)
      : a_(a), target_(target), shared_(shared), item_(block_item(a.p.shape, target)), group_(warpgroup() - 1),
        rows_(a) {}

  __device__ __forceinline__ void run() {
    const Shape& shape = a_.p.shape;
#pragma unroll
    for (int j = 0; j < kBlock / 2; j++) sum(j) = 0.0f;
    for (;;) {
      wait_for_part();
      const int head = shared_.head[part_ % kParts];
      if (head < 0) break;
      rows_.load_rows(head / shape.heads, head % shape.heads, item_.m0 + group_ * kGroupRows);
      rows_.load_mask(item_.n0);
      Tile s, dp;
      start_part(s, false);
#pragma unroll 1
      for (int column = kPanel; column < shape.head_dim_k; column += kPanel) start_part(s, true), finish_part<1>();
      start_part(dp, false);
      finish_part<1>(s);
      rows_.make_probabilities(s);
      shared_.full[0].arrive_if(are_negative_zeros(s));  // for ptxas: backward_sm90_common.cuh
#pragma unroll 1
      for (int column = kPanel; column < shape.head_dim_v; column += kPanel) start_part(dp, true), finish_part<1>();
      finish_part<0>(dp);
      rows_.finish_gradients(dp);
      rows_.make_score_gradients(s, dp);
#pragma unroll
      for (int j = 0; j < kBlock / 2; j++) sum(j) += s[j];
    }
    a_.p.bias.dtype == DType::float32 ? store<float>() : store<T>();
  }

 private:
  using Tile = float[kBlock / 2];

  // Starts d = x y^T of the next part, or d += x y^T.
  __device__ __forceinline__ void start_part(Tile& d, bool adds) {
    wait_for_part();
    wgmma_fence();
    multiply_lines<T, kPanel, kBlock>(d, shared_.x[part_ % kParts], group_ * kGroupRows, shared_.y[part_ % kParts],
                                      adds);
    part_++;
  }
  __device__ __forceinline__ void wait_for_part() { shared_.full[part_ % kParts].wait(part_ / kParts % 2); }
  // Waits for the oldest part, while kUnderWay later ones may run, and releases it. ended: the accumulator that it
  // completes.
  template <int kUnderWay, class... Ended>
  __device__ __forceinline__ void finish_part(Ended&... ended) {
    wgmma_wait<kUnderWay>(ended...);
    if (threadIdx.x % kGroup == 0) shared_.empty[(part_ - 1 - kUnderWay) % kParts].arrive();
  }

  template <class Element>
  __device__ __forceinline__ void store() {
    const Shape& shape = a_.p.shape;
    auto* const to = static_cast<Element*>(target_.dbias) +
                     static_cast<int64_t>(item_.b * target_.heads + item_.h) * shape.seqlen_q * shape.seqlen_k;
    const int thread = threadIdx.x % kGroup;
    const int first = item_.m0 + group_ * kGroupRows + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int j = 0; j < kBlock / 2; j++) {
      const int m = first + 8 * row_of(j), n = item_.n0 + j / 4 * 8 + thread % 4 * 2 + j % 2;
      if (m < shape.seqlen_q && n < shape.seqlen_k) to[static_cast<int64_t>(m) * shape.seqlen_k + n] = Element(sum(j));
    }
  }

  __device__ __forceinline__ float& sum(int j) { return shared_.sum[j][threadIdx.x - kGroup]; }

  const Arguments& a_;
  const Target& target_;
  Shared& shared_;
  const WorkItem item_;
  const int group_;
  QueryRows<T, kBlock> rows_;
  unsigned part_ = 0;  // the next one
};

template <class T>
__global__ void __launch_bounds__(BiasRegisters::kThreads, 1)
    bias_gradient_sm90_kernel(const __grid_constant__ Arguments a, const Target target) {
  Shared& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) {
    for (Barrier& full : shared.full) full.init(1);
    for (Barrier& empty : shared.empty) empty.init(kConsumers);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    fewer_registers<BiasRegisters::kProducer>();
    if (threadIdx.x < 32) produce(a, target, shared);
  } else {
    more_registers<BiasRegisters::kConsumer>();
    Consumer<T>(a, target, shared).run();
  }
}

}  // namespace

void bias_gradient_sm90(const Backward& p, const PaddedRows& rows, void* dbias, int batch, int heads,
                        cudaStream_t stream) {
  const int blocks = batch * heads * ceil_div(p.shape.seqlen_q, kBlock) * ceil_div(p.shape.seqlen_k, kBlock);
  launch_with_registers<BiasRegisters>(
      "bias_gradient_sm90_kernel",
      p.dtype == DType::bfloat16 ? bias_gradient_sm90_kernel<__nv_bfloat16> : bias_gradient_sm90_kernel<__half>,
      dim3(blocks), sizeof(Shared), stream, arguments(p, rows, kBlock, kBlock), Target{dbias, batch, heads});
}

}  // namespace fastattn::attention
