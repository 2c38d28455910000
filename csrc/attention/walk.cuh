// Which tiles a block visits along the other axis, and what its threads see of one.
#pragma once
#include "attention/mask.cuh"

namespace fastattn::attention {

// First the partial tiles, then the full ones.
struct Walk {
  const int32_t* list;  // null: by arithmetic
  int first, left, partial, count;

  __device__ __forceinline__ int tile(int i) const {
    if (list != nullptr) return list[i];
    if (i >= partial) return first + left + i - partial;
    return first + i + (i >= left ? count - partial : 0);
  }
};

// Rows own .. own + own_rows - 1 of a side of `rows`, a tile of them; row r sees columns r + low .. r + high of `columns`,
// or what the lists say.
template <int kStream>
__device__ __forceinline__ Walk plan_walk(const Visibility& who, int64_t b, int64_t h, int own, int own_rows, int rows,
                                          int columns, int low, int high) {
  const TileLists& lists = who.lists;
  if (lists.tiles != nullptr) {
    const int64_t list = b * lists.stride_b + h * lists.stride_h + own / own_rows;
    const int2 counts = lists.counts[list];
    return {lists.tiles + list * lists.max_tiles, 0, 0, counts.x, counts.y};
  }
  const int last = min(own + own_rows, rows) - 1;
  const int begin_first = max(own + low, 0), begin_last = max(last + low, 0);
  const int end_first = max(min(own + high + 1, columns), 0), end_last = max(min(last + high + 1, columns), 0);
  Walk walk = {nullptr, begin_first / kStream, 0, 0, 0};
  const int end = blocks_of(end_last, kStream), full_from = blocks_of(begin_last, kStream);
  walk.count = max(end - walk.first, 0);
  const int full = max(min(end_first / kStream, end) - full_from, 0);
  walk.left = full > 0 ? full_from - walk.first : walk.count;
  walk.partial = walk.count - full;
  return walk;
}

// Without lists nobody knows in which tiles bits, or keys that nobody sees, hide something: then every tile is a partial one.
__device__ __forceinline__ bool mask_every_tile(Walk& walk, const Visibility& who) {
  if (walk.list != nullptr || who.seen == nullptr) return false;
  walk.left = walk.partial = walk.count;
  return true;
}

// How many of a lane's columns, 8j + 2c + {0, 1} with c = lane % 4, lie before column `end` of a tile.
__device__ __forceinline__ int columns_before(int end) {
  return end / 8 * 2 + min(max(end % 8 - 2 * static_cast<int>(threadIdx.x % 4), 0), 2);
}

__device__ __forceinline__ uint32_t first_bits(int count) { return count < 32 ? (1u << count) - 1 : ~0u; }

// Of a word of 32 columns, those of this lane: bit 2j + e is column 8j + 2c + e.
__device__ __forceinline__ uint32_t columns_of_lane(uint32_t word) {
  word = word >> threadIdx.x % 4 * 2 & 0x03030303u;
  word = (word | word >> 6) & 0x000f000fu;
  return (word | word >> 12) & 0xffu;
}

// Which of its columns in a tile of kColumns from `column` on a row sees: bit 2j + e is column 8j + 2c + e.
// columns: how many there are; low, high: as in plan_walk. kBySeen: without bits, columns are keys that `seen` may hide.
template <int kColumns, bool kBySeen = false>
__device__ __forceinline__ uint32_t sees(const Visibility& who, int64_t b, int64_t h, int row, int rows, int column,
                                         int columns, int low, int high) {
  static_assert(kBitBlock % kColumns == 0, "a tile lies in one block of bits");
  if (row >= rows) return 0;
  if (who.bits != nullptr) {
    const int64_t block = static_cast<int64_t>(row) * blocks_of(columns, kBitBlock) + column / kBitBlock;
    const uint32_t* words = who.bits + b * who.bits_stride_b + h * who.bits_stride_h + block * kBitWords;
    return words[threadIdx.x % 4] >> (column % kBitBlock / 4);
  }
  const int begin = min(max(row + low - column, 0), kColumns), end = min(min(row + high + 1, columns) - column, kColumns);
  uint32_t inside = end > begin ? first_bits(columns_before(end)) & ~first_bits(columns_before(begin)) : 0;
  if (kBySeen && who.seen != nullptr) {
    const uint32_t* seen = who.seen + b * who.seen_stride_b + h * who.seen_stride_h + column / 32;
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kColumns / 32; i++)
      if (column + 32 * i < columns) kept |= columns_of_lane(seen[i]) << 8 * i;
    inside &= kept;
  }
  return inside;
}

// Does the mask, bias included, leave key n to some query? Keys that a band hides are not asked for.
__device__ __forceinline__ bool key_is_seen(const Visibility& who, int64_t b, int64_t h, int n) {
  return who.seen == nullptr || (who.seen[b * who.seen_stride_b + h * who.seen_stride_h + n / 32] >> n % 32 & 1) != 0;
}

// The same of any of the keys n0 .. n0 + kKeys - 1; n0 is a multiple of 32.
template <int kKeys>
__device__ __forceinline__ bool tile_is_seen(const Visibility& who, int64_t b, int64_t h, int n0, int keys) {
  uint32_t some = 0;
#pragma unroll
  for (int n = n0; n < n0 + kKeys; n += 32)
    if (n < keys) some |= who.seen[b * who.seen_stride_b + h * who.seen_stride_h + n / 32];
  return some != 0;
}

}  // namespace fastattn::attention
