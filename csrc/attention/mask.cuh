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

template <class T>
__device__ __forceinline__ float to_float(T value) {
  return static_cast<float>(value);
}

// Calls f with a reader: reader(m, n) is the bias of (b, h, m, n) as a float.
template <class Function>
__device__ __forceinline__ void with_bias(const Bias& bias, int b, int h, Function&& f) {
  const int64_t start = b * bias.stride_b + h * bias.stride_h;
  const auto call = [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(bias.data) + start;
    f([&](int64_t m, int64_t n) { return to_float(data[m * bias.stride_m + n * bias.stride_n]); });
  };
  if (bias.dtype == DType::float32)
    call(float{});
  else if (bias.dtype == DType::bfloat16)
    call(__nv_bfloat16{});
  else
    call(__half{});
}

}  // namespace fastattn::attention
