// Masked scaled dot-product attention.   Specification: fastattn/reference/attention.py
//
//   S = softmax_scale * q k^T + bias;  S_ij = -inf where query i may not see key j
//   lse_i = log sum_j exp(S_ij);  P = exp(S - lse);  out = dropout(P) v
//
// q (B, H, Lq, Dk), k (B, Hk, Lk, Dk), v (B, Hk, Lk, Dv), out (B, H, Lq, Dv) of type T = float32, bfloat16 or float16, in
// any strides with a contiguous last dimension; Dk, Dv <= kMaxHeadDim; query head h reads key head h / (H / Hk). Pointers
// are device pointers. Sums run in float32, offsets in 64 bits; nothing synchronises with the host.
// m counts queries, n counts keys. A query that sees nothing has out 0 and lse -inf. Rows of k and v that no query of a
// tile sees are read as zeros, so that what they hold (NaN, in padding) reaches nothing.
#pragma once
#include <cuda_runtime.h>

#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn::attention {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxShort = 128;  // queries and keys, at most, of a short sequence

// Bits stand in blocks of 128 positions, four words a block: position 8 * j + 2 * c + e of a block (j < 16, c < 4, e < 2)
// is bit 2 * j + e of word c. So a thread that holds an accumulator of mma.m16n8k16 or wgmma, whose columns are
// 8 * j + 2 * (lane % 4) + e, finds all its columns of a row in one word.
constexpr int kBitBlock = 128;
constexpr int kBitWords = 4;

// A matrix of rows for each batch and head: element (b, h, row, col) is at b * stride_b + h * stride_h + row * stride + col.
struct Rows {
  void* data;
  int64_t stride_b, stride_h, stride;
};

// Sizes, and what follows from them.
struct Shape {
  int batch, heads, key_heads, seqlen_q, seqlen_k, head_dim_k, head_dim_v;
};

// The tiles that hold work, for each batch, head and tile of the other axis; made by `prepare`. Of list i, the first
// counts[i].x entries are partial tiles, of which some is hidden, and the next, up to counts[i].y, full ones.
// A stride of 0 broadcasts.
struct TileLists {
  const int2* counts;          // (b, h, lists)
  const int32_t* tiles;        // (b, h, lists, max_tiles); null: no lists, the band says it by arithmetic
  int max_tiles;               // places of a list
  int64_t stride_b, stride_h;  // in lists
};

// Who sees whom. A row sees a column if its interval holds it and its bits have it. Rows are queries and columns keys, or,
// for a kernel whose rows are keys, the other way round.
//   interval  the band, band_lo <= n - m <= band_hi (an absent one is -seqlen_q, seqlen_k); or, where there are spans, that
//             of the row: for packed sequences, inside of which bands count, and where padding hides rows
//   bits      one row for all: the columns that padding leaves; or, of a bool matrix alone, a row each, into which
//             everything was folded. Nothing else takes memory of the size of the scores.
struct Visibility {
  int band_lo, band_hi;
  const int2* spans;  // (b, rows): columns x <= c < y; or null
  int64_t spans_stride_b;
  const uint32_t* bits;  // (b, h, rows or 1, ceil(columns / 128), 4); or null
  int64_t bits_stride_b, bits_stride_h, bits_stride;  // in words; a stride of 0 broadcasts
  TileLists lists;
  const uint32_t* seen;  // (b, h, ceil(seqlen_k / 128), 4): bits of the keys that some query sees, bias included; or null
  int64_t seen_stride_b, seen_stride_h;  // in words
};

// Added to the scores; -inf masks. Strides are in elements, 0 along a broadcast dimension.
struct Bias {
  const void* data;  // null: none
  int64_t stride_b, stride_h, stride_m, stride_n;
  DType dtype;
};

struct Forward {
  Rows q, k, v;  // in
  Rows out;      // out
  float* lse;    // out  (B, H, Lq) contiguous, natural logarithm
  Shape shape;
  float softmax_scale;
  Visibility visibility;
  Bias bias;
  Dropout dropout;  // row (b * H + h) * Lq + m, column n
  DType dtype;
  bool tf32;  // float32 is multiplied by tensor cores, rounded to tf32; else exactly
};

// The tiles for which forward() wants its lists; 0 where it wants none.
struct TileSize {
  int block_m, block_n;
};
TileSize forward_tile(const Shape& shape, DType dtype);

void forward(const Forward& p, cudaStream_t stream);

// P after dropout of heads first_head, first_head + head_step, ..; `heads` of them. Or, mean, their mean: then all heads.
struct Weights {
  Rows q, k;         // in
  const float* lse;  // in   (B, H, Lq) contiguous, of the forward
  float* totals;     //      (B, H, Lq), for the kernel's own use where lse is not exact enough; else null
  void* weights;     // out  T (B, heads, Lq, Lk), or of the mean (B, Lq, Lk); its matrices are contiguous
  int64_t stride_b;  //      from batch to batch, in elements
  int first_head, head_step, heads;
  bool mean;
  Shape shape;
  float softmax_scale;
  Visibility visibility;  // without lists: every tile is written
  Bias bias;
  Dropout dropout;
  DType dtype;
  bool tf32;
};

void weights(const Weights& p, cudaStream_t stream);

// The key of each query's largest weight before dropout, the first of equal ones; -1 where it sees nothing.
struct Alignment {
  Rows q, k;      // in
  int64_t* keys;  // out  (B, H, Lq) contiguous
  Shape shape;
  float softmax_scale;
  Visibility visibility;  // with lists of forward_tile(shape)
  Bias bias;
  DType dtype;
  bool tf32;
};

void alignment(const Alignment& p, cudaStream_t stream);

}  // namespace fastattn::attention
