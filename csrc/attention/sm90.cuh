// Shared by the Hopper kernels of attention: rings of stages, and the tensor maps of their operands.
#pragma once
#include "attention/tile_loop.cuh"
#include "common/mma.cuh"
#include "common/sm90/tma.cuh"
#include "common/sm90/wgmma.cuh"

#include <algorithm>

namespace fastattn::attention {

constexpr int kStages = 2, kPanel = 64;  // columns of a panel
constexpr int kGroupRows = 64;           // of a tile of scores, for each consumer warpgroup

// Calls f(Tiles<n>{}) with head_dim padded to n.
// Not to 96: a transposed B of wgmma would then be one and a half patterns of the 128-byte swizzle, which no document
//   describes. If the probe "bf16 96 64" of tests/cuda/hopper.cu passes on a chip, Tiles<96> can be added: at head
//   dimensions 65 to 96 it saves a quarter of all products, and of the registers of out, dq, dk and dv.
template <template <int> class Tiles, class Function>
auto with_tiles(int head_dim, Function&& f) {
  if (head_dim <= 64) return f(Tiles<64>{});
  return f(Tiles<128>{});
}

// Calls f(columns, masked, first) for the part of a tile in which a warpgroup's 64 rows see something, if there is one:
// both of its blocks of 64 x 64, or one of them from column `first` on. classes: of these rows, two bits a block.
template <class Function>
__device__ __forceinline__ void with_visible_part(uint32_t classes, Function&& f) {
  const auto with_columns = [&](auto columns, uint32_t every, int first) {
    (classes & every) != every ? f(columns, std::true_type{}, first) : f(columns, std::false_type{}, first);
  };
  const bool second = (classes & 4) != 0;
  if ((classes & 5) == 5)
    with_columns(Int<128>{}, 10, 0);
  else if ((classes & 5) != 0)
    with_columns(Int<64>{}, second ? 8 : 2, second ? 64 : 0);
}

// A position in a ring of stages, and the parity of its phase.
template <int kStages>
struct Ring {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Work item `index` of heads * tiles. The first `together` heads, which fit into the L2 cache, come before all others:
// tile 0 of each of them, then tile 1 of each.
struct HeadAndTile {
  int head, tile;
};
__device__ __forceinline__ HeadAndTile item_in_order(int index, int heads, int tiles, int together) {
  const int first = index / (together * tiles) * together, rest = index % (together * tiles);
  const int count = min(together, heads - first);
  return {first + rest % count, rest / count};
}
// How many heads fit into the L2 cache, if the tiles of a head read `bytes`.
inline int heads_together(int heads, int64_t bytes) {
  constexpr int64_t kCacheBytes = 32 << 20;  // over half of the L2 cache
  return static_cast<int>(std::clamp<int64_t>(kCacheBytes / std::max<int64_t>(bytes, 1), 1, heads));
}

// Loads a tile of panels: rows from `row` on of (b, h). load_panels also announces it to the barrier.
template <class Tile>
__device__ __forceinline__ void copy_panels(Tile& to, const sm90::TensorMap& map, sm90::Barrier& full, int row, int h,
                                            int b) {
#pragma unroll
  for (int panel = 0; panel < static_cast<int>(sizeof to / sizeof to[0]); panel++)
    sm90::tma_load(to[panel], map, full, panel * kPanel, row, h, b);
}
template <class Tile>
__device__ __forceinline__ void load_panels(Tile& to, const sm90::TensorMap& map, sm90::Barrier& full, int row, int h,
                                            int b) {
  full.arrive_expect(sizeof to);
  copy_panels(to, map, full, row, h, b);
}

// Starts d = (64 lines from line_x on of x) times the transpose of (kN lines from line_y on of y). The sum runs along
// the columns of both.
template <class T, int kHeadDim, int kN, int kPanels, int kBytesX, int kBytesY>
__device__ __forceinline__ void multiply_lines(float (&d)[kN / 2], const unsigned char (&x)[kPanels][kBytesX],
                                               int line_x, const unsigned char (&y)[kPanels][kBytesY], int line_y) {
#pragma unroll
  for (int column = 0; column < kHeadDim; column += 16)
    sm90::wgmma<T, kN, false, false>(d, sm90::along_columns<kBytesX / sm90::kLineBytes>(x, line_x, column),
                                     sm90::along_columns<kBytesY / sm90::kLineBytes>(y, line_y, column), column > 0);
  sm90::wgmma_commit();
}

// Starts d += a y; a, in registers, has a column for each line of y from `line` on.
template <class T, int kHeadDim, int kSteps, int kPanels, int kBytes>
__device__ __forceinline__ void add_lines(float (&d)[kHeadDim / 2], const uint32_t (&a)[kSteps][4],
                                          const unsigned char (&y)[kPanels][kBytes], int line) {
#pragma unroll
  for (int step = 0; step < kSteps; step++)
    sm90::wgmma<T, kHeadDim, true>(d, a[step], sm90::along_lines<kBytes / sm90::kLineBytes>(y, line + 16 * step, 0),
                                   true);
  sm90::wgmma_commit();
}

// Writes factor * sum, 64 rows of a warpgroup, to lines from `line` on of a tile; thread: in the warpgroup.
template <class T, int kHeadDim, class Tile>
__device__ __forceinline__ void write_lines(Tile& tile, int line, int thread, const float (&sum)[kHeadDim / 2],
                                            float factor) {
  const int lane = thread % 32, mine = line + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int column = 0; column < kHeadDim; column += 16) {
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; word++)
      words[word] = pack_word<T>(sum[column / 2 + 2 * word] * factor, sum[column / 2 + 2 * word + 1] * factor);
    sm90::stmatrix(tile[column / kPanel] + sm90::swizzled(mine, column % kPanel / 8 + lane / 16), words);
  }
}

// Which of its two rows, row and row + 8, a thread's accumulator i is of.
__device__ __forceinline__ constexpr int row_of(int i) { return i / 2 % 2; }

// Sets a line of a tile of panels to zero.
template <class Tile>
__device__ __forceinline__ void clear_line(Tile& tile, int line) {
  for (auto& panel : tile)
    for (int chunk = 0; chunk < 8; chunk++)
      *reinterpret_cast<uint4*>(panel + sm90::swizzled(line, chunk)) = make_uint4(0, 0, 0, 0);
}

// Rows first .. first + rows - 1 of x, in boxes of one panel and `box_rows` rows.
inline sm90::TensorMap matrix_map(const StridedMatrix& x, int columns, int first, int rows, int heads, int batch,
                                  int box_rows) {
  // A dimension of size 1 may have any stride; cuda.h requires at least the size of the dimensions inside it.
  uint64_t inside = 2 * uint64_t(columns);
  const auto bytes = [&inside](int size, int64_t stride) {
    const uint64_t step = size > 1 ? 2 * stride : inside;
    inside = std::max(inside, step * size);
    return step;
  };
  return sm90::make_tensor_map({static_cast<const char*>(x.data) + 2 * first * x.stride,
                                {uint64_t(columns), uint64_t(rows), uint64_t(heads), uint64_t(batch)},
                                {bytes(rows, x.stride), bytes(heads, x.stride_h), bytes(batch, x.stride_b)},
                                {kPanel, uint32_t(box_rows), 1, 1}});
}

// The keys that the band leaves to any query. The maps of k and v have only these: all others are read as zeros.
struct KeyRange {
  int first, count;
};
inline KeyRange keys_in_band(const Shape& shape, int band_lo, int band_hi) {
  const int first = std::min(std::max(band_lo, 0), shape.seqlen_k - 1);
  const int64_t end = std::min<int64_t>(shape.seqlen_k, int64_t{shape.seqlen_q} + band_hi);
  return {first, static_cast<int>(std::max<int64_t>(end - first, 1))};
}

}  // namespace fastattn::attention
