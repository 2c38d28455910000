// LayerNorm and RMSNorm of rows in registers. The backward: norm_backward.cuh
//
// P is an op's Forward or Backward, with members such as weight, bias or dbias, statistics, rows and hidden, as in
// add_layer_norm.h.
#pragma once
#include "common/dtype_switch.h"
#include "common/norm.h"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

#include <cmath>
#include <type_traits>

namespace fastattn::norm {

constexpr int kMaxThreads = kMaxWarps * kWarp;

template <class T>
__device__ __forceinline__ const T* elements(const void* at) {
  return static_cast<const T*>(at);
}
template <class T>
__device__ __forceinline__ T* elements(void* at) {
  return static_cast<T*>(at);
}

template <class T>
__device__ __forceinline__ void store_element(T* to, float value) {
  *to = T(value);
}

// An element of an Array, whose dtype is known when the kernel runs.
__device__ __forceinline__ Array operator+(Array array, int64_t count) {
  return {static_cast<char*>(array.at) + count * (array.dtype == DType::float32 ? 4 : 2), array.dtype};
}
__device__ __forceinline__ void store_element(Array to, float value) {
  if (to.dtype == DType::float32)
    store_element(static_cast<float*>(to.at), value);
  else if (to.dtype == DType::bfloat16)
    store_element(static_cast<__nv_bfloat16*>(to.at), value);
  else
    store_element(static_cast<__half*>(to.at), value);
}

// A block is (row_warps * 32, rows) threads. A thread owns the chunks threadIdx.x, threadIdx.x + blockDim.x, ... of its
// row, kChunks of them at most.
struct Shape {
  int chunks, row_warps;
};

inline Shape shape_of(int hidden, int max_chunks) {
  const int width = (hidden + kWarp * kChunk - 1) / (kWarp * kChunk);  // of a row, in chunks of each lane of one warp
  const int chunks = width >= 4 && max_chunks >= 4 ? 4 : width >= 2 && max_chunks >= 2 ? 2 : 1;
  const int wanted = (width + chunks - 1) / chunks;
  return wanted <= kMaxWarps ? Shape{chunks, wanted} : shape_of(hidden, 2 * max_chunks);
}

__device__ __forceinline__ int column(int chunk) { return (chunk * blockDim.x + threadIdx.x) * kChunk; }

template <class... Pointers>
bool aligned(int hidden, Pointers... pointers) {
  return hidden % kChunk == 0 && ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Calls f(kChunks, kAligned), both as integral constants.
template <class Function>
void shape_switch(int chunks, bool is_aligned, Function&& f) {
  const auto with_alignment = [&](auto k) { is_aligned ? f(k, Int<1>{}) : f(k, Int<0>{}); };
  chunks == 1 ? with_alignment(Int<1>{}) : chunks == 2 ? with_alignment(Int<2>{}) : with_alignment(Int<4>{});
}

struct ForwardGrid {
  int chunks;
  dim3 grid, block;
};

// One warp a row, four rows a block, up to hidden 1024; above, one block of hidden / 1024 warps a row.
inline ForwardGrid forward_grid(int64_t rows, int hidden) {
  const Shape shape = shape_of(hidden, 4);
  const int rows_per_block = shape.row_warps == 1 ? 4 : 1;
  return {shape.chunks, dim3(static_cast<unsigned>((rows + rows_per_block - 1) / rows_per_block)),
          dim3(shape.row_warps * kWarp, rows_per_block)};
}

// The row of a thread of the forward. It also sets the tickets of the statistics to zero.
template <class P>
__device__ __forceinline__ int64_t forward_row(const P& p) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (blockIdx.x == 0 && thread < kTickets) p.statistics[2 * p.rows + thread] = 0.0f;
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

struct ForwardShared {
  float sum[1][kMaxWarps], square[1][kMaxWarps];
};

// out and statistics of a row, from z, which is zero past the row's end and then holds out. T, W: types of out, and of
// weight and bias.
template <class T, class W, bool kAligned, int kChunks, class P>
__device__ __forceinline__ void normalize(const P& p, int64_t row, float (&z)[kChunks][kChunk]) {
  ForwardShared& shared = shared_memory<ForwardShared>();
  float sum[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
#pragma unroll
    for (int j = 0; j < kChunk; j++) sum[0] += z[c][j];
  }
  row_sum(sum, shared.sum);  // RMSNorm, too: to skip it costs registers and saves little
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
  row_sum(square, shared.square);
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
    weight_chunk.template load<kAligned>(elements<W>(p.weight) + column(c), inside);
    if (p.bias) bias_chunk.template load<kAligned>(elements<W>(p.bias) + column(c), inside);
    float weight[kChunk], bias[kChunk];
    weight_chunk.unpack(weight);
    bias_chunk.unpack(bias);
#pragma unroll
    for (int j = 0; j < kChunk; j++) z[c][j] = z[c][j] * rstd * weight[j] + bias[j];
    store_chunk<kAligned>(elements<T>(p.out) + (row * p.hidden + column(c)), z[c], inside);
  }
}

}  // namespace fastattn::norm
