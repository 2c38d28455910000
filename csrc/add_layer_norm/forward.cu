// Forward of dropout + residual + LayerNorm or RMSNorm.   Formula, shapes and limits: add_layer_norm.h
//
// Grid: one warp a row, four rows a block, up to hidden 1024; above, one block of hidden / 1024 warps a row.
// Registers: a thread holds up to 32 elements of z as float32, so x and residual are read once and the variance is
//   two-pass: the mean square of z - mean, with none of the cancellation of E[z^2] - mean^2.
// Shared memory: the warps' partial sums, where a row has several.
// Traffic: reads x and residual, writes z and out, 8 bytes an element in 16-bit types (4 without residual and dropout,
//   where z is x). weight and bias stay in L1. The dropout mask is computed, never stored.
// Dropped before measuring: dropout, residual and RMSNorm as template parameters. They are uniform branches, and would
//   make eight times as many kernels to compile.
#include "add_layer_norm/rows.cuh"

namespace fastattn::add_layer_norm {
namespace {

struct ForwardShared {
  float sum[1][kMaxWarps], square[1][kMaxWarps];
};

template <class T, class W, int kChunks, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const Forward p) {
  ForwardShared& shared = shared_memory<ForwardShared>();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x == 0 && thread < kTickets) p.statistics[2 * p.rows + thread] = 0.0f;
  if (row >= p.rows) return;  // whole warps, and only where a row is a warp, so at no barrier
  const int64_t start = row * p.hidden;
  const T* x = static_cast<const T*>(p.x) + start;
  const T* residual = static_cast<const T*>(p.residual) + start;

  // All loads of the row are issued before the first is waited for.
  Chunk<T> x_chunk[kChunks], residual_chunk[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const int inside = columns_inside<kAligned>(column(c), p.hidden);
    x_chunk[c].template load<kAligned>(x + column(c), inside);
    residual_chunk[c].template load<kAligned>(residual + column(c), p.residual ? inside : 0);
  }

  const DropoutMask mask(p.dropout);
  float z[kChunks][kChunk], sum[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    float skip[kChunk];
    x_chunk[c].unpack(z[c]);
    residual_chunk[c].unpack(skip);
    mask.apply(z[c], row, column(c));
#pragma unroll
    for (int j = 0; j < kChunk; j++) {
      z[c][j] += skip[j];  // both are zero outside the row
      sum[0] += z[c][j];
    }
    if (p.z != nullptr) {
      Chunk<T> rounded;
      rounded.pack(z[c]);
      rounded.template store<kAligned>(static_cast<T*>(p.z) + start + column(c),
                                       columns_inside<kAligned>(column(c), p.hidden));
    }
  }

  row_sum(sum, shared.sum);  // by RMSNorm too: skipping it takes more registers than it saves time
  const float mean = p.bias != nullptr ? sum[0] / p.hidden : 0.0f;
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
  row_sum(square, shared.square);
  const float rstd = 1.0f / sqrtf(square[0] / p.hidden + p.eps);
  if (threadIdx.x == 0) p.statistics[row] = mean, p.statistics[p.rows + row] = rstd;

#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const int inside = columns_inside<kAligned>(column(c), p.hidden);
    if (!kAligned) __syncwarp();  // keeps the compiler from loading all chunks at once: registers would spill
    Chunk<W> weight_chunk, bias_chunk = {};
    weight_chunk.template load<kAligned>(static_cast<const W*>(p.weight) + column(c), inside);
    if (p.bias != nullptr) bias_chunk.template load<kAligned>(static_cast<const W*>(p.bias) + column(c), inside);
    float weight[kChunk], bias[kChunk];
    weight_chunk.unpack(weight);
    bias_chunk.unpack(bias);
#pragma unroll
    for (int j = 0; j < kChunk; j++) z[c][j] = z[c][j] * rstd * weight[j] + bias[j];
    Chunk<T> out;
    out.pack(z[c]);
    out.template store<kAligned>(static_cast<T*>(p.out) + start + column(c), inside);
  }
}

}  // namespace

void forward(const Forward& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  const Shape shape = shape_of(p.hidden, 4);
  const int rows_per_block = shape.row_warps == 1 ? 4 : 1;
  const dim3 grid(static_cast<unsigned>((p.rows + rows_per_block - 1) / rows_per_block));
  const dim3 block(shape.row_warps * kWarp, rows_per_block);
  const bool is_aligned = aligned(p.hidden, p.x, p.residual, p.weight, p.bias, p.out, p.z);
  dispatch(p.dtype, p.weight_dtype, shape.chunks, is_aligned, [&](auto t, auto w, auto chunks, auto vectors) {
    launch(forward_kernel<decltype(t), decltype(w), chunks(), vectors()>, grid, block, sizeof(ForwardShared), stream, p);
  });
}

}  // namespace fastattn::add_layer_norm
