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

// The bits of the columns that take part, in the block of `column`. Requires mask.columns.
__device__ __forceinline__ uint4 column_words(const Mask& mask, int64_t b, int column) {
  return *reinterpret_cast<const uint4*>(mask.columns + b * mask.columns_stride_b + column / kBitBlock * kBitWords);
}

}  // namespace fastattn::attention
