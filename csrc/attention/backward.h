// Backward of attention: the gradients of q, k and v.   Notation and layouts: attention.h
//
//   P = exp(S - lse);  Z = keep / (1 - dropout_p);  dP = Z * (dout v^T);  delta_i = sum_d out_id dout_id - dlse_i
//   dS = P * (dP - delta);  dq = softmax_scale * dS k;  dk = softmax_scale * dS^T q
//   dv = (P * Z)^T dout
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2, in kernels whose blocks own what they write: query
//   tiles in backward_dq, key tiles in backward_dkdv. S and dP are computed twice: 7 products, where one kernel needs
//   5. But no block adds to memory that another block writes: no atomics, no float32 copy of dq, no separate pass for
//   delta, and equal results in every run. backward_dq also writes delta, which the kernels after it read.
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

struct Backward : Forward {  // of which out and lse are in; rows of its mask are queries
  StridedMatrix dout;        // in
  StridedMatrix dq, dk, dv;  // out
  const float* dlse;         // in   (B, H, Lq) contiguous, or null
  float* delta;              // work (B, H, Lq), written by the first kernel for the others
  Mask by_key;               // rows are keys
};

TileSize backward_tile(int head_dim, DType dtype);

// In this order.
void backward_dq(const Backward& p, cudaStream_t stream);
void backward_dkdv(const Backward& p, cudaStream_t stream);

}  // namespace fastattn::attention
