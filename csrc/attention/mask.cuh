// Who sees whom, element by element: intervals, bits and bias. Formats: attention.h
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
__device__ __forceinline__ bool has_bit(const uint32_t* row, int column) {
  const uint32_t word = row[column / kBitBlock * kBitWords + word_of_column(column)];
  return (word >> bit_of_column(column % kBitBlock) & 1) != 0;
}

__device__ __forceinline__ uint32_t first_bits(int count) { return count < 32 ? (1u << count) - 1 : ~0u; }
// Word c of the bits of columns 0 .. end - 1 of a block, and of columns begin .. end - 1.
__device__ __forceinline__ uint32_t word_before(int end, int c) {
  return first_bits(end / 8 * 2 + min(max(end % 8 - 2 * c, 0), 2));
}
__device__ __forceinline__ uint32_t word_between(int begin, int end, int c) {
  return end > begin ? word_before(end, c) & ~word_before(begin, c) : 0;
}

// Word c of the columns that a row sees in a tile of kColumns from `column` on, of `columns` in all: bit 2j + e is column
// 8j + 2c + e. Without spans, row r sees columns r + low .. r + high.
template <int kColumns>
__device__ __forceinline__ uint32_t seen_word(const Visibility& who, int64_t b, int64_t h, int row, int column, int columns,
                                              int low, int high, int c) {
  static_assert(kBitBlock % kColumns == 0, "a tile lies in one block of bits");
  uint32_t word = ~0u;
  if (who.bits != nullptr)
    word = who.bits[b * who.bits_stride_b + h * who.bits_stride_h + row * who.bits_stride +
                    column / kBitBlock * kBitWords + c] >> column % kBitBlock / 4;
  int begin = row + low, end = row + high + 1;
  if (who.spans != nullptr) {
    // 32 bits count all rows that memory holds, and 64 would spill registers of the Hopper kernels.
    const int2 span = who.spans[static_cast<uint32_t>(b * who.spans_stride_b + row)];
    begin = span.x, end = span.y;
  }
  begin = min(max(begin - column, 0), kColumns), end = min(min(end, columns) - column, kColumns);
  return word & word_between(begin, end, c);
}

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

}  // namespace fastattn::attention
