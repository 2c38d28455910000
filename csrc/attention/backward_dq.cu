// dq and delta, which the other kernels of the backward read.   Formulas: backward.h
//
// Grid: one block per (batch, head, kBlockM queries), the last queries of a head first: under a causal mask they have
//   the longest loop. Each warp owns 16 queries.
// Registers: dq [16, kHeadDim] of each warp, a tile each of S and dP [16, kBlockN], float32. A warp of 16 rows reads k
//   and v from shared memory as fast as the tensor cores of an A100 need them; with 32 rows dk and dv would not fit.
// Shared memory: q and dout, read once; k and v, kStages deep.
// Work: 2 * (2 * Dk + Dv) FLOPs a visited score, for S, dP and dq; bytes: q, dout, out and dq once, k and v once a
//   query tile, mostly from L2. Only visited tiles cost. Masks and dropout are uniform branches.
// Measured with the others: forward.cu.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90 (not timed on sm_80), nothing spills:
//   head_dim 64    209 / 210 registers, 55 KiB of shared memory, 2 blocks a multiprocessor
//   head_dim 128   181 / 183            68 KiB                   2
//   float32: 163 / 161 and 163 / 163
// At head_dim 64 the tile is that of the forward, so that both share their lists. 32 keys a tile would need 165
// registers, three blocks; 64 with three blocks spill 4 to 64 bytes.
#include "attention/backward_common.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kHeadDim>
struct DqShared : Tiling<T, kHeadDim> {
  using Size = Tiling<T, kHeadDim>;
  alignas(16) typename Size::RowTile q, dout;
  alignas(16) typename Size::ColumnTile k[Size::kStages], v[Size::kStages];
  KeptBits<Size::kRows, Size::kColumns> kept;
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(Tiling<T, kHeadDim>::kThreads, 2) backward_dq_kernel(const Backward p) {
  using Size = Tiling<T, kHeadDim>;
  constexpr int kBlockM = Size::kRows, kBlockN = Size::kColumns, kStages = Size::kStages, kThreads = Size::kThreads;
  constexpr int kStride = kTileStride<T, kHeadDim>;
  auto& shared = shared_memory<DqShared<T, kHeadDim>>();
  const Shape& shape = p.shape;
  const int tiles = ceil_div(shape.seqlen_q, kBlockM);
  const int m0 = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * kBlockM;
  const int head = blockIdx.x / tiles, h = head % shape.heads, b = head / shape.heads;
  const int h_k = h / (shape.heads / shape.key_heads);
  const int64_t row0 = static_cast<int64_t>(head) * shape.seqlen_q;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp_row = threadIdx.x / 32 * 16;
  const Matrix<T> q(p.q, b, h, shape.seqlen_q, shape.head_dim_k), dout(p.dout, b, h, shape.seqlen_q, shape.head_dim_v);
  const Matrix<T> k(p.k, b, h_k, shape.seqlen_k, shape.head_dim_k), v(p.v, b, h_k, shape.seqlen_k, shape.head_dim_v);
  const Mask& mask = p.mask;
  const TileLoop loop = plan_tiles<kBlockN>(mask, b, h, m0, kBlockM, shape.seqlen_q, shape.seqlen_k);
  const int last_m = min(m0 + kBlockM, shape.seqlen_q) - 1;
  const DropoutMask dropout(p.dropout);
  const ScoreExponent exponent = make_exponent<T>(p);

  // A query that may attend to nothing may hold anything, and its gradient too: both are read as zeros.
  const auto has_visible_keys = [&](int m) { return p.lse[row0 + m] != -kInfinity; };
  load_tile<T, kBlockM, kHeadDim, kThreads>(shared.q, q, m0, has_visible_keys);
  load_tile<T, kBlockM, kHeadDim, kThreads>(shared.dout, dout, m0, has_visible_keys);

  float shift[2], delta[2];  // of a lane's two rows
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = m0 + warp_row + g + 8 * half;
    const float lse = m < shape.seqlen_q ? p.lse[row0 + m] : -kInfinity;
    shift[half] = exponent.shift(lse);
    delta[half] = make_delta(p, Matrix<T>(p.out, b, h, shape.seqlen_q, shape.head_dim_v), dout, row0, m, lse);
  }

  const auto load = [&](int i) {
    const int n0 = loop.tile(i) * kBlockN, stage = i % kStages;
    // Keys that take no part, or that the band excludes from the whole tile, may hold anything: they are read as zeros.
    const auto read = [&](int n) {
      return i >= loop.partial || (n >= m0 + mask.band_lo && n <= last_m + mask.band_hi && takes_part(mask, b, n));
    };
    load_tile<T, kBlockN, kHeadDim, kThreads>(shared.k[stage], k, n0, read);
    load_tile<T, kBlockN, kHeadDim, kThreads>(shared.v[stage], v, n0, read);
  };

  float dq[kHeadDim / 8][4] = {};
  if (loop.count > 0) load(0);
  cp_async_commit();
  for (int i = 0; i < loop.count; i++) {
    const int n0 = loop.tile(i) * kBlockN, stage = i % kStages;
    if (kStages > 1) {
      if (i + 1 < loop.count) load(i + 1);
      cp_async_commit();
    }
    if (dropout.active()) shared.kept.draw(dropout, row0 + m0, n0);
    cp_async_wait<kStages - 1>();
    __syncthreads();

    float s[kBlockN / 8][4], dp[kBlockN / 8][4];
    multiply_rows<T, kHeadDim>(s, shared.q, warp_row, shared.k[stage]);
    multiply_rows<T, kHeadDim>(dp, shared.dout, warp_row, shared.v[stage]);
#pragma unroll
    for (int j = 0; j < kBlockN / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (dropout.active()) {
          const bool kept = shared.kept.of[warp_row + g + e / 2 * 8][j] >> (2 * c + e % 2) & 1;
          dp[j][e] = kept ? dp[j][e] * dropout.scale() : 0.0f;
        }
        dp[j][e] -= delta[e / 2];
      }
    }
    make_probabilities(s, exponent, [&](int, int e) { return shift[e / 2]; });
    if (i < loop.partial) {
      const auto bits = [&](int half) {
        return visible_bits<kBlockN>(mask, b, h, m0 + warp_row + g + 8 * half, shape.seqlen_q, n0, shape.seqlen_k);
      };
      clear_masked(s, bits(0), bits(1));
    }
#pragma unroll
    for (int j = 0; j < kBlockN / 8; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) s[j][e] *= dp[j][e];
    }
    add_weighted_rows<T, kHeadDim>(dq, s, shared.k[stage], shape.head_dim_k);
    __syncthreads();
    if (kStages == 1) {
      if (i + 1 < loop.count) load(i + 1);
      cp_async_commit();
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  store_tile<T, kHeadDim>(Matrix<T>(p.dq, b, h, shape.seqlen_q, shape.head_dim_k), m0 + warp_row,
                          shared.q + warp_row * kStride, dq, p.softmax_scale);
}

}  // namespace

TileSize backward_tile(int head_dim, DType dtype) {
  TileSize tile = {};
  with_kernel(head_dim, dtype, false, [&](auto t, auto padded) {
    using Size = Tiling<decltype(t), padded()>;
    tile = {Size::kRows, Size::kColumns};
  });
  return tile;
}

void backward_dq(const Backward& p, cudaStream_t stream) {
  with_kernel(head_dim(p.shape), p.dtype, p.tf32, [&](auto t, auto padded) {
    using T = decltype(t);
    constexpr int kHeadDim = padded();
    const int64_t heads = static_cast<int64_t>(p.shape.batch) * p.shape.heads;
    const int64_t blocks = heads * ceil_div(p.shape.seqlen_q, Tiling<T, kHeadDim>::kRows);
    if (blocks > 0)
      launch(backward_dq_kernel<T, kHeadDim>, dim3(static_cast<unsigned>(blocks)), dim3(Tiling<T, kHeadDim>::kThreads),
             sizeof(DqShared<T, kHeadDim>), stream, p);
  });
}

}  // namespace fastattn::attention
