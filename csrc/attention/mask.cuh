// Which elements of a tile are visible: band or intervals, and bits.   Formats: struct Mask of attention.h
#pragma once
#include "attention/attention.h"
#include "common/launch.cuh"
#include "common/vec.cuh"

#include <type_traits>

namespace fastattn::attention {

constexpr float kInfinity = __builtin_huge_valf();

__host__ __device__ __forceinline__ int ceil_div(int count, int block) { return (count + block - 1) / block; }

__device__ __forceinline__ uint32_t first_bits(int count) { return count < 32 ? (1u << count) - 1 : ~0u; }
// Word c of the bits of columns 0 .. end - 1 of a block, and of columns begin .. end - 1.
__device__ __forceinline__ uint32_t word_before(int end, int c) {
  return first_bits(end / 8 * 2 + min(max(end % 8 - 2 * c, 0), 2));
}
__device__ __forceinline__ uint32_t word_between(int begin, int end, int c) {
  return end > begin ? word_before(end, c) & ~word_before(begin, c) : 0;
}
// The same of columns begin .. end - 1 of a matrix in the tile of kColumns from `column` on, of `columns` in all.
template <int kColumns>
__device__ __forceinline__ uint32_t word_inside(int begin, int end, int column, int columns, int c) {
  begin = min(max(begin - column, 0), kColumns), end = min(min(end, columns) - column, kColumns);
  return word_between(begin, end, c);
}

// Word c of the columns that are visible to a row in a tile of kColumns from `column` on, of `columns` in all: bit 2j +
// e is column 8j + 2c + e.
template <int kColumns>
__device__ __forceinline__ uint32_t visible_word(const Mask& mask, int64_t b, int64_t h, int row, int column,
                                                 int columns, int c) {
  static_assert(kBitBlock % kColumns == 0, "a tile is inside one block of bits");
  uint32_t word = ~0u;
  if (mask.bits != nullptr)
    word = mask.bits[b * mask.bits_stride_b + h * mask.bits_stride_h + row * mask.bits_stride_row +
                     column / kBitBlock * kBitWords + c] >>
           column % kBitBlock / 4;
  int begin = row + mask.band_lo, end = row + mask.band_hi + 1;
  if (mask.intervals != nullptr) {
    // 32 bits are enough for all rows that fit into memory; 64 would spill registers of the Hopper kernels.
    const int2 interval = mask.intervals[static_cast<uint32_t>(b * mask.intervals_stride_b + row)];
    begin = interval.x, end = interval.y;
  }
  return word & word_inside<kColumns>(begin, end, column, columns, c);
}

// The bits of the columns that this lane's accumulators hold: bit 2j + e is column 8j + 2 (lane % 4) + e. A row past
// the last row has none.
template <int kColumns>
__device__ __forceinline__ uint32_t visible_bits(const Mask& mask, int64_t b, int64_t h, int row, int rows, int column,
                                                 int columns) {
  return row < rows ? visible_word<kColumns>(mask, b, h, row, column, columns, threadIdx.x % 4) : 0;
}

// Whether a column takes part. If not, it may hold anything.
__device__ __forceinline__ bool takes_part(const Mask& mask, int64_t b, int column) {
  if (mask.columns == nullptr) return true;
  const int in_block = column % kBitBlock;
  const uint32_t word = mask.columns[b * mask.columns_stride_b + column / kBitBlock * kBitWords + in_block % 8 / 2];
  return (word >> (in_block / 8 * 2 + in_block % 2) & 1) != 0;
}

// Whether all columns of the tile of kColumns from `column` on take part; none does past the last column. Requires
// mask.columns.
__device__ __forceinline__ uint4 column_words(const Mask& mask, int64_t b, int column) {
  return *reinterpret_cast<const uint4*>(mask.columns + b * mask.columns_stride_b + column / kBitBlock * kBitWords);
}
template <int kColumns>
__device__ __forceinline__ bool all_columns_take_part(const Mask& mask, int64_t b, int column) {
  const uint4 words = column_words(mask, b, column);
  return (~(words.x & words.y & words.z & words.w) >> column % kBitBlock / 4 & first_bits(kColumns / 4)) == 0;
}

// The bits of a lane's columns in a row, as of visible_bits(), for which there is a bias in a matrix of rows x columns.
template <int kColumns, bool kByKey = false>
__device__ __forceinline__ uint32_t bias_bits(const Bias& bias, int row, int rows, int column, int columns) {
  if (row >= rows) return 0;
  const int first = kByKey ? -bias.last : bias.first, last = kByKey ? -bias.first : bias.last;
  return word_inside<kColumns>(row + first, row + last + 1, column, columns, threadIdx.x % 4);
}

// The numbers of type T in a word, or in the low half of it.
template <class T>
__device__ __forceinline__ float2 as_pair(const uint32_t& word) {
  T pair[2];
  memcpy(static_cast<void*>(pair), &word, 4);
  return {static_cast<float>(pair[0]), static_cast<float>(pair[1])};
}
template <>
__device__ __forceinline__ float2 as_pair<float>(const uint32_t& word) {
  float low;
  memcpy(&low, &word, 4);
  return {low, 0.0f};
}

// Calls use(i, bias) for each element of a lane's accumulators in a tile of kColumns from `column` on: i = 4j + 2r + e
// is row + 8r, column 8j + 2 (lane % 4) + e of the tile. Rows are queries and columns keys or, with kByKey, the other
// way round. read: bits of the two rows' elements, as of visible_bits(). An element whose bit is 0 is not read, except
// with its neighbour: bias is then 0 or that element. T: bias.dtype, if it is not float32.
// The loops have no branches, so that their loads do not wait for each other. A caller whose registers that would
// spill calls it for a part of its columns at a time.
template <class T, int kColumns, bool kByKey = false, class Use>
__device__ __forceinline__ void for_each_bias(const Bias& bias, int64_t b, int64_t h, int row, int column,
                                              const uint32_t (&read)[2], Use&& use) {
  using Element = std::conditional_t<sizeof(T) == 2, T, float>;
  const bool is_float = sizeof(T) > 2 || bias.dtype == DType::float32;
  const int64_t row_stride = kByKey ? bias.stride_n : bias.stride_m;
  const int64_t stride = kByKey ? bias.stride_m : bias.stride_n;
  const int64_t first = b * bias.stride_b + h * bias.stride_h + row * row_stride +
                        (column + static_cast<int>(threadIdx.x % 4) * 2) * stride;
  const auto in_pairs = [&](auto zero) {
    using Number = decltype(zero);
#pragma unroll
    for (int j = 0; j < kColumns / 8; j++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const Number* const at = static_cast<const Number*>(bias.data) + first + 8 * r * row_stride + 8 * j;
        const bool reads = (read[r] >> 2 * j & 3) != 0;
        float2 pair;
        if constexpr (sizeof(Number) == 4)
          pair = reads ? *reinterpret_cast<const float2*>(at) : float2{};
        else
          pair = as_pair<Number>(reads ? *reinterpret_cast<const uint32_t*>(at) : 0);
        use(4 * j + 2 * r, pair.x), use(4 * j + 2 * r + 1, pair.y);
      }
    }
  };
  if constexpr (!kByKey) {
    if (bias.in_pairs && is_float) return in_pairs(float{});
    if constexpr (sizeof(T) == 2) {
      if (bias.in_pairs) return in_pairs(T{});
    }
  }
  const int bytes = is_float ? 4 : 2;
  const unsigned char* at[2];
  at[0] = static_cast<const unsigned char*>(bias.data) + first * bytes;
  at[1] = at[0] + 8 * row_stride * bytes;
  const uint32_t floats[2] = {is_float ? read[0] : 0, is_float ? read[1] : 0};
  const uint32_t others[2] = {is_float ? 0 : read[0], is_float ? 0 : read[1]};
#pragma unroll
  for (int j = 0; j < kColumns / 8; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i / 2, e = i % 2;
      const unsigned char* const element = at[r] + e * stride * bytes;
      uint32_t word = 0;
      if ((floats[r] >> (2 * j + e) & 1) != 0) word = *reinterpret_cast<const uint32_t*>(element);
      if constexpr (sizeof(T) == 2) {
        if ((others[r] >> (2 * j + e) & 1) != 0) word = *reinterpret_cast<const uint16_t*>(element);
      }
      use(4 * j + i, is_float ? as_pair<float>(word).x : as_pair<Element>(word).x);
      if (e == 1) at[r] += 8 * stride * bytes;
    }
  }
}

}  // namespace fastattn::attention
