// Shared by the kernels of the backward on Hopper: arguments and sizes.
#pragma once
#include "attention/backward_common.cuh"
#include "attention/backward_sm90.h"
#include "attention/sm90.cuh"

namespace fastattn::attention {
namespace {

using namespace sm90;

constexpr int kConsumers = 2;
using Registers = RegisterSplit<kConsumers, 24, 240>;  // of the kernels for dq, dk and dv

struct Arguments {
  Backward p;
  PaddedRows rows;
  TensorMap q, k, v, dout;
  int key_begin;         // the first key of the maps of k and v: keys_in_band
  TensorMap dq, dk, dv;  // those that the kernel writes
  int heads_together;    // of those that a block owns a tile of: item_in_order
  PartialSums sums;      // of the kernel that adds up dq
};

// Without results, for tiles of block_m queries and block_n keys.
inline Arguments arguments(const Backward& p, const PaddedRows& rows, int block_m, int block_n) {
  const Shape& s = p.shape;
  const KeyRange keys = keys_in_band(s, p.by_query.band_lo, p.by_query.band_hi);
  return {p,
          rows,
          matrix_map(p.q, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, block_m),
          matrix_map(p.k, s.head_dim_k, keys.first, keys.count, s.key_heads, s.batch, block_n),
          matrix_map(p.v, s.head_dim_v, keys.first, keys.count, s.key_heads, s.batch, block_n),
          matrix_map(p.dout, s.head_dim_v, 0, s.seqlen_q, s.heads, s.batch, block_m),
          keys.first};
}

// Each warpgroup writes 64 rows.
inline TensorMap dq_map(const Backward& p) {
  return matrix_map(p.dq, p.shape.head_dim_k, 0, p.shape.seqlen_q, p.shape.heads, p.shape.batch, kGroupRows);
}

// The first row of (b, h) in PaddedRows.
__device__ __forceinline__ int64_t first_row(const Arguments& a, int b, int h) {
  const int padded = ceil_div(a.p.shape.seqlen_q, kRowBlock) * kRowBlock;
  return (static_cast<int64_t>(b) * a.p.shape.heads + h) * padded;
}

// This warpgroup needs the stage no longer: it may be overwritten.
template <class Barriers, class Place>
__device__ __forceinline__ void release(Barriers& empty, Place& place) {
  if (threadIdx.x % kGroup == 0) empty[place.stage].arrive();
  place.advance();
}

// Whether all numbers are 0 and at least one is -0. This is never true for probabilities, but the compiler does not
// know it: a memory access that depends on the answer stops ptxas from moving the next wait to before the
// probabilities.
template <int kCount>
__device__ __forceinline__ bool are_negative_zeros(const float (&x)[kCount]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) any |= as_word(x[i]);
  return any == 0x80000000u;
}

}  // namespace
}  // namespace fastattn::attention
