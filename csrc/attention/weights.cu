// The attention weights on request, from q, k and the forward's lse: dropout(exp(S - lse)) of chosen heads, or their mean.
// Layouts: attention.h
//
// For looking at, not for training: the only kernel that may write something as large as the scores. What it writes of a
// head is what the forward multiplied with v, rounded to T; the mean is summed in float32 and rounded once.
// Grid: one block a (batch, head, kBlockM queries, kBlockN keys), or, of the mean, one for all heads of a tile, which meet
//   in its registers. The head after is loaded while one is multiplied.
// Bytes: the weights once, and q and k once a tile of the other, from L2. Work: 2 * Dk FLOPs a score.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90, nothing spills:
//   head_dim 64    128 / 128 registers, 36.0 KiB of shared memory, 4 blocks a multiprocessor
//   head_dim 128   128 / 128            34.0 KiB                   4
//   head_dim 256   126 / 128            49.5 KiB                   3 on sm_80, 4 on sm_90
// lse is right to half a unit in its last place, and so would be the weights. Where that is no small thing, for exact
//   float32 and for rows that a bias has moved to where float32 is coarse, the kernel runs twice: first it walks along all
//   keys of a (batch, head, kBlockM queries) and adds up what the weights would be, then it divides by that.
#include "attention/scores.cuh"
#include "attention/tile.cuh"
#include "attention/walk.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kHeadDim>
struct WeightsTile : ForwardTile<T, kHeadDim> {
  static constexpr int kStages = kHeadDim * sizeof(T) > 128 ? 1 : 2;
};

template <class T, int kHeadDim>
struct alignas(16) WeightsShared {
  using Tile = WeightsTile<T, kHeadDim>;
  unsigned char q[Tile::kStages][Tile::kBlockM * kTileStride<T, kHeadDim>];
  unsigned char k[Tile::kStages][Tile::kBlockN * kTileStride<T, kHeadDim>];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(WeightsTile<T, kHeadDim>::kThreads, kHeadDim > 128 ? 3 : 4)
weights_kernel(const Weights p, bool adds_up) {
  using Tile = WeightsTile<T, kHeadDim>;
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kStages = Tile::kStages, kTiles = kBlockN / 8;
  constexpr int kStride = kTileStride<T, kHeadDim>;
  auto& shared = shared_memory<WeightsShared<T, kHeadDim>>();
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, Lq = p.shape.seqlen_q, Lk = p.shape.seqlen_k;
  const bool means = p.mean && !adds_up;
  const int query_tiles = blocks_of(Lq, kBlockM), m0 = blockIdx.x % query_tiles * kBlockM;
  const int places = means ? 1 : p.heads, place = blockIdx.x / query_tiles % places, b = blockIdx.x / query_tiles / places;
  const int own = threadIdx.x / 32 * 16, m = m0 + own + g;
  const Visibility& who = p.visibility;
  const DropoutMask dropout(p.dropout);
  const Exponent<T> exponent(p.bias, p.softmax_scale);

  // The steps of a block: the heads of one tile of keys, or, adding up, the tiles of one head.
  const int steps = adds_up ? blocks_of(Lk, kBlockN) : means ? p.heads : 1;
  const auto head_of = [&](int i) { return p.first_head + p.head_step * (means ? i : place); };
  const auto keys_of = [&](int i) { return (adds_up ? i : static_cast<int>(blockIdx.y)) * kBlockN; };
  const auto load = [&](int i) {
    const int h = head_of(i);
    const Matrix<T> q(p.q, b, h, Lq, p.shape.head_dim_k);
    const Matrix<T> k(p.k, b, h / (p.shape.heads / p.shape.key_heads), Lk, p.shape.head_dim_k);
    load_tile<T, kBlockM, kHeadDim, Tile::kThreads>(shared.q[i % kStages], q, m0, [](int) { return true; });
    load_tile<T, kBlockN, kHeadDim, Tile::kThreads>(shared.k[i % kStages], k, keys_of(i),
                                                    [](int) { return true; });
  };

  float sum[kTiles][4] = {};  // over the steps
  load(0);
  cp_async_commit();
  for (int i = 0; i < steps; i++) {
    if (kStages > 1 && i + 1 < steps) load(i + 1);
    cp_async_commit();
    cp_async_wait<kStages - 1>();
    __syncthreads();
    float s[kTiles][4];
    multiply_rows<T, kHeadDim>(s, shared.q[i % kStages], own, shared.k[i % kStages]);
    __syncthreads();  // q and k were read
    if (kStages == 1 && i + 1 < steps) load(i + 1);

    const int h = head_of(i), n0 = keys_of(i);
    const int64_t row = (static_cast<int64_t>(b) * p.shape.heads + h) * Lq + m;
    exponent.scale(s);
    if (p.bias.data != nullptr) add_bias(s, p.bias, b, h, m, n0 + 2 * c, Lq, Lk);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const bool inside = m + 8 * half < Lq;
      const float lse = inside ? p.lse[row + 8 * half] : -kInfinity;
      const float shift = lse == -kInfinity ? 0.0f : exponent.folded ? lse * kLog2e : lse;  // without, all scores are -inf
      hide(s, half, sees<kBlockN>(who, b, h, m + 8 * half, Lq, n0, Lk, who.band_lo, who.band_hi));
      exponent.apply(s, half, shift);
      if (dropout.active() && !adds_up) drop(s, half, dropout, row + 8 * half, n0);
      const float total = p.totals != nullptr && !adds_up && inside ? p.totals[row + 8 * half] : 1.0f;
      const float factor = total > 0.0f ? 1.0f / total : 1.0f;
#pragma unroll
      for (int j = 0; j < kTiles * 2; j++) sum[j / 2][2 * half + j % 2] += s[j / 2][2 * half + j % 2] * factor;
    }
  }
  cp_async_wait<0>();

  if (adds_up) {
    const int64_t row = (static_cast<int64_t>(b) * p.shape.heads + head_of(0)) * Lq + m;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < kTiles * 2; j++) total += sum[j / 2][2 * half + j % 2];
      total = quad_sum(total);
      if (c == 0 && m + 8 * half < Lq) p.totals[row + 8 * half] = total;
    }
    return;
  }
  const int n0 = keys_of(0);
  const int64_t matrix = static_cast<int64_t>(Lq) * Lk;
  const Rows rows{static_cast<Element<T>*>(p.weights) + n0, p.stride_b, matrix, Lk};
  const float scale = (dropout.active() ? dropout.scale() : 1.0f) / (means ? p.heads : 1);
  store_tile<T, kBlockN>(Matrix<T>(rows, b, place, Lq, min(Lk - n0, kBlockN)), m0 + own, shared.q[0] + own * kStride, sum,
                         scale);  // nobody else reads these rows of q
}

template <class T, int kHeadDim>
void launch_weights(const Weights& p, cudaStream_t stream) {
  using Tile = WeightsTile<T, kHeadDim>;
  const int64_t rows = static_cast<int64_t>(p.shape.batch) * blocks_of(p.shape.seqlen_q, Tile::kBlockM);
  const auto run = [&](int64_t blocks, int key_tiles, bool adds_up) {
    if (blocks > 0 && key_tiles > 0)
      launch(weights_kernel<T, kHeadDim>, dim3(static_cast<unsigned>(blocks), key_tiles), dim3(Tile::kThreads),
             sizeof(WeightsShared<T, kHeadDim>), stream, p, adds_up);
  };
  if (p.totals != nullptr) run(rows * p.heads, p.shape.seqlen_k > 0, true);
  run(p.mean ? rows : rows * p.heads, blocks_of(p.shape.seqlen_k, Tile::kBlockN), false);
}

}  // namespace

void weights(const Weights& p, cudaStream_t stream) {
  with_head_dim(p.shape, [&](auto head_dim) {
    with_type(p.dtype, p.tf32, [&](auto t) { launch_weights<decltype(t), head_dim()>(p, stream); });
  });
}

}  // namespace fastattn::attention
