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

// The tiles of kBlockColumns columns that the band leaves to the block_rows rows from `row` on. If there is more than a
// band, all of them are partial, and the last ones are skipped if none of their columns takes part.
template <int kBlockColumns>
__device__ __forceinline__ TileLoop plan_band_tiles(const Mask& mask, int64_t b, int row, int block_rows, int rows,
                                                    int columns) {
  const int last = min(row + block_rows, rows) - 1, low = mask.band_lo, high = mask.band_hi;
  const int begin_first = max(row + low, 0), begin_last = max(last + low, 0);
  const int end_first = max(min(row + high + 1, columns), 0), end_last = max(min(last + high + 1, columns), 0);
  TileLoop loop = {nullptr, begin_first / kBlockColumns, 0, 0, 0};
  const int end = ceil_div(end_last, kBlockColumns), full_from = ceil_div(begin_last, kBlockColumns);
  loop.count = max(end - loop.first, 0);
  if (mask.columns != nullptr)
    while (loop.count > 0 &&
           !some_column_takes_part<kBlockColumns>(mask, b, (loop.first + loop.count - 1) * kBlockColumns))
      loop.count--;
  const bool band_only = mask.intervals == nullptr && mask.bits == nullptr;
  const int full = band_only ? max(min(end_first / kBlockColumns, end) - full_from, 0) : 0;
  loop.left = full > 0 ? full_from - loop.first : loop.count;
  loop.partial = loop.count - full;
  return loop;
}

// The same from the mask's lists, if it has lists.
template <int kBlockColumns>
__device__ __forceinline__ TileLoop plan_tiles(const Mask& mask, int64_t b, int64_t h, int row, int block_rows,
                                               int rows, int columns) {
  if (mask.tiles == nullptr) return plan_band_tiles<kBlockColumns>(mask, b, row, block_rows, rows, columns);
  const int64_t list = b * mask.lists_stride_b + h * mask.lists_stride_h + row / block_rows;
  const int2 counts = mask.counts[list];
  return {mask.tiles + list * mask.max_tiles, 0, 0, counts.x, counts.y};
}

}  // namespace fastattn::attention
