// Masked scaled dot-product attention.   Specification: fastattn/backends/reference/attention.py
//
//   S = softmax_scale * q k^T;  S_ij = -inf where query i may not attend to key j
//   lse_i = log sum_j exp(S_ij);  P = exp(S - lse);  out = dropout(P) v
//
// q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv), out (B, H, Lq, Dv) of type T = float32, bfloat16 or float16,
// in any strides with a contiguous last dimension; Dk, Dv <= kMaxHeadDim; query head h reads key head h / (H / Hk).
// Pointers are device pointers. Sums run in float32, offsets in 64 bits; nothing synchronises with the host. m counts
// queries, n counts keys. A query that may attend to nothing has out 0 and lse -inf. Keys that take no part (struct
// Mask) are read as zeros, because padding may hold NaN. There is no bias, softcap or wider head: no record times them,
// and Triton computes them.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn::attention {

constexpr int kMaxHeadDim = 128;

// Bits of columns are in blocks of 128, four words a block, in the order of the tensor cores' accumulators:
// fastattn/masks/kernel_format.py.
constexpr int kBitBlock = 128;
constexpr int kBitWords = 4;
// Where the low bits of a list's entry, which are the tile, end. The others are classes of its blocks, for Hopper.
constexpr int kClassShift = 20, kTileBits = (1 << kClassShift) - 1;

// A matrix for each batch and head: element (b, h, row, col) is at b * stride_b + h * stride_h + row * stride + col.
struct StridedMatrix {
  void* data;
  int64_t stride_b, stride_h, stride;
};

struct Shape {
  int batch, heads, key_heads, seqlen_q, seqlen_k, head_dim_k, head_dim_v;
};
inline int head_dim(const Shape& shape) { return std::max(shape.head_dim_k, shape.head_dim_v); }

// Which rows may attend to which columns: PreparedMask of fastattn/masks/kernel_format.py. Rows are queries and columns
// are keys or, for a kernel whose blocks own keys, the other way round. Strides of 0 broadcast.
struct Mask {
  int band_lo, band_hi;   // row r may attend to columns r + band_lo .. r + band_hi
  const int2* intervals;  // (b, rows): row r may attend to columns x <= c < y; or null: the band says it
  int64_t intervals_stride_b;
  const uint32_t* columns;  // (b, ceil(columns / 128), 4): bits of the columns that take part; null: all
  int64_t columns_stride_b;
  const uint32_t* bits;  // (b, h, rows or 1, ceil(columns / 128), 4): of a bool matrix, or equal to columns; or null
  int64_t bits_stride_b, bits_stride_h, bits_stride_row;
  // For each row tile, a list of column tiles: counts.x partial ones, then full ones up to counts.y. Null: no lists.
  const int2* counts;    // (b, h, row tiles)
  const int32_t* tiles;  // (b, h, row tiles, max_tiles)
  int max_tiles;
  int64_t lists_stride_b, lists_stride_h;  // in lists

  bool has_matrix() const { return bits != columns; }
};

struct Forward {
  StridedMatrix q, k, v;  // in
  StridedMatrix out;      // out
  float* lse;             // out  (B, H, Lq) contiguous, natural logarithm
  Shape shape;
  float softmax_scale;  // positive in the forward
  Mask mask;
  Dropout dropout;  // row (b * H + h) * Lq + m, column n
  DType dtype;
  bool tf32;  // float32 is rounded to tf32 for products; else each is four in tf32: common/mma.cuh
};

// A kernel's tile of scores, in rows and columns of its Mask: a block owns the rows and loops over the columns. The
// lists of the mask must be made for this tile.
struct TileSize {
  int rows, columns;
};
TileSize forward_tile(int head_dim, DType dtype);  // head_dim: the larger of the two

void forward(const Forward& p, cudaStream_t stream);

// The same on Hopper, for 16-bit types. q, k, v and out have no empty dimension. They, their rows, heads and batches
// start at multiples of 16 bytes. next_item: an int of scratch on the device.
TileSize forward_sm90_tile(int head_dim);
void forward_sm90(const Forward& p, int* next_item, cudaStream_t stream);

}  // namespace fastattn::attention
