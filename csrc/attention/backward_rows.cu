// delta and remainder of rows that need them more exactly than out and lse can say: why, and which, is told in backward.h.
//
// Grid: one block per (batch, head, 64 queries), along all keys; if none of its rows is coarse, it makes delta from out and
//   is done. Each warp owns 16 queries, and holds a tile each of S and dP [16, 64] in registers.
// Work: 2 * (Dk + Dv) FLOPs a score in tiles that hold something to see.
#include "attention/backward_scores.cuh"

namespace fastattn::attention {
namespace {

template <class T>
__global__ void __launch_bounds__(kScoreThreads, 2) backward_rows_kernel(const Backward p) {
  auto& shared = shared_memory<ScoreShared<T>>();
  const Shape& shape = p.shape;
  const int tiles = blocks_of(shape.seqlen_q, kScoreTile), m0 = blockIdx.x % tiles * kScoreTile;
  const int head = blockIdx.x / tiles, h = head % shape.heads, b = head / shape.heads, c = threadIdx.x % 4;
  const int64_t row0 = static_cast<int64_t>(head) * shape.seqlen_q;

  float lse[2], total[2] = {}, delta[2] = {};
  const float no_remainder[2] = {};
  bool coarse = false;
  for_rows(p, row0, m0, [&](int half, int, float its) {
    lse[half] = its;
    coarse |= its != -kInfinity && fabsf(its) >= p.coarse_from;
  });
  if (!any_of_block(shared, coarse)) {
    const Matrix<T> out(p.out, b, h, shape.seqlen_q, shape.head_dim_v), dout(p.dout, b, h, shape.seqlen_q, shape.head_dim_v);
    for_rows(p, row0, m0, [&](int, int m, float its) {
      make_delta(p, out, dout, row0, m, its);
      if (c == 0 && m < shape.seqlen_q) p.remainder[row0 + m] = 0.0f;
    });
    return;
  }
  for (int n0 = 0; n0 < shape.seqlen_k; n0 += kScoreTile) {
    ScoreTile s, dp;
    if (!make_scores(p, shared, b, h, m0, n0, lse, no_remainder, s, dp)) continue;
#pragma unroll
    for (int j = 0; j < kScoreTile / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) total[e / 2] += s[j][e], delta[e / 2] += s[j][e] * dp[j][e];
    }
  }
  for_rows(p, row0, m0, [&](int half, int m, float its) {
    const float sum = quad_sum(total[half]), weighted = quad_sum(delta[half]);
    if (c != 0 || m >= shape.seqlen_q) return;
    const bool sees_some = its != -kInfinity;
    p.remainder[row0 + m] = sees_some ? log2f(sum) : 0.0f;
    const float dlse = p.dlse != nullptr && !kDlseApart<T> ? p.dlse[row0 + m] : 0.0f;
    p.delta[row0 + m] = sees_some ? weighted / sum - dlse : 0.0f;
  });
}

}  // namespace

void backward_rows(const Backward& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.shape.batch) * p.shape.heads * blocks_of(p.shape.seqlen_q, kScoreTile);
  if (blocks == 0) return;
  with_type(p.dtype, p.tf32, [&](auto t) {
    using T = decltype(t);
    launch(backward_rows_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kScoreThreads), sizeof(ScoreShared<T>), stream, p);
  });
}

}  // namespace fastattn::attention
