// The backward of attention on Hopper, for 16-bit types without a bias. Formulas: backward.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

constexpr int kMaxHeadDimSm90Backward = 128;
constexpr int kRowBlock = 128;  // the rows of a head are padded to it in `shift` and `delta`

// Scratch of one call.
struct BackwardScratch {
  float* dq;             // (B, H, Lq, Dk): the sum of what the blocks add
  float *shift, *delta;  // (B, H, Lq rounded up to kRowBlock): lse in powers of 2, +inf for a query that sees nothing; delta
};

// The tile of a block: `own` keys and `stream` queries. head_dim: the larger of the two.
BackwardTile backward_sm90_tile(int head_dim);

// dq, dk and dv. Of p it reads no delta, remainder and by_query. What it demands of layouts is said in forward_sm90.h.
// dq adds up in an order that no one fixes: two runs may differ in its last bits.
void backward_sm90(const Backward& p, const BackwardScratch& scratch, cudaStream_t stream);

}  // namespace fastattn::attention
