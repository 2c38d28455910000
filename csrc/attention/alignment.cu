// The alignment on request: for each query the key of its largest weight, which is that of its largest score.
// Layouts: attention.h
//
// Grid: one block a (batch, head, kBlockM queries), along the tiles of keys that hold something to see, as the forward's and
//   with its lists. Each lane keeps the best of its own columns; a quad compares at the end. Of equal ones the first wins.
// Bytes: q once, k once a query tile, 8 a query; nothing of the size of the scores. Work: 2 * Dk FLOPs a visited score.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90, nothing spills:
//   head_dim 64    128 / 128 registers, 27.0 KiB of shared memory, 4 blocks a multiprocessor
//   head_dim 128   106 / 110            51.0 KiB                   3 on sm_80, 4 on sm_90
//   head_dim 256    74 /  76            66.0 KiB                   2 on sm_80, 3 on sm_90
#include "attention/scores.cuh"
#include "attention/tile.cuh"
#include "attention/walk.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kHeadDim>
struct alignas(16) AlignmentShared {
  using Tile = ForwardTile<T, kHeadDim>;
  unsigned char q[Tile::kBlockM * kTileStride<T, kHeadDim>], k[2][Tile::kBlockN * kTileStride<T, kHeadDim>];
};

// A score and its key. No key is the largest number, so that it loses against every other.
constexpr int kNoKey = 0x7fffffff;

struct Best {
  float score = -kInfinity;
  int key = kNoKey;

  __device__ __forceinline__ void meet(float other, int its_key) {
    if (other > score || (other == score && its_key < key)) score = other, key = its_key;
  }
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(ForwardTile<T, kHeadDim>::kThreads, kHeadDim > 64 ? 3 : 4)
alignment_kernel(const Alignment p) {
  using Tile = ForwardTile<T, kHeadDim>;
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kTiles = kBlockN / 8;
  auto& shared = shared_memory<AlignmentShared<T, kHeadDim>>();
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, Lq = p.shape.seqlen_q, Lk = p.shape.seqlen_k;
  const int query_tiles = blocks_of(Lq, kBlockM), m0 = (query_tiles - 1 - blockIdx.x % query_tiles) * kBlockM;
  const int head = blockIdx.x / query_tiles, h = head % p.shape.heads, b = head / p.shape.heads;
  const int own = threadIdx.x / 32 * 16, m = m0 + own + g;
  const Visibility& who = p.visibility;
  const Matrix<T> q(p.q, b, h, Lq, p.shape.head_dim_k);
  const Matrix<T> k(p.k, b, h / (p.shape.heads / p.shape.key_heads), Lk, p.shape.head_dim_k);
  Walk walk = plan_walk<kBlockN>(who, b, h, m0, kBlockM, Lq, Lk, who.band_lo, who.band_hi);
  mask_every_tile<kBlockN>(walk, who, b, h);
  const auto load = [&](int i) {
    load_tile<T, kBlockN, kHeadDim, Tile::kThreads>(shared.k[i % 2], k, walk.tile(i) * kBlockN, [](int) { return true; });
  };

  Best best[2];  // of queries m and m + 8, in this lane's columns
  load_tile<T, kBlockM, kHeadDim, Tile::kThreads>(shared.q, q, m0, [](int) { return true; });
  if (walk.count > 0) load(0);
  cp_async_commit();
  for (int i = 0; i < walk.count; i++) {
    if (i + 1 < walk.count) load(i + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    float s[kTiles][4];
    multiply_rows<T, kHeadDim>(s, shared.q, own, shared.k[i % 2]);
    __syncthreads();  // k was read
    const int n0 = walk.tile(i) * kBlockN;
#pragma unroll
    for (int j = 0; j < kTiles * 4; j++) s[j / 4][j % 4] *= p.softmax_scale;
    if (p.bias.data != nullptr) add_bias(s, p.bias, b, h, m, n0 + 2 * c, Lq, Lk);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (i < walk.partial)
        hide(s, half, sees<kBlockN>(who, b, h, m + 8 * half, Lq, n0, Lk, who.band_lo, who.band_hi));
#pragma unroll
      for (int j = 0; j < kTiles * 2; j++) {
        const float score = s[j / 2][2 * half + j % 2];
        if (score > -kInfinity) best[half].meet(score, n0 + j / 2 * 8 + 2 * c + j % 2);
      }
    }
  }
  cp_async_wait<0>();

#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
      const float score = __shfl_xor_sync(0xffffffffu, best[half].score, apart);
      best[half].meet(score, __shfl_xor_sync(0xffffffffu, best[half].key, apart));
    }
    if (c == 0 && m + 8 * half < Lq)
      p.keys[static_cast<int64_t>(head) * Lq + m + 8 * half] = best[half].key == kNoKey ? -1 : best[half].key;
  }
}

}  // namespace

void alignment(const Alignment& p, cudaStream_t stream) {
  with_head_dim(p.shape, [&](auto head_dim) {
    with_type(p.dtype, p.tf32, [&](auto t) {
      using T = decltype(t);
      const int query_tiles = blocks_of(p.shape.seqlen_q, ForwardTile<T, head_dim()>::kBlockM);
      const int64_t blocks = static_cast<int64_t>(p.shape.batch) * p.shape.heads * query_tiles;
      if (blocks > 0)
        launch(alignment_kernel<T, head_dim()>, dim3(static_cast<unsigned>(blocks)),
               dim3(ForwardTile<T, head_dim()>::kThreads), sizeof(AlignmentShared<T, head_dim()>), stream, p);
    });
  });
}

}  // namespace fastattn::attention
