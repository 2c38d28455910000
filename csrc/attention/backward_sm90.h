// The backward of attention on Hopper, for 16-bit types. Formulas: backward.h
//
// In this order:
//   backward_rows_sm90   lse and delta = rowsum(out * dout) - dlse of each query, for the others
//   backward_dq_sm90     dq; a block owns its queries: no block adds to memory, and results are equal in every run
//   backward_dkdv_sm90   dk, dv, and dbias_keys; a block owns its keys
//   bias_gradient_sm90   if needed, dbias of a bias that has queries and keys
// These are 7 products of all visited pairs, 2 D FLOPs a score each. One kernel needs 5 for all three gradients, but it
// adds up dq in memory in no fixed order, so that runs differ in the last bits:
//   backward_sum_sm90    instead of backward_dq_sm90 and backward_dkdv_sm90; backward_round_sm90 follows
// Layouts: as in forward_sm90.h.
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

constexpr int kRowBlock = 128;  // the rows of a head are padded to it in PaddedRows

// (B, H, Lq rounded up to kRowBlock). A query that may attend to nothing has shift +inf and delta 0.
struct PaddedRows {
  float *shift, *delta;  // shift: lse in powers of 2, or with a bias lse itself
};

// head_dim: the larger of the two.
TileSize backward_dq_sm90_tile(int head_dim);
TileSize backward_dkdv_sm90_tile(int head_dim);

void backward_rows_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream);
void backward_dq_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream);
void backward_dkdv_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream);
// dbias (batch, heads, Lq, Lk): bias_gradient() of backward.h.
void bias_gradient_sm90(const Backward& p, const PaddedRows& rows, void* dbias, int batch, int heads,
                        cudaStream_t stream);

// sum: float32 (B, H, Lq, Dk), dq / softmax_scale. Without bias and dropout, head dimensions up to kMaxHeadDimSum.
constexpr int kMaxHeadDimSum = 128;
void backward_sum_sm90(const Backward& p, const PaddedRows& rows, float* sum, cudaStream_t stream);
void backward_round_sm90(const Backward& p, const float* sum, cudaStream_t stream);

}  // namespace fastattn::attention
