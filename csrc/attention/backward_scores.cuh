// A tile of 64 queries by 64 keys, S's probabilities and dP, for heads of any dimension: what the kernels need that look at
// dS alone and add up no rows of q, k or v. The head dimension is walked in parts of 128 bytes.
#pragma once
#include "attention/backward.cuh"

namespace fastattn::attention {

constexpr int kScoreTile = 64, kScoreThreads = 128;

template <class T>
constexpr int kPart = 128 / static_cast<int>(sizeof(T));

template <class T>
struct ScoreShared {
  using Tile = unsigned char[kScoreTile * kTileStride<T, kPart<T>>];
  alignas(16) Tile a, b;
  KeptBits<kScoreTile, kScoreTile> kept;
  int any;
};

using ScoreTile = float[kScoreTile / 8][4];

// Is `mine` true of some thread of the block?
template <class T>
__device__ __forceinline__ bool any_of_block(ScoreShared<T>& shared, bool mine) {
  __syncthreads();  // the answer before was read
  if (threadIdx.x == 0) shared.any = 0;
  __syncthreads();
  if (mine) shared.any = 1;
  __syncthreads();
  return shared.any != 0;
}

// product = rows m0 .. of x times the transpose of rows n0 .. of y, summed in the order of a product that is not in parts: then
// scores are equal to those of the other kernels, bit for bit.
template <class T, class RowTakesPart, class ColumnTakesPart>
__device__ __forceinline__ void multiply_parts(ScoreShared<T>& shared, ScoreTile& product, Matrix<T> x, Matrix<T> y, int m0,
                                               int n0, RowTakesPart row_takes_part, ColumnTakesPart column_takes_part) {
#pragma unroll
  for (int j = 0; j < kScoreTile / 8; j++) product[j][0] = product[j][1] = product[j][2] = product[j][3] = 0.0f;
#pragma unroll 1
  for (; x.columns > 0; x.columns -= kPart<T>, y.columns -= kPart<T>, x.data += kPart<T>, y.data += kPart<T>) {
    __syncthreads();  // the part before was read
    load_tile<T, kScoreTile, kPart<T>, kScoreThreads>(shared.a, x, m0, row_takes_part);
    load_tile<T, kScoreTile, kPart<T>, kScoreThreads>(shared.b, y, n0, column_takes_part);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply_rows<T, kPart<T>>(product, shared.a, threadIdx.x / 32 * 16, shared.b, true);
  }
}

// The probabilities and dP of queries m0 .. and keys n0 .. of a batch and head, where the mask leaves something to see: else
// returns false. lse and remainder are those of a lane's two rows. The whole block calls it.
template <class T>
__device__ __forceinline__ bool make_scores(const Backward& p, ScoreShared<T>& shared, int b, int h, int m0, int n0,
                                            const float (&lse)[2], const float (&remainder)[2], ScoreTile& s, ScoreTile& dp) {
  const Shape& shape = p.shape;
  const Visibility& who = p.by_query;
  const int row = m0 + threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  uint32_t bits[2];
#pragma unroll
  for (int half = 0; half < 2; half++)
    bits[half] = lse[half] == -kInfinity ? 0
                                         : sees<kScoreTile>(who, b, h, row + g + 8 * half, shape.seqlen_q, n0, shape.seqlen_k,
                                                            who.band_lo, who.band_hi);
  if (!any_of_block(shared, ((bits[0] | bits[1]) & 0xffff) != 0)) return false;

  const int h_k = h / (shape.heads / shape.key_heads), last_m = min(m0 + kScoreTile, shape.seqlen_q) - 1;
  const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
  const Matrix<T> q(p.q, b, h, shape.seqlen_q, shape.head_dim_k), dout(p.dout, b, h, shape.seqlen_q, shape.head_dim_v);
  const Matrix<T> k(p.k, b, h_k, shape.seqlen_k, shape.head_dim_k), v(p.v, b, h_k, shape.seqlen_k, shape.head_dim_v);
  const auto sees_some = [&](int m) { return p.lse[row0 + m] != -kInfinity; };
  const auto seen = [&](int n) {
    return n >= m0 + who.band_lo && n <= last_m + who.band_hi && key_is_seen(who, b, h, n);
  };
  multiply_parts<T>(shared, s, q, k, m0, n0, sees_some, seen);
  multiply_parts<T>(shared, dp, dout, v, m0, n0, sees_some, seen);

  const ScoreExponent exponent = exponent_of<T>(p);
  const float shift[2] = {exponent.shift(lse[0]), exponent.shift(lse[1])};
  make_probabilities<false>(s, exponent, p, b, h, row, n0, [&](int, int e) { return shift[e / 2]; },
                            [&](int, int e) { return remainder[e / 2]; });
  clear_unseen(s, bits[0], bits[1]);
  const DropoutMask dropout(p.dropout);
  if (dropout.active()) {
    shared.kept.draw(dropout, row0 + m0, n0);  // what was drawn before was read before any_of_block
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kScoreTile / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const bool kept = shared.kept.of[row - m0 + g + e / 2 * 8][j] >> (2 * c + e % 2) & 1;
        dp[j][e] = kept ? dp[j][e] * dropout.scale() : 0.0f;
      }
    }
  }
  return true;
}

// Calls f(half, m, lse) for a lane's two rows; lse is -inf past the last query.
template <class Function>
__device__ __forceinline__ void for_rows(const Backward& p, int64_t row0, int m0, Function&& f) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = m0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    f(half, m, m < p.shape.seqlen_q ? p.lse[row0 + m] : -kInfinity);
  }
}

}  // namespace fastattn::attention
