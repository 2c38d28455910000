// Forward of dropout + residual + LayerNorm or RMSNorm.   Formula, shapes and limits: add_layer_norm.h
//
// Grid: one warp a row, four rows a block, up to hidden 1024; above, one block of hidden / 1024 warps a row.
// Registers: a thread has up to 32 elements of z as float32, so x and residual are read once, and the variance is the
//   mean square of z - mean, without the cancellation of E[z^2] - mean^2.
// Shared memory: the warps' partial sums, if a row has several warps.
// Traffic: reads x and residual, writes z and out, 8 bytes an element in 16-bit types (4 without residual, dropout and
//   x_bias, where z is x), 14 where x has 16 bits and residual 32, 16 with `read`. weight, bias and x_bias stay in L1.
//   The dropout mask is computed, never stored.
// With `read` float32 takes 62 registers at hidden 512 and 103 at 1024, without it 54 and 94 (sm_90, counted).
// H200, float32 with x in bfloat16, dropout and x_bias: 8192 x 512 0.018 ms; with a separate cast 0.019 and 0.005.
// Dropped before measuring: dropout, residual, x_bias and RMSNorm as template parameters. They are uniform branches; as
//   parameters they would need sixteen times as many kernels.
#include "add_layer_norm/rows.cuh"

#include <cmath>

namespace fastattn::add_layer_norm {
namespace {

template <bool kAligned, class T>
__device__ __forceinline__ void add(float (&values)[kChunk], const T* from, int count) {
  Chunk<T> chunk;
  chunk.template load<kAligned>(from, count);
  float more[kChunk];
  chunk.unpack(more);
#pragma unroll
  for (int j = 0; j < kChunk; j++) values[j] += more[j];
}

// The chunks of a row of x, as T. All are loaded before the first is converted.
template <bool kAligned, class T, class X, int kChunks>
__device__ __forceinline__ void read(Chunk<T> (&to)[kChunks], const X* x, int hidden) {
  Chunk<X> chunk[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; c++)
    chunk[c].template load<kAligned>(x + column(c), columns_inside<kAligned>(column(c), hidden));
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    if constexpr (std::is_same_v<T, X>)
      to[c] = chunk[c];
    else
      chunk[c].unpack(to[c].at);
  }
}

struct Shared {
  float sum[1][kMaxWarps], square[1][kMaxWarps];
};

// out and statistics of a row, from z, which is zero past the row's end and then holds out. T, W: types of out, and of
// weight and bias.
template <class T, class W, bool kAligned, int kChunks>
__device__ __forceinline__ void normalize(const Forward& p, int64_t row, float (&z)[kChunks][kChunk]) {
  Shared& shared = shared_memory<Shared>();
  float sum[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
#pragma unroll
    for (int j = 0; j < kChunk; j++) sum[0] += z[c][j];
  }
  row_sum<1>(sum, shared.sum);  // RMSNorm, too: to skip it costs registers and saves little
  const float mean = p.bias ? sum[0] / p.hidden : 0.0f;
  float square[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const int inside = columns_inside<kAligned>(column(c), p.hidden);
#pragma unroll
    for (int j = 0; j < kChunk; j++) {
      z[c][j] -= mean;
      if (j < inside) square[0] += z[c][j] * z[c][j];
    }
  }
  row_sum<1>(square, shared.square);
  float rstd;
  if (p.eps_on_std) {
    const float std = sqrtf(square[0] / (p.hidden - 1)), hidden = p.hidden;
    rstd = 1.0f / (std + p.eps);
    const float ratio = (std + p.eps) / (std > 0.0f ? std : INFINITY) * (hidden / (hidden - 1.0f));
    if (threadIdx.x == 0) p.statistics[2 * p.rows + kTickets + row] = ratio;
  } else {
    rstd = 1.0f / sqrtf(square[0] / p.hidden + p.eps);
  }
  if (threadIdx.x == 0) p.statistics[row] = mean, p.statistics[p.rows + row] = rstd;

#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const int inside = columns_inside<kAligned>(column(c), p.hidden);
    if (!kAligned) __syncwarp();  // stops the compiler from loading all chunks at once: registers would spill
    Chunk<W> weight_chunk, bias_chunk = {};
    weight_chunk.template load<kAligned>(static_cast<const W*>(p.weight) + column(c), inside);
    if (p.bias) bias_chunk.template load<kAligned>(static_cast<const W*>(p.bias) + column(c), inside);
    float weight[kChunk], bias[kChunk];
    weight_chunk.unpack(weight);
    bias_chunk.unpack(bias);
#pragma unroll
    for (int j = 0; j < kChunk; j++) z[c][j] = z[c][j] * rstd * weight[j] + bias[j];
    store_chunk<kAligned>(static_cast<T*>(p.out) + (row * p.hidden + column(c)), z[c], inside);
  }
}

template <class T, class W, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const Forward p) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x == 0 && thread < kTickets) p.statistics[2 * p.rows + thread] = 0.0f;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;  // whole warps, and only if a row is one warp, without barriers
  const int64_t start = row * p.hidden;
  const T* residual = static_cast<const T*>(p.residual) + start;

  // All loads of the row are issued before the first is used.
  Chunk<T> x_chunk[kChunks], residual_chunk[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const int inside = columns_inside<kAligned>(column(c), p.hidden);
    residual_chunk[c].template load<kAligned>(residual + column(c), p.residual ? inside : 0);
  }
  x_switch<T>(p.x.dtype, [&](auto* type) {
    read<kAligned>(x_chunk, static_cast<decltype(type)>(p.x.at) + start, p.hidden);
  });

  const DropoutMask mask(p.dropout);
  float z[kChunks][kChunk];
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    float skip[kChunk];
    x_chunk[c].unpack(z[c]);
    if (p.x_bias) {
      const int inside = columns_inside<kAligned>(column(c), p.hidden);
      p.x_bias.dtype == DType::float32 ? add<kAligned>(z[c], static_cast<const float*>(p.x_bias.at) + column(c), inside)
                                       : add<kAligned>(z[c], static_cast<const T*>(p.x_bias.at) + column(c), inside);
    }
    residual_chunk[c].unpack(skip);
    mask.apply(z[c], row, column(c));
#pragma unroll
    for (int j = 0; j < kChunk; j++) z[c][j] += skip[j];  // both are zero outside the row
    if (p.z != nullptr)
      store_chunk<kAligned>(static_cast<T*>(p.z) + start + column(c), z[c],
                            columns_inside<kAligned>(column(c), p.hidden));
  }
  normalize<T, W, kAligned>(p, row, z);
  if constexpr (std::is_same_v<T, float>) {
    const auto store = [&](auto* to) {
#pragma unroll
      for (int c = 0; c < kChunks; c++)
        store_chunk<kAligned>(to + start + column(c), z[c], columns_inside<kAligned>(column(c), p.hidden));
    };
    if (p.read)
      p.read.dtype == DType::bfloat16 ? store(static_cast<__nv_bfloat16*>(p.read.at))
                                      : store(static_cast<__half*>(p.read.at));
  }
}

}  // namespace

void forward(const Forward& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const Shape shape = shape_of(p.hidden, 4);
  const dim3 block(shape.row_warps * kWarp, shape.row_warps == 1 ? 4 : 1);
  const dim3 grid(static_cast<unsigned>((p.rows + block.y - 1) / block.y));
  const bool is_aligned = aligned(p.hidden, p.x.at, p.residual, p.weight, p.bias, p.x_bias.at, p.out, p.read.at, p.z);
  dispatch(p.dtype, p.weight_dtype, shape.chunks, is_aligned, [&](auto t, auto w, auto chunks, auto vectors) {
    launch(forward_kernel<decltype(t), decltype(w), chunks(), vectors()>, grid, block, sizeof(Shared), stream, p);
  });
}

}  // namespace fastattn::add_layer_norm
