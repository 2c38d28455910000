// Backward of attention: the gradients of q, k, v and the bias.   Notation and layouts: attention.h
//
//   P = exp(S - lse);  Z = keep / (1 - dropout_p);  dP = Z * (dout v^T);  delta_i = sum_d out_id dout_id - dlse_i
//   dS = P * (dP - delta);  dR = dS * cap';  dq = softmax_scale * dR k;  dk = softmax_scale * dR^T q
//   dv = (P * Z)^T dout;  dbias = dS
//   cap' = 1 - tanh(x / softcap)^2 at x = softmax_scale * q k^T, or 1 without a softcap
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2, in kernels whose blocks own what they write: query
//   tiles in backward_dq, key tiles in backward_dkdv. S and dP are computed twice: 7 products, where one kernel needs
//   5. But no block adds to memory that another block writes: no atomics, no float32 copy of dq, no separate pass for
//   delta, and equal results in every run. backward_dq also writes delta, which the kernels after it read.
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

struct Backward {
  StridedMatrix q, k, v, out, dout;  // in
  StridedMatrix dq, dk, dv;          // out
  const float *lse, *dlse;           // in   (B, H, Lq) contiguous; dlse may be null
  float* delta;                      //      (B, H, Lq), written by the first kernel for the others
  float* dbias_keys;                 // out  (B, H, Lk), or null: dS summed over the queries
  Shape shape;
  float softmax_scale, softcap;
  Mask by_query, by_key;  // rows are queries, or keys
  Bias bias;
  Dropout dropout;
  DType dtype;
  bool tf32;
};

TileSize backward_tile(int head_dim, DType dtype);

// In this order.
void backward_dq(const Backward& p, cudaStream_t stream);
void backward_dkdv(const Backward& p, cudaStream_t stream);

// dbias (batch, heads, Lq, Lk), contiguous and of bias.dtype, which is float32 or p.dtype; heads is H, or 1
// where dS is summed over the heads; batch is at most B, and matrix b has the sum of samples b, b + batch, ...
//
// Of a bias by distance: float32 (batch, heads, tile diagonals, 128). Diagonal d has the tiles of 64 x 64 scores from
// query tile i to key tile i + d; d counts from -ceil(-first / 64) to ceil(last / 64). Entry j is the sum of its dS at
// distance 64 d - 63 + j: one distance is in two diagonals. The last entry is 0.
void bias_gradient(const Backward& p, void* dbias, int batch, int heads, cudaStream_t stream);

}  // namespace fastattn::attention
