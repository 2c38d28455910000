// What the Hopper kernels of attention share: rings of stages, and the tensor maps of their operands.
#pragma once
#include "attention/walk.cuh"
#include "common/sm90/tma.cuh"
#include "common/sm90/wgmma.cuh"

#include <algorithm>

namespace fastattn::attention {

constexpr int kStages = 2, kPanel = 64;  // columns of a panel
constexpr int kRowsOfGroup = 64;         // of a tile of scores, for each consumer warpgroup

// A place in a ring of stages, and the parity of its phase.
struct Ring {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Announces and loads a tile of panels: rows from `row` on of (b, h).
template <class Tile>
__device__ __forceinline__ void load_panels(Tile& to, const sm90::TensorMap& map, sm90::Barrier& full, int row, int h, int b) {
  full.arrive_expect(sizeof to);
#pragma unroll
  for (int panel = 0; panel < static_cast<int>(sizeof to / sizeof to[0]); panel++)
    sm90::tma_load(to[panel], map, full, panel * kPanel, row, h, b);
}

// Row of its two, of a thread's accumulator i: row + {0, 8}.
__device__ __forceinline__ constexpr int row_of(int i) { return i / 2 % 2; }

// A line of a tile of panels becomes zero.
template <class Tile>
__device__ __forceinline__ void clear_line(Tile& tile, int line) {
  for (auto& panel : tile)
    for (int chunk = 0; chunk < 8; chunk++)
      *reinterpret_cast<uint4*>(panel + sm90::swizzled(line, chunk)) = make_uint4(0, 0, 0, 0);
}

// Rows first .. first + rows - 1 of x, in boxes of one panel and `box_rows` rows.
inline sm90::TensorMap map_of(const Rows& x, int columns, int first, int rows, int heads, int batch, int box_rows) {
  // A dimension of size 1 may come with any stride; TMA wants multiples of 16.
  const auto bytes = [](int size, int64_t stride) { return static_cast<uint64_t>(size > 1 ? 2 * stride : 16); };
  return sm90::make_tensor_map({static_cast<const char*>(x.data) + 2 * first * x.stride,
                                {uint64_t(columns), uint64_t(rows), uint64_t(heads), uint64_t(batch)},
                                {bytes(rows, x.stride), bytes(heads, x.stride_h), bytes(batch, x.stride_b)},
                                {kPanel, uint32_t(box_rows), 1, 1},
                                false,
                                true});
}

// The keys that the band does not hide from every query. Maps of k and v hold these: the others are outside, and read as
// zeros whatever they are.
struct KeyRange {
  int first, count;
};
inline KeyRange keys_in_band(const Shape& shape, int band_lo, int band_hi) {
  const int first = std::min(std::max(band_lo, 0), shape.seqlen_k - 1);
  const int64_t end = std::min<int64_t>(shape.seqlen_k, int64_t{shape.seqlen_q} + band_hi);
  return {first, static_cast<int>(std::max<int64_t>(end - first, 1))};
}

}  // namespace fastattn::attention
