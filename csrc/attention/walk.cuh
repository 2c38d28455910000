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

// Which of this lane's columns in a tile of kColumns from `column` on a row sees: bit 2j + e is column
// 8j + 2 (lane % 4) + e. columns: how many there are; low, high: as in plan_walk.
template <int kColumns>
__device__ __forceinline__ uint32_t sees(const Visibility& who, int64_t b, int64_t h, int row, int rows, int column,
                                         int columns, int low, int high) {
  return row < rows ? seen_word<kColumns>(who, b, h, row, column, columns, low, high, threadIdx.x % 4) : 0;
}

// Does the mask, bias included, leave key n to some query? Keys that a band hides are not asked for.
__device__ __forceinline__ bool key_is_seen(const Visibility& who, int64_t b, int64_t h, int n) {
  return who.seen == nullptr || has_bit(who.seen + b * who.seen_stride_b + h * who.seen_stride_h, n);
}

// The same of some, or of every one, of the tile of kKeys keys from n0 on, where who.seen is not null. Past the last key
// nothing is seen.
__device__ __forceinline__ uint4 seen_words(const Visibility& who, int64_t b, int64_t h, int n0) {
  const uint32_t* row = who.seen + b * who.seen_stride_b + h * who.seen_stride_h;
  return *reinterpret_cast<const uint4*>(row + n0 / kBitBlock * kBitWords);
}
template <int kKeys>
__device__ __forceinline__ bool some_key_is_seen(const Visibility& who, int64_t b, int64_t h, int n0) {
  const uint4 words = seen_words(who, b, h, n0);
  return ((words.x | words.y | words.z | words.w) >> n0 % kBitBlock / 4 & first_bits(kKeys / 4)) != 0;
}
template <int kKeys>
__device__ __forceinline__ bool every_key_is_seen(const Visibility& who, int64_t b, int64_t h, int n0) {
  const uint4 words = seen_words(who, b, h, n0);
  return (~(words.x & words.y & words.z & words.w) >> n0 % kBitBlock / 4 & first_bits(kKeys / 4)) == 0;
}

// Without lists nobody knows in which tiles something is hidden, but by a band alone: then every tile is a partial one.
// Those at the end of which no key is seen need no visit.
template <int kKeys>
__device__ __forceinline__ void mask_every_tile(Walk& walk, const Visibility& who, int64_t b, int64_t h) {
  if (walk.list != nullptr || who.seen == nullptr) return;
  while (walk.count > 0 && !some_key_is_seen<kKeys>(who, b, h, (walk.first + walk.count - 1) * kKeys)) walk.count--;
  walk.left = walk.partial = walk.count;
}

}  // namespace fastattn::attention
