// The attention weights on request, from q, k and the forward's lse: dropout(exp(S - lse)).
// Layouts: attention.h
//
// For inspection, not for training: only this kernel writes a tensor as large as the scores. It writes what the forward
// multiplied with v, rounded to T.
// Grid: one block a (batch, head, kBlockM queries, kBlockN keys).
// Bytes: the weights once, and q and k once a tile of the other, from L2. Work: 2 * Dk FLOPs a score.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90, nothing spills:
//   head_dim 64    104 / 104 registers, 18.0 KiB of shared memory, 4 blocks a multiprocessor
//   head_dim 128   106 / 106            34.0 KiB                   4
//   head_dim 256    84 /  84            49.5 KiB                   3 / 4
#include "attention/scores.cuh"
#include "attention/tile.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kHeadDim>
struct alignas(16) WeightsShared {
  using Tile = ForwardTile<T, kHeadDim>;
  unsigned char q[Tile::kBlockM * kTileStride<T, kHeadDim>];
  unsigned char k[Tile::kBlockN * kTileStride<T, kHeadDim>];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(ForwardTile<T, kHeadDim>::kThreads, 4) weights_kernel(const Weights p) {
  using Tile = ForwardTile<T, kHeadDim>;
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kTiles = kBlockN / 8;
  auto& shared = shared_memory<WeightsShared<T, kHeadDim>>();
  const int lane = threadIdx.x % 32, g = lane / 4, Lq = p.shape.seqlen_q, Lk = p.shape.seqlen_k;
  const int query_tiles = ceil_div(Lq, kBlockM), m0 = blockIdx.x % query_tiles * kBlockM, n0 = blockIdx.y * kBlockN;
  const int h = blockIdx.x / query_tiles % p.shape.heads, b = blockIdx.x / query_tiles / p.shape.heads;
  const int warp_row = threadIdx.x / 32 * 16, m = m0 + warp_row + g;
  const int64_t row = (static_cast<int64_t>(b) * p.shape.heads + h) * Lq + m;
  const DropoutMask dropout(p.dropout);
  const Exponent<T> exponent(p.bias, p.softmax_scale, p.softcap);

  const Matrix<T> q(p.q, b, h, Lq, p.shape.head_dim_k);
  const Matrix<T> k(p.k, b, h / (p.shape.heads / p.shape.key_heads), Lk, p.shape.head_dim_k);
  const auto all = [](int) { return true; };
  load_tile<T, kBlockM, kHeadDim, Tile::kThreads>(shared.q, q, m0, all);
  load_tile<T, kBlockN, kHeadDim, Tile::kThreads>(shared.k, k, n0, all);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  float s[kTiles][4];
  multiply_rows<T, kHeadDim>(s, shared.q, warp_row, shared.k);
  __syncthreads();  // q was read: the result takes its place

  exponent.scale(s);
  if (p.bias.data != nullptr) add_bias<T>(s, p.bias, b, h, m, n0, Lq, Lk);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool inside = m + 8 * half < Lq;
    const float lse = inside ? p.lse[row + 8 * half] : -kInfinity;
    const float shift = lse == -kInfinity ? 0.0f
                        : exponent.folded ? lse * kLog2e
                                          : lse;  // empty row: all scores -inf
    mask_scores(s, half, visible_bits<kBlockN>(p.mask, b, h, m + 8 * half, Lq, n0, Lk));
    exponent.apply(s, half, shift);
    if (dropout.active()) drop(s, half, dropout, row + 8 * half, n0);
  }

  const int64_t elements = static_cast<int64_t>(Lq) * Lk;
  const StridedMatrix rows{static_cast<Element<T>*>(p.weights) + n0, p.shape.heads * elements, elements, Lk};
  store_tile<T, kBlockN>(Matrix<T>(rows, b, h, Lq, min(Lk - n0, kBlockN)), m0 + warp_row,
                         shared.q + warp_row * kTileStride<T, kHeadDim>, s,
                         dropout.active() ? dropout.scale() : 1.0f);
}

template <class T, int kHeadDim>
void launch_weights(const Weights& p, cudaStream_t stream) {
  using Tile = ForwardTile<T, kHeadDim>;
  const int64_t matrices = static_cast<int64_t>(p.shape.batch) * p.shape.heads;
  const int64_t blocks = matrices * ceil_div(p.shape.seqlen_q, Tile::kBlockM);
  const int key_tiles = ceil_div(p.shape.seqlen_k, Tile::kBlockN);
  if (blocks > 0 && key_tiles > 0)
    launch(weights_kernel<T, kHeadDim>, dim3(static_cast<unsigned>(blocks), key_tiles), dim3(Tile::kThreads),
           sizeof(WeightsShared<T, kHeadDim>), stream, p);
}

}  // namespace

void weights(const Weights& p, cudaStream_t stream) {
  with_kernel(p.shape.head_dim_k, p.dtype, p.tf32,
              [&](auto t, auto padded) { launch_weights<decltype(t), padded()>(p, stream); });
}

}  // namespace fastattn::attention
