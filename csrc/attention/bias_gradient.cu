// dbias of a bias that has queries and keys: dS, summed over the batches and heads that share it.   Formulas: backward.h
//
// A kernel of its own: dS is computed once more, so that every element of dbias has one writer, which sums in one order.
//   A bias without queries is a by-product of backward_dkdv, and one without keys needs no kernel: it adds one number to a
//   whole row of scores, which moves lse by as much and no probability, so its gradient is that of lse.
// Grid: one block per (batch or 1, head or 1, 64 queries, 64 keys) of dbias. It loops over whatever is summed.
// Registers: the sum of dS and a tile each of S and dP, [16, 64] of each warp, float32.
// Work: 2 * (Dk + Dv) FLOPs a score in tiles that hold something to see; bytes: q, k, v and dout once per tile.
#include "attention/backward_scores.cuh"

namespace fastattn::attention {
namespace {

template <class T>
__global__ void __launch_bounds__(kScoreThreads, 2) bias_gradient_kernel(const Backward p, void* dbias, int batch, int heads) {
  auto& shared = shared_memory<ScoreShared<T>>();
  const Shape& shape = p.shape;
  const int tiles_n = blocks_of(shape.seqlen_k, kScoreTile), tiles_m = blocks_of(shape.seqlen_q, kScoreTile);
  const int n0 = blockIdx.x % tiles_n * kScoreTile, m0 = blockIdx.x / tiles_n % tiles_m * kScoreTile;
  const int matrix = blockIdx.x / tiles_n / tiles_m, first_h = matrix % heads, first_b = matrix / heads;

  ScoreTile sum = {};
  for (int b = first_b; b < shape.batch; b += batch) {
    for (int h = first_h; h < shape.heads; h += heads) {
      const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
      float lse[2], delta[2], dlse[2], remainder[2];
      for_rows(p, row0, m0, [&](int half, int m, float its) {
        lse[half] = its, dlse[half] = dlse_apart<T>(p, row0 + m, its);
        delta[half] = m < shape.seqlen_q ? p.delta[row0 + m] : 0.0f;
        remainder[half] = m < shape.seqlen_q && p.remainder != nullptr ? p.remainder[row0 + m] : 0.0f;
      });
      ScoreTile s, dp;
      if (!make_scores(p, shared, b, h, m0, n0, lse, remainder, s, dp)) continue;
#pragma unroll
      for (int j = 0; j < kScoreTile / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[j][e] += score_gradient<T>(s[j][e], dp[j][e], delta[e / 2], dlse[e / 2]);
      }
    }
  }

  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const auto store = [&](auto zero) {
    auto* const to = static_cast<decltype(zero)*>(dbias) + static_cast<int64_t>(matrix) * shape.seqlen_q * shape.seqlen_k;
#pragma unroll
    for (int j = 0; j < kScoreTile / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int m = m0 + threadIdx.x / 32 * 16 + g + e / 2 * 8, n = n0 + 8 * j + 2 * c + e % 2;
        if (m < shape.seqlen_q && n < shape.seqlen_k)
          to[static_cast<int64_t>(m) * shape.seqlen_k + n] = decltype(zero)(sum[j][e]);
      }
    }
  };
  p.bias.dtype == DType::float32 ? store(float{}) : store(Element<T>{});
}

}  // namespace

void bias_gradient(const Backward& p, void* dbias, int batch, int heads, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(batch) * heads * blocks_of(p.shape.seqlen_q, kScoreTile) *
                         blocks_of(p.shape.seqlen_k, kScoreTile);
  if (blocks == 0) return;
  with_type(p.dtype, p.tf32, [&](auto t) {
    using T = decltype(t);
    launch(bias_gradient_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kScoreThreads), sizeof(ScoreShared<T>), stream,
           p, dbias, batch, heads);
  });
}

}  // namespace fastattn::attention
