// The column tiles that a block visits for its tile of rows.
#pragma once
#include "attention/mask.cuh"

namespace fastattn::attention {

// First the partial tiles, then the full ones.
struct TileLoop {
  const int32_t* list;  // null: by arithmetic, partial tiles on both sides of the full ones
  int first, left, partial, count;

  __device__ __forceinline__ int tile(int i) const {
    if (list != nullptr) return list[i] & kTileBits;
    if (i >= partial) return first + left + i - partial;
    return first + i + (i >= left ? count - partial : 0);
  }
  // Of a layout with classes (fastattn/masks/kernel_format.py): two bits for each of the tile's blocks.
  __device__ __forceinline__ uint32_t classes(int i) const { return static_cast<uint32_t>(list[i]) >> kClassShift; }
};

// The tiles of kBlockColumns columns that block_rows rows from `row` on visit: from the mask's lists or, where only a
// band restricts, which has no lists, by arithmetic.
template <int kBlockColumns>
__device__ __forceinline__ TileLoop plan_tiles(const Mask& mask, int64_t b, int64_t h, int row, int block_rows,
                                               int rows, int columns) {
  if (mask.tiles != nullptr) {
    const int64_t list = b * mask.lists_stride_b + h * mask.lists_stride_h + row / block_rows;
    const int2 counts = mask.counts[list];
    return {mask.tiles + list * mask.max_tiles, 0, 0, counts.x, counts.y};
  }
  const int last = min(row + block_rows, rows) - 1, low = mask.band_lo, high = mask.band_hi;
  const int begin_first = max(row + low, 0), begin_last = max(last + low, 0);
  const int end_first = max(min(row + high + 1, columns), 0), end_last = max(min(last + high + 1, columns), 0);
  TileLoop loop = {nullptr, begin_first / kBlockColumns, 0, 0, 0};
  const int end = ceil_div(end_last, kBlockColumns), full_from = ceil_div(begin_last, kBlockColumns);
  loop.count = max(end - loop.first, 0);
  const int full = max(min(end_first / kBlockColumns, end) - full_from, 0);
  loop.left = full > 0 ? full_from - loop.first : loop.count;
  loop.partial = loop.count - full;
  return loop;
}

// The tiles of a loop from the last to the first, partial or full. Entries of lists are read one step ahead.
class DescendingTiles {
 public:
  int tile, place;  // place: in the list
  bool is_partial;

  __device__ __forceinline__ explicit DescendingTiles(const TileLoop& loop)
      : loop_(loop), partial_(loop.partial), other_(loop.count) {
    if (loop.list != nullptr) load_partial(), load_full();
  }

  // Whether there is one more, which the members then describe.
  __device__ __forceinline__ bool next() {
    if (loop_.list == nullptr) {
      if (other_ == 0) return false;
      place = --other_, tile = loop_.first + place;
      is_partial = place < loop_.left || place >= loop_.left + loop_.count - loop_.partial;
      return true;
    }
    tile = max(next_partial_, next_full_), is_partial = next_partial_ > next_full_;
    if (tile < 0) return false;
    place = is_partial ? partial_ : other_;
    is_partial ? load_partial() : load_full();
    return true;
  }

 private:
  __device__ __forceinline__ void load_partial() { next_partial_ = --partial_ >= 0 ? loop_.tile(partial_) : -1; }
  __device__ __forceinline__ void load_full() { next_full_ = --other_ >= loop_.partial ? loop_.tile(other_) : -1; }

  const TileLoop& loop_;
  int partial_, other_;  // with lists, the places of the next partial and full tile; else other_ is how many are left
  int next_partial_, next_full_;
};

}  // namespace fastattn::attention
