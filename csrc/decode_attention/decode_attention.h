// Attention of new tokens to a cache of keys and values, a step of decoding.
// Specification: fastattn/backends/reference/decode_attention.py
//
//   S_j = cap(softmax_scale * q[b, w, h] k[b, j, row_j, h / group]) + bias[h, j]
//   row_j = ancestors[b, w, j], or w, or 0 of one row;   cap(x) = softcap * tanh(x / softcap), or x without a softcap
//   out[b, w, h] = sum_j exp(S_j - lse) v[b, j, row_j, h / group],   lse = log sum_j exp(S_j)
//
// over the visible positions: j < lengths[b], and 0 <= row_j < rows. Other positions are never read. A query without a
// visible position gives 0.
//
// T = float32, bfloat16 or float16. Pointers are device pointers, of any alignment; the last dimension of q, k and v is
// contiguous, other strides are in elements. Sums run in float32, each in one order: equal inputs give equal bits.
// Nothing synchronises with the host. Launches depend on the shapes and the device only, so that a CUDA graph may
// repeat them with other lengths.
#pragma once
#include <cuda_runtime.h>

#include "common/dtype_switch.h"

namespace fastattn::decode_attention {

constexpr int kMaxHeadDim = 256;
constexpr int kQueries = 8;  // most queries with the same keys in a block

struct Cached {
  const void* at;  // in  (batch, positions, rows, key_heads, head_dim) T
  int64_t stride_b, stride_m, stride_r, stride_h;
  int head_dim;
};

struct Decode {
  const void* q;  // in  (batch, queries, heads, head_dim of k) T
  int64_t q_stride_b, q_stride_w, q_stride_h;
  Cached k, v;
  const int* lengths;    // in  (batch,), or null: all positions
  const int* ancestors;  // in  (batch, queries, positions), or null
  int64_t ancestors_stride_b, ancestors_stride_w, ancestors_stride_m;
  const float* bias;  // in  (heads, positions), or null
  int64_t bias_stride_h, bias_stride_m;
  void* out;       // out (batch, queries, heads, head_dim of v) T, contiguous
  float* partial;  // work (splits,) of out's shape; null with one split
  float* lse;      // work (splits, batch, queries, heads); null with one split
  int batch, queries, heads, key_heads, positions, rows, splits;
  float softmax_scale, softcap;  // softcap: 0 is none
  DType dtype;
};

// The number of blocks that share a problem's positions.
int decode_splits(int batch, int queries, int heads, int key_heads, int positions, bool shared_keys,
                  int multiprocessors);

void decode_attention(const Decode& p, cudaStream_t stream);

}  // namespace fastattn::decode_attention
