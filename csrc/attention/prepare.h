// What kernels read of a mask: bits, which keys are seen at all, and the tiles that hold work. Formats: attention.h
//
// Everything is made on the device, one launch each, without a look from the host; once a mask, for all heads, layers and
// passes. b is the batch size or 1, h the number of heads or 1, for what the mask does not distinguish.
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

struct Mask {
  const int32_t* start;        // (b, Lq): query m sees only keys start <= n < end
  const int32_t* end;
  int64_t interval_stride_b;
  const bool* key_padding;     // (b, Lk), or null
  int64_t key_padding_stride_b;
  const bool* attn_mask;       // or null; strides in elements, 0 along a broadcast dimension
  int64_t stride_b, stride_h, stride_m, stride_n;
};

// A matrix of bits for each of `matrices` = b * h, contiguous: (b, h, rows, ceil(columns / 128), 4).
struct BitMatrix {
  uint32_t* words;
  int matrices, rows, columns;
};

void pack_bits(const Mask& mask, int heads, const BitMatrix& bits, cudaStream_t stream);
void transpose_bits(const BitMatrix& bits, uint32_t* transposed, cudaStream_t stream);

// classes (b, h, ceil(rows / block_m), ceil(columns / block_n)): 0 an empty tile, 1 a partial, 2 a full one. block_n
// divides 128 and is at least 8, or is a multiple of 128.
void classify_tiles(const BitMatrix& bits, int block_m, int block_n, uint8_t* classes, cudaStream_t stream);

// The lists along the keys (columns) of each query tile, or by_key along the queries of each key tile.
void list_tiles(const uint8_t* classes, int matrices, int row_tiles, int column_tiles, bool by_key, int2* counts,
                int32_t* tiles, cudaStream_t stream);

// seen (b, h, ceil(Lk / 32)), from bits (b or 1, h or 1, ..) or, without them, the band and key padding; and the bias, where
// there is one.
struct Seen {
  uint32_t* seen;
  int batch, heads, seqlen_q, seqlen_k;
  int band_lo, band_hi;
  const uint32_t* bits;  // or null
  int64_t bits_stride_b, bits_stride_h;
  const bool* key_padding;  // (b, Lk), or null; without bits
  int64_t key_padding_stride_b;
  Bias bias;
};

void seen_keys(const Seen& p, cudaStream_t stream);

}  // namespace fastattn::attention
