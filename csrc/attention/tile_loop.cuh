// The column tiles that a block visits for its tile of rows.
#pragma once
#include "attention/mask.cuh"

namespace fastattn::attention {

// First the partial tiles, then the full ones.
struct TileLoop {
  const int32_t* list;  // null: by arithmetic, partial tiles on both sides of the full ones
  int first, left, partial, count;

  __device__ __forceinline__ int tile(int i) const {
    if (list != nullptr) return list[i];
    if (i >= partial) return first + left + i - partial;
    return first + i + (i >= left ? count - partial : 0);
  }
};

// For the tile of own_rows rows from `own` on, of `rows` in all, and tiles of kStream of `columns` columns: those that the band
// leaves. Unless it restricts alone, each of them is a partial one, and the last ones are left out in which no column takes
// part.
template <int kStream>
__device__ __forceinline__ TileLoop plan_tiles_of_band(const Mask& mask, int64_t b, int own, int own_rows, int rows,
                                                       int columns) {
  const int last = min(own + own_rows, rows) - 1, low = mask.band_lo, high = mask.band_hi;
  const int begin_first = max(own + low, 0), begin_last = max(last + low, 0);
  const int end_first = max(min(own + high + 1, columns), 0), end_last = max(min(last + high + 1, columns), 0);
  TileLoop loop = {nullptr, begin_first / kStream, 0, 0, 0};
  const int end = blocks_of(end_last, kStream), full_from = blocks_of(begin_last, kStream);
  loop.count = max(end - loop.first, 0);
  if (mask.columns != nullptr)
    while (loop.count > 0 && !some_column_takes_part<kStream>(mask, b, (loop.first + loop.count - 1) * kStream)) loop.count--;
  const bool band_only = mask.intervals == nullptr && mask.bits == nullptr;
  const int full = band_only ? max(min(end_first / kStream, end) - full_from, 0) : 0;
  loop.left = full > 0 ? full_from - loop.first : loop.count;
  loop.partial = loop.count - full;
  return loop;
}

// Those of the lists, where there are any.
template <int kStream>
__device__ __forceinline__ TileLoop plan_tiles(const Mask& mask, int64_t b, int64_t h, int own, int own_rows, int rows,
                                               int columns) {
  if (mask.tiles == nullptr) return plan_tiles_of_band<kStream>(mask, b, own, own_rows, rows, columns);
  const int64_t list = b * mask.lists_stride_b + h * mask.lists_stride_h + own / own_rows;
  const int2 counts = mask.counts[list];
  return {mask.tiles + list * mask.max_tiles, 0, 0, counts.x, counts.y};
}

}  // namespace fastattn::attention
