// Sums over the threads that share a row, each in a fixed order: equal inputs give equal bits.
#pragma once
#include "common/launch.cuh"

namespace fastattn {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 16;  // of a block

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Replaces each of kCount values by its sum over the threads of equal threadIdx.y; blockDim.x is a multiple of the
// warp. A row of one warp needs shuffles only. Wider rows, of which a block has kRows at most, use `scratch` and a
// barrier each: without another barrier in between, the next call must use another scratch. Ids are constants: one in a
// register counts as all 16 barriers, of 16 to 64 of a multiprocessor (cuda_occupancy.h), which is 1 to 4 blocks.
template <int kRows, int kCount>
__device__ __forceinline__ void row_sum(float (&values)[kCount], float (&scratch)[kCount][kMaxWarps]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) values[i] = warp_sum(values[i]);
  if (blockDim.x == kWarp) return;
  const int row_warps = blockDim.x / kWarp, first = threadIdx.y * row_warps;
  if (threadIdx.x % kWarp == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i++) scratch[i][first + threadIdx.x / kWarp] = values[i];
  }
  if (kRows == 1) __syncthreads();
#pragma unroll
  for (int row = 0; kRows > 1 && row < kRows; row++)
    if (row == static_cast<int>(threadIdx.y)) named_barrier_sync(1 + row, blockDim.x);
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    values[i] = 0.0f;
#pragma unroll 1
    for (int warp = 0; warp < row_warps; warp++) values[i] += scratch[i][first + warp];
  }
}

}  // namespace fastattn
