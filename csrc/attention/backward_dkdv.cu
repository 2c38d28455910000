// dk and dv.   Formulas: backward.h
//
// Grid: one block per (batch, key head, kBlockN keys); it loops over the queries of every head of its group, so that
//   their gradients add up in registers. Each warp owns 16 keys. Tiles of scores are transposed, keys by queries.
// Registers: dk and dv [16, kHeadDim] of each warp, a tile each of S^T and dP^T [16, kBlockM], float32.
// Shared memory: k and v, read once; q and dout with lse and delta, kStages deep.
// Work: 4 * (Dk + Dv) FLOPs a visited score, for S, dP, dk and dv; bytes: k, v, dk and dv once, q and dout once a key
//   tile.
// Measured with the others: forward.cu.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90 (not timed on sm_80), nothing spills:
//   head_dim 64    226 / 234 registers, 56 KiB of shared memory, 2 blocks a multiprocessor
//   head_dim 128   250 / 254            69 KiB                   2
//   float32: 202 / 203 and 231 / 229
#include "attention/backward_common.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kHeadDim>
struct DkdvShared : Tiling<T, kHeadDim> {
  using Size = Tiling<T, kHeadDim>;
  alignas(16) typename Size::RowTile k, v;
  alignas(16) typename Size::ColumnTile q[Size::kStages], dout[Size::kStages];
  alignas(16) float shift[Size::kStages][Size::kColumns], delta[Size::kStages][Size::kColumns];
  KeptBits<Size::kColumns, Size::kRows> kept;
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(Tiling<T, kHeadDim>::kThreads, 2) backward_dkdv_kernel(const Backward p) {
  using Size = Tiling<T, kHeadDim>;
  constexpr int kBlockN = Size::kRows, kBlockM = Size::kColumns, kStages = Size::kStages, kThreads = Size::kThreads;
  constexpr int kStride = kTileStride<T, kHeadDim>;
  auto& shared = shared_memory<DkdvShared<T, kHeadDim>>();
  const Shape& shape = p.shape;
  const int tiles = ceil_div(shape.seqlen_k, kBlockN), n0 = blockIdx.x % tiles * kBlockN;
  const int h_k = blockIdx.x / tiles % shape.key_heads, b = blockIdx.x / tiles / shape.key_heads;
  const int group = shape.heads / shape.key_heads;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp_row = threadIdx.x / 32 * 16;
  const Matrix<T> k(p.k, b, h_k, shape.seqlen_k, shape.head_dim_k), v(p.v, b, h_k, shape.seqlen_k, shape.head_dim_v);
  const Mask& mask = p.by_key;
  const DropoutMask dropout(p.dropout);
  const ScoreExponent exponent = make_exponent<T>(p);

  // Keys that take no part, or that the band excludes from all queries, may hold anything: they are read as zeros.
  const auto read = [&](int n) {
    return max(n + mask.band_lo, 0) <= min(n + mask.band_hi, shape.seqlen_q - 1) && takes_part(p.mask, b, n);
  };
  load_tile<T, kBlockN, kHeadDim, kThreads>(shared.k, k, n0, read);
  load_tile<T, kBlockN, kHeadDim, kThreads>(shared.v, v, n0, read);

  float dk[kHeadDim / 8][4] = {}, dv[kHeadDim / 8][4] = {};
  for (int h = h_k * group; h < (h_k + 1) * group; h++) {
    const Matrix<T> q(p.q, b, h, shape.seqlen_q, shape.head_dim_k);
    const Matrix<T> dout(p.dout, b, h, shape.seqlen_q, shape.head_dim_v);
    const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
    const TileLoop loop = plan_tiles<kBlockM>(mask, b, h, n0, kBlockN, shape.seqlen_k, shape.seqlen_q);

    const auto load = [&](int i) {
      const int m0 = loop.tile(i) * kBlockM, stage = i % kStages;
      // A query that may attend to nothing may hold anything, and its gradient too.
      const auto has_visible_keys = [&](int m) { return i >= loop.partial || p.lse[row0 + m] != -kInfinity; };
      load_tile<T, kBlockM, kHeadDim, kThreads>(shared.q[stage], q, m0, has_visible_keys);
      load_tile<T, kBlockM, kHeadDim, kThreads>(shared.dout[stage], dout, m0, has_visible_keys);
    };
    // lse and delta of a tile's queries, one query a thread, before they are stored in shared memory.
    struct {
      float lse, delta;
    } query_stats = {};
    const auto load_rows = [&](int i) {
      const int m = loop.tile(i) * kBlockM + static_cast<int>(threadIdx.x);
      const bool inside = threadIdx.x < kBlockM && m < shape.seqlen_q;
      query_stats.lse = inside ? p.lse[row0 + m] : -kInfinity;
      query_stats.delta = inside ? p.delta[row0 + m] : 0.0f;
    };
    const auto store_rows = [&](int i) {
      if (threadIdx.x >= kBlockM) return;
      shared.shift[i % kStages][threadIdx.x] = exponent.shift(query_stats.lse);
      shared.delta[i % kStages][threadIdx.x] = query_stats.delta;
    };

    if (loop.count > 0) load(0), load_rows(0), store_rows(0);
    cp_async_commit();
    for (int i = 0; i < loop.count; i++) {
      const int m0 = loop.tile(i) * kBlockM, stage = i % kStages;
      if (kStages > 1) {
        if (i + 1 < loop.count) load(i + 1), load_rows(i + 1);
        cp_async_commit();
      }
      // The seed is read here, for each tile: kept over the loop, it makes registers spill on sm_90.
      if (dropout.active()) shared.kept.draw(DropoutMask(p.dropout), row0 + m0, n0);
      cp_async_wait<kStages - 1>();
      __syncthreads();

      const auto query = [&](int j, int e) { return 8 * j + 2 * c + e % 2; };
      const auto kept = [&](int j, int e) { return (shared.kept.of[query(j, e)][warp_row / 8 + e / 2] >> g & 1) != 0; };
      float s[kBlockM / 8][4], dp[kBlockM / 8][4];
      multiply_rows<T, kHeadDim>(s, shared.k, warp_row, shared.q[stage]);
      if (kStages > 1 && i + 1 < loop.count) store_rows(i + 1);  // by now they have come
      make_probabilities(s, exponent, [&](int j, int e) { return shared.shift[stage][query(j, e)]; });
      if (i < loop.partial) {
        const auto bits = [&](int half) {
          return visible_bits<kBlockM>(mask, b, h, n0 + warp_row + g + 8 * half, shape.seqlen_k, m0, shape.seqlen_q);
        };
        clear_masked(s, bits(0), bits(1));
      }
      multiply_rows<T, kHeadDim>(dp, shared.v, warp_row, shared.dout[stage]);
#pragma unroll
      for (int j = 0; j < kBlockM / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (dropout.active()) dp[j][e] = kept(j, e) ? dp[j][e] * dropout.scale() : 0.0f;
          dp[j][e] = s[j][e] * (dp[j][e] - shared.delta[stage][query(j, e)]);
        }
      }
      if (dropout.active()) {
#pragma unroll
        for (int j = 0; j < kBlockM / 8; j++) {
#pragma unroll
          for (int e = 0; e < 4; e++) s[j][e] = kept(j, e) ? s[j][e] : 0.0f;
        }
      }
      add_weighted_rows<T, kHeadDim>(dv, s, shared.dout[stage], shape.head_dim_v);
      add_weighted_rows<T, kHeadDim>(dk, dp, shared.q[stage], shape.head_dim_k);
      __syncthreads();
      if (kStages == 1) {
        if (i + 1 < loop.count) load(i + 1), load_rows(i + 1), store_rows(i + 1);
        cp_async_commit();
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<T, kHeadDim>(Matrix<T>(p.dk, b, h_k, shape.seqlen_k, shape.head_dim_k), n0 + warp_row,
                          shared.k + warp_row * kStride, dk, p.softmax_scale);
  store_tile<T, kHeadDim>(Matrix<T>(p.dv, b, h_k, shape.seqlen_k, shape.head_dim_v), n0 + warp_row,
                          shared.v + warp_row * kStride, dv, dropout.active() ? dropout.scale() : 1.0f);
}

}  // namespace

void backward_dkdv(const Backward& p, cudaStream_t stream) {
  with_kernel(head_dim(p.shape), p.dtype, p.tf32, [&](auto t, auto padded) {
    using T = decltype(t);
    constexpr int kHeadDim = padded();
    const int64_t blocks = static_cast<int64_t>(p.shape.batch) * p.shape.key_heads *
                           ceil_div(p.shape.seqlen_k, Tiling<T, kHeadDim>::kRows);
    if (blocks > 0)
      launch(backward_dkdv_kernel<T, kHeadDim>, dim3(static_cast<unsigned>(blocks)),
             dim3(Tiling<T, kHeadDim>::kThreads), sizeof(DkdvShared<T, kHeadDim>), stream, p);
  });
}

}  // namespace fastattn::attention
