// What the kernels of the backward on Hopper share: their arguments and sizes, and how lines of keys that take no part are cleared.
#pragma once
#include "attention/backward.cuh"
#include "attention/backward_sm90.h"
#include "attention/sm90.cuh"

namespace fastattn::attention {
namespace {

using namespace sm90;

constexpr int kConsumers = 2;
using Registers = RegistersOf<kConsumers, 24, 240>;  // of the kernels for dq, dk and dv

struct Arguments {
  Backward p;
  PaddedRows rows;
  TensorMap q, k, v, dout, dq, dk, dv;
  int key_begin;       // the first key of the maps of k and v: keys_in_band
  int heads_together;  // of those that a block owns a tile of: item_in_order
};

// For tiles of block_m queries and block_n keys; results are written by warpgroups, 64 rows each.
inline Arguments arguments(const Backward& p, const PaddedRows& rows, int block_m, int block_n) {
  const Shape& s = p.shape;
  const KeyRange keys = keys_in_band(s, p.by_query.band_lo, p.by_query.band_hi);
  return {p,
          rows,
          map_of(p.q, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, block_m),
          map_of(p.k, s.head_dim_k, keys.first, keys.count, s.key_heads, s.batch, block_n),
          map_of(p.v, s.head_dim_v, keys.first, keys.count, s.key_heads, s.batch, block_n),
          map_of(p.dout, s.head_dim_v, 0, s.seqlen_q, s.heads, s.batch, block_m),
          map_of(p.dq, s.head_dim_k, 0, s.seqlen_q, s.heads, s.batch, kRowsOfGroup),
          map_of(p.dk, s.head_dim_k, 0, s.seqlen_k, s.key_heads, s.batch, kRowsOfGroup),
          map_of(p.dv, s.head_dim_v, 0, s.seqlen_k, s.key_heads, s.batch, kRowsOfGroup),
          keys.first};
}

inline bool is_general(const Backward& p) {
  return p.bias.data != nullptr || p.dropout.rng_state != nullptr;
}

// Where the rows of (b, h) begin in PaddedRows.
__device__ __forceinline__ int64_t first_row(const Arguments& a, int b, int h) {
  const int padded = blocks_of(a.p.shape.seqlen_q, kRowBlock) * kRowBlock;
  return (static_cast<int64_t>(b) * a.p.shape.heads + h) * padded;
}

// Lines of a tile of keys from n0 on that take no part become zero, by the threads of a warpgroup. Were there any?
template <class Tile>
__device__ __forceinline__ bool clear_excluded_lines(Tile& tile, const Mask& mask, int b, int n0, int keys, int thread) {
  constexpr int kLines = sizeof tile[0] / kLineBytes;
  if (mask.columns == nullptr || all_columns_take_part<kLines>(mask, b, n0)) return false;
  const int n = n0 + thread;
  if (thread < kLines && n < keys && !takes_part(mask, b, n)) clear_line(tile, thread);
  return true;
}

// A stage may be overwritten, as far as the warpgroup of this thread is concerned.
template <class Barriers, class Place>
__device__ __forceinline__ void release(Barriers& empty, Place& place) {
  if (threadIdx.x % kGroup == 0) empty[place.stage].arrive();
  place.advance();
}

// Is -0 among the numbers, and nothing but 0 beside it? Probabilities are never so, nor NaN, but the compiler does not know:
// an access to memory that depends on the answer keeps ptxas from moving the wait behind them to before them.
template <int kCount>
__device__ __forceinline__ bool are_negative_zeros(const float (&x)[kCount]) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++) any |= as_word(x[i]);
  return any == 0x80000000u;
}

}  // namespace
}  // namespace fastattn::attention
