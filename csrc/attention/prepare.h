// What kernels read of a mask: spans, bits, which keys are seen at all, and the tiles that hold work. Formats: attention.h
//
// Everything is made on the device, one launch each, without a look from the host; once a mask, for all heads, layers and
// passes. b is the batch size or 1, h the number of heads or 1, for what the mask does not distinguish.
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

// A band counts from the first row and column, and another one from the last, of the whole or of each packed sequence.
struct Spans {
  int2* spans;                 // out (b, rows)
  int batch, rows, columns;
  int64_t low, high, low_from_end, high_from_end;  // row r sees columns r + low .. r + high, both counted so
  const int32_t *row_offsets, *column_offsets;     // (sequences + 1,), or null: one sequence
  int sequences;
  const bool* padding;         // (b, rows), true a real row; or null
  int64_t padding_stride_b;
};

void make_spans(const Spans& p, cudaStream_t stream);

struct Mask {
  const int2* spans;           // (b, Lq)
  int64_t spans_stride_b;
  const bool* key_padding;     // (b, Lk), or null
  int64_t key_padding_stride_b;
  const bool* attn_mask;       // strides in elements, 0 along a broadcast dimension
  int64_t stride_b, stride_h, stride_m, stride_n;
};

// A matrix of bits for each of `matrices` = b * h, contiguous: (b, h, rows, ceil(columns / 128), 4).
struct BitMatrix {
  uint32_t* words;
  int matrices, rows, columns;
};

void pack_bits(const Mask& mask, int heads, const BitMatrix& bits, cudaStream_t stream);
void transpose_bits(const BitMatrix& bits, uint32_t* transposed, cudaStream_t stream);

// Of tiles of block_m queries by block_n keys: 0 an empty one, 1 a partial, 2 a full one. block_n divides 128 and is at
// least 8, or is a multiple of 128.
struct Classes {
  uint8_t* classes;  // out (b, h, ceil(Lq / block_m), ceil(Lk / block_n))
  int batch, heads, seqlen_q, seqlen_k, block_m, block_n;
  Visibility visibility;  // by query, without a bias
};

void classify_tiles(const Classes& p, cudaStream_t stream);

// The lists along the keys (columns) of each query tile, or by_key along the queries of each key tile.
void list_tiles(const uint8_t* classes, int matrices, int row_tiles, int column_tiles, bool by_key, int2* counts,
                int32_t* tiles, cudaStream_t stream);

// The keys that some query sees: from bits, a row a query, or else from all that hides some; and the bias, where there is one.
struct Seen {
  uint32_t* seen;  // out (b, h, ceil(Lk / 128), 4)
  int batch, heads, seqlen_q, seqlen_k;
  int band_lo, band_hi;
  const int2* spans;  // (b, Lk), of keys, in place of the band; or null
  int64_t spans_stride_b;
  const uint32_t* bits;  // (b, h, Lq, ceil(Lk / 128), 4), into which everything was folded; or null
  int64_t bits_stride_b, bits_stride_h;
  const uint32_t* queries;  // (b, ceil(Lq / 128), 4): bits of those that are no padding; or null
  int64_t queries_stride_b;
  const bool* key_padding;  // (b, Lk), or null
  int64_t key_padding_stride_b;
  Bias bias;
};

void seen_keys(const Seen& p, cudaStream_t stream);

}  // namespace fastattn::attention
