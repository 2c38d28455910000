// The backward of attention on Hopper, for 16-bit types. Formulas: backward.h
//
// In this order:
//   backward_rows_sm90   lse and delta = rowsum(out * dout) - dlse of each query, for the others
// Without a bias, and up to head dimension 128, one kernel for all three gradients, which adds up dq in memory:
//   backward_sum_sm90    5 products of all visited pairs, 2 D FLOPs a score each
//   backward_round_sm90  dq from the sum
// Otherwise there are not enough registers for that, and it takes 7 products:
//   backward_dq_sm90     dq; a block owns its queries
//   backward_dkdv_sm90   dk, dv, and dbias_keys; a block owns its keys
//   bias_gradient_sm90   if needed, dbias of a bias that has queries and keys
// Results are equal in every run.
// Layouts: as in forward_sm90.h.
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

constexpr int kRowBlock = 128;  // the rows of a head are padded to it in PaddedRows

// (B, H, Lq rounded up to kRowBlock). A query that may attend to nothing has shift +inf and delta 0.
struct PaddedRows {
  float *shift, *delta;  // shift: lse in powers of 2, or with a bias lse itself
};

// dq / softmax_scale as a sum over tiles of keys, float32, in parts of 64 queries and 64 columns: part (b, h, m / 64,
// column / 64), for whole blocks of kRowBlock queries and a head dimension padded to 64 or 128. The 4096 numbers of a
// part are the accumulators of a warpgroup, (8, 128, 4): accumulators 4 i .. 4 i + 3 of each thread. Tiles of keys add
// to a part one after the other, in order.
struct PartialSums {
  float* parts;
  int* counters;  // of each part, how many tiles of keys have been added; then one more int, the next work item
  int* turns;     // where by_key has lists, for each of their entries: how many tiles of keys come before it
};
constexpr int kMaxHeadDimSum = 128, kPartSize = 4096;

__host__ __device__ inline int64_t parts_of(const Shape& s) {
  const int64_t rows = (s.seqlen_q + kRowBlock - 1) / kRowBlock * kRowBlock;
  return int64_t{s.batch} * s.heads * rows / 64 * (s.head_dim_k > 64 || s.head_dim_v > 64 ? 2 : 1);
}

// head_dim: the larger of the two.
TileSize backward_dq_sm90_tile(int head_dim);
TileSize backward_dkdv_sm90_tile(int head_dim);

// sums, if its `parts` are not null: also clears the counters and finds the turns.
void backward_rows_sm90(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream);
void backward_dq_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream);
void backward_dkdv_sm90(const Backward& p, const PaddedRows& rows, cudaStream_t stream);
// dbias (batch, heads, Lq, Lk): bias_gradient() of backward.h.
void bias_gradient_sm90(const Backward& p, const PaddedRows& rows, void* dbias, int batch, int heads,
                        cudaStream_t stream);

void backward_sum_sm90(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream);
void backward_round_sm90(const Backward& p, const PartialSums& sums, cudaStream_t stream);

}  // namespace fastattn::attention
