// Who sees whom, element by element: bits and bias. Formats: attention.h
#pragma once
#include "attention/attention.h"
#include "common/launch.cuh"

namespace fastattn::attention {

constexpr float kInfinity = __builtin_huge_valf();

__host__ __device__ __forceinline__ int blocks_of(int count, int block) { return (count + block - 1) / block; }
__host__ __device__ __forceinline__ int words_of_row(int columns) { return blocks_of(columns, kBitBlock) * kBitWords; }

// The column in a block of 128 that is bit `bit` of word `word`, and the way back.
__device__ __forceinline__ int column_of_bit(int word, int bit) { return bit / 2 * 8 + word * 2 + bit % 2; }
__device__ __forceinline__ int word_of_column(int column) { return column % 8 / 2; }
__device__ __forceinline__ int bit_of_column(int column) { return column / 8 * 2 + column % 2; }

// The bias of one batch and head. One piece of code reads all types: it stands many times in a kernel.
struct BiasMatrix {
  const unsigned char* data;
  int64_t stride_m, stride_n;
  bool is_float, is_half;

  __device__ __forceinline__ BiasMatrix(const Bias& bias, int64_t b, int64_t h)
      : stride_m(bias.stride_m), stride_n(bias.stride_n), is_float(bias.dtype == DType::float32),
        is_half(bias.dtype == DType::float16) {
    data = static_cast<const unsigned char*>(bias.data) + (b * bias.stride_b + h * bias.stride_h) * (is_float ? 4 : 2);
  }

  __device__ __forceinline__ float operator()(int m, int n) const {
    const int64_t at = m * stride_m + n * stride_n;
    if (is_float) return reinterpret_cast<const float*>(data)[at];
    if (is_half) return __half2float(reinterpret_cast<const __half*>(data)[at]);
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data)[at]);
  }
};

// Calls f with the BiasMatrix of (b, h).
template <class Function>
__device__ __forceinline__ void with_bias(const Bias& bias, int64_t b, int64_t h, Function&& f) {
  f(BiasMatrix(bias, b, h));
}

}  // namespace fastattn::attention
