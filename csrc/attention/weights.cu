// The attention weights on request, from q, k and the forward's lse: dropout(exp(S - lse)).   Layouts: attention.h
//
// For looking at, not for training: the only kernel that writes something as large as the scores. What it writes is what
// the forward multiplied with v, rounded to T.
// Grid: one block a (batch, head, kBlockM queries), along all keys. Bytes: the weights once.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90, nothing spills: 102 / 102 registers and 18.5 KiB of shared
//   memory at head_dim 64, 100 / 102 and 30.5 KiB at 128, 106 / 108 and 54.5 KiB at 256.
// lse is right to half a unit in its last place, and so would be the weights. Where that is no small thing, for exact
//   float32 and for rows that a bias has moved to where float32 is coarse, a first walk over the keys adds up what the
//   weights would be, and the second divides by it.
#include "attention/scores.cuh"
#include "attention/tile.cuh"
#include "attention/walk.cuh"

namespace fastattn::attention {
namespace {

constexpr int kBlockN = 32, kTiles = kBlockN / 8;

template <class T, int kHeadDim>
struct alignas(16) WeightsShared {
  static constexpr int kWarps = kHeadDim * sizeof(T) > 512 ? 2 : 4, kThreads = 32 * kWarps, kBlockM = 16 * kWarps;
  unsigned char q[kBlockM * kTileStride<T, kHeadDim>], k[kBlockN * kTileStride<T, kHeadDim>];
  unsigned char out[kBlockM * kTileStride<T, kBlockN>];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(WeightsShared<T, kHeadDim>::kThreads, 4) weights_kernel(const Weights p) {
  using Shared = WeightsShared<T, kHeadDim>;
  constexpr int kBlockM = Shared::kBlockM, kThreads = Shared::kThreads;
  Shared& shared = shared_memory<Shared>();
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, Lq = p.shape.seqlen_q, Lk = p.shape.seqlen_k;
  const int query_tiles = blocks_of(Lq, kBlockM), m0 = blockIdx.x % query_tiles * kBlockM;
  const int head = blockIdx.x / query_tiles, h = head % p.shape.heads, b = head / p.shape.heads;
  const int own = threadIdx.x / 32 * 16, m = m0 + own + g;
  const int64_t row = static_cast<int64_t>(head) * Lq + m;
  const Visibility& who = p.visibility;
  const Matrix<T> q(p.q, b, h, Lq, p.shape.head_dim_k);
  const Matrix<T> k(p.k, b, h / (p.shape.heads / p.shape.key_heads), Lk, p.shape.head_dim_k);
  const DropoutMask dropout(p.dropout);
  const Exponent<T> exponent(p.bias, p.softmax_scale);

  float shift[2], total[2] = {}, factor[2] = {1.0f, 1.0f};  // of queries m and m + 8
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float lse = m + 8 * half < Lq ? p.lse[row + 8 * half] : 0.0f;
    shift[half] = lse == -kInfinity ? 0.0f : exponent.folded ? lse * kLog2e : lse;  // without lse, all scores are -inf
  }

  load_tile<T, kBlockM, kHeadDim, kThreads>(shared.q, q, m0, [](int) { return true; });
  cp_async_commit();
  const bool twice = std::is_same_v<T, float> || p.bias.data != nullptr;
  for (int walk = twice ? 0 : 1; walk < 2; walk++) {
    for (int n0 = 0; n0 < Lk; n0 += kBlockN) {
      load_tile<T, kBlockN, kHeadDim, kThreads>(shared.k, k, n0, [&](int n) { return key_is_seen(who, b, h, n); });
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();  // k is there
      float s[kTiles][4];
      multiply_rows<T, kHeadDim>(s, shared.q, own, shared.k);
      __syncthreads();  // k was read
      exponent.scale(s);
      if (p.bias.data != nullptr) add_bias(s, p.bias, b, h, m, n0 + 2 * c, Lq, Lk);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        hide(s, half, sees<kBlockN>(who, b, h, m + 8 * half, Lq, n0, Lk, who.band_lo, who.band_hi));
        exponent.apply(s, half, shift[half]);
        if (walk == 0) {
#pragma unroll
          for (int j = 0; j < kTiles * 2; j++) total[half] += s[j / 2][2 * half + j % 2];
          continue;
        }
        if (dropout.active()) drop(s, half, dropout, row + 8 * half, n0);
#pragma unroll
        for (int j = 0; j < kTiles * 2; j++) s[j / 2][2 * half + j % 2] *= factor[half];
      }
      if (walk == 0) continue;
      const Rows rows{static_cast<Element<T>*>(p.weights) + n0, static_cast<int64_t>(p.shape.heads) * Lq * Lk,
                      static_cast<int64_t>(Lq) * Lk, Lk};
      const Matrix<T> weights(rows, b, h, Lq, min(Lk - n0, kBlockN));
      store_tile<T, kBlockN>(weights, m0 + own, shared.out + own * kTileStride<T, kBlockN>, s,
                             dropout.active() ? dropout.scale() : 1.0f);
    }
    if (walk == 0) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float sum = quad_sum(total[half]);
        factor[half] = sum > 0.0f ? 1.0f / sum : 1.0f;
      }
    }
  }
  cp_async_wait<0>();  // of q, where there is no key
}

}  // namespace

void weights(const Weights& p, cudaStream_t stream) {
  with_head_dim(p.shape, [&](auto head_dim) {
    with_type(p.dtype, p.tf32, [&](auto t) {
      using Shared = WeightsShared<decltype(t), head_dim()>;
      const int64_t tiles = static_cast<int64_t>(p.shape.batch) * p.shape.heads * blocks_of(p.shape.seqlen_q, Shared::kBlockM);
      if (tiles > 0)
        launch(weights_kernel<decltype(t), head_dim()>, dim3(static_cast<unsigned>(tiles)), dim3(Shared::kThreads),
               sizeof(Shared), stream, p);
    });
  });
}

}  // namespace fastattn::attention
