// The backward of attention on Hopper, for 16-bit types, in 5 products.   Formulas: backward.h; layouts: attention.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

constexpr int kRowBlock = 128;  // the rows of a head are padded to it in PaddedRows

// (B, H, Lq rounded up to kRowBlock). A query that may attend to nothing has shift +inf and delta 0.
struct PaddedRows {
  float *shift, *delta;  // shift: lse in powers of 2
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
constexpr int kPartSize = 4096;

__host__ __device__ inline int64_t padded_rows(const Shape& s) {
  return int64_t{s.batch} * s.heads * ((s.seqlen_q + kRowBlock - 1) / kRowBlock * kRowBlock);
}
__host__ __device__ inline int64_t parts_of(const Shape& s) {
  return padded_rows(s) / 64 * (s.head_dim_k > 64 || s.head_dim_v > 64 ? 2 : 1);
}

// The tile of by_key. head_dim: the larger of the two.
TileSize backward_sm90_tile(int head_dim);

// p.delta: memory for PaddedRows and PartialSums, so many numbers of 4 bytes. turns: entries of the lists of by_key.
inline int64_t work_sm90(int batch, int heads, int length, int head_dim, int64_t turns) {
  const Shape shape = {batch, heads, heads, length, 0, head_dim, head_dim};
  return 2 * padded_rows(shape) + parts_of(shape) * (kPartSize + 1) + 1 + turns;
}
void backward_sm90(const Backward& p, cudaStream_t stream);

// Its first and its last kernels: lse and delta of each query, the counters and the turns; dq from the sum.
void backward_rows_sm90(const Backward& p, const PaddedRows& rows, const PartialSums& sums, cudaStream_t stream);
void backward_round_sm90(const Backward& p, const PartialSums& sums, cudaStream_t stream);

}  // namespace fastattn::attention
