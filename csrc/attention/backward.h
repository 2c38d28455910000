// Backward of attention: the gradients of q, k, v and the bias.   Notation and layouts: attention.h
//
//   P = exp(S - lse);  Z = keep / (1 - dropout_p);  dP = Z * (dout v^T);  delta_i = sum_j P_ij dP_ij - dlse_i
//   dS = P * (dP - delta);  dq = softmax_scale * dS k;  dk = softmax_scale * dS^T q;  dv = (P * Z)^T dout;  dbias = dS
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 2, in kernels that own what they write: backward_dq owns
// query tiles, backward_dkdv key tiles. S and dP are computed twice, 7 products where one kernel needs 5, but nobody adds
// into memory that another block writes: no atomics, no float32 copy of dq, no pass to make delta, equal results run to run.
//
// delta equals sum_d out_id dout_id - dlse_i but for rounding; that is how backward_dq makes it as a rule. Some rows want it,
// and lse, more exactly than out and lse can say. backward_rows walks over the keys once more for them:
//   remainder   log2 of sum_j exp(S_ij - lse_i). lse is right to half a unit in its last place, and so are the P made from
//               it; a bias may move whole rows to where float32 is coarse (-1e4, finfo.min), where this is no small thing;
//   delta       from its definition.
// Rows with |lse| >= coarse_from get both: with a bias those beyond 64; all of exact float32, whose largest errors these
// would be, all where dbias is wanted, in whose sums the rounding of a 16-bit out adds up, and all under dropout beyond 0.5,
// which scales up the few weights that it leaves, and with them that rounding.
// Lighter dropout makes out inexact as well. Of one key, dP is delta and nothing should be left of dS, but dq and dk would
// get that rounding times k and q, 4 times the error allowed; of two or three, in a problem of few queries, up to 33 times. So
//   all rows of a problem of few queries get delta and remainder as above: fastattn/_attention_delta.py. Without dropout,
//     too: out is rounded all the same, and 1 such problem in 22 was over what is allowed, up to 18 times;
//   a block of backward_dq of which at most 16 queries see anything, or which meets a single tile of keys, walks twice, the
//     first time for delta alone: 5 products in place of 3. Such blocks are rare, but where sequences have no more queries;
//   a key with all the weight of its query says what delta is: backward_dq takes dP from there.
// What is left: more queries, of two to four keys each. From 256 on 1 problem in 100 with heads of 8 and 16 was over what is
// allowed, at most 1.5 times, and none of 560 with heads of 32 to 128. Where masks leave 17 to 255 queries of more, in fuller
// blocks, 1 in 40 was over, at most 2.1 times. And where every query has one key, without dropout, sums of out * dout and dP
// differ by their order: 1e-7 of dP is left of dS, and nothing in the formula. In dbias of float32 that shows beside 16-bit
// inputs as well; exact float32 keeps dlse apart from delta, so that of one key dlse is left to the last bit: backward.cuh.
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

struct Backward {
  Rows q, k, v, out, dout;   // in
  Rows dq, dk, dv;           // out
  const float *lse, *dlse;   // in   (B, H, Lq) contiguous; dlse may be null
  float *delta, *remainder;  //      (B, H, Lq) of whoever comes first, for the others; remainder null: all 0
  float* dbias_keys;         // out  (B, H, Lk), or null: dS summed over the queries
  Shape shape;
  float softmax_scale, coarse_from;
  Visibility by_query, by_key;  // rows are queries, or keys
  Bias bias;
  Dropout dropout;
  DType dtype;
  bool tf32;
};

// The tiles for which the kernels want their lists: they own `own` rows of one side and stream `stream` of the other.
struct BackwardTile {
  int own, stream;
};
BackwardTile backward_tile(const Shape& shape, DType dtype);

// In this order; the first only where remainder is wanted.
void backward_rows(const Backward& p, cudaStream_t stream);
void backward_dq(const Backward& p, cudaStream_t stream);
void backward_dkdv(const Backward& p, cudaStream_t stream);

// dbias (b, h, Lq, Lk), contiguous and of bias.dtype, which is float32 or p.dtype; b and h are batch and heads, or 1 where
// dS is summed.
void bias_gradient(const Backward& p, void* dbias, int batch, int heads, cudaStream_t stream);

}  // namespace fastattn::attention
