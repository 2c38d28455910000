// Forward of attention for compute capability 8.0 and up: one pass over the keys.   Formula, layouts: attention.h
//
// Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
// Grid: one block a (batch, head, kBlockM queries), the last queries of a head first: under a causal mask they have the
//   longest loop. A warp owns 16 queries, with their running maximum, sum and accumulator in registers.
// Shared memory: the queries, read once, and a tile each of k and v. While a warp multiplies with one of the two, the
//   other is copied; while one block waits, another block of the multiprocessor runs.
// float32 has no other kernels on any chip. Its products (mma.cuh) are 1,656 instructions for a warp's tile of 16 x 32
//   scores at head_dim 64, forward: 256 mma, 1,056 that split 176 operands, 256 additions, 88 loads. As multiply-adds
//   with shuffles they were 9,816, and an H200 took 22.3 ms for 16 x 1024 tokens, 8 heads of 64, forward and backward;
//   PyTorch's operators, 3.5. Estimated: 4.4 ms, if each instruction takes as long as before and the rest of a tile is
//   500. Error / bound in the emulator, D 64 and 128, 168 to 1024 keys: at most 0.41, before 0.32 (512 keys).
//   Three products, without small times small: 2.1 where a query has one key. Sums left to tensor cores: 2.5.
// Work: 2 * (Dk + Dv) FLOPs a visited score; bytes: q and out once, k and v once a query tile, mostly from L2. Only
//   visited tiles cost. Whether a tile is partial, and whether there is dropout, are uniform branches: 8 kernels are
//   enough for every call.
// Compiled offline with nvcc 13.0, sm_80 / sm_90 (not timed on sm_80), nothing spills; blocks of a multiprocessor:
//   bfloat16, head_dim 64     146 / 148 registers, 27.0 KiB of shared memory, 3 blocks
//             head_dim 128    178 / 178            51.0 KiB                   2
//   float32,  head_dim 64     126 / 127            34.0 KiB                   4
//             head_dim 128    158 / 158            66.0 KiB                   2
// Tried and dropped, same compiler: 32 queries a warp, which halves the reads of k and v from shared memory, when
//   kernels still had a bias, each type with its own code: 17 and 227 stores spilled at head_dim 64 and 128, 12 times
//   the time to compile. A kernel for up to 128 queries and keys, and one for their backward: on an H200 Triton's were
//   faster, bf16, 8 heads of 64, padding, dropout, forward and backward, ms, Triton's in brackets: 256 x 32 tokens
//   0.0501 (0.0435), 128 x 64 0.0697 (0.0495), 64 x 128 0.107 (0.110), but 85 x 96 0.0895 (0.145).
#include "attention/scores.cuh"
#include "attention/tile.cuh"
#include "attention/tile_loop.cuh"

namespace fastattn::attention {
namespace {

template <class T, int kHeadDim>
struct alignas(16) ForwardShared {
  using Tile = ForwardTile<T, kHeadDim>;
  unsigned char k[Tile::kBlockN * kTileStride<T, kHeadDim>], v[Tile::kBlockN * kTileStride<T, kHeadDim>];
  unsigned char q[Tile::kBlockM * kTileStride<T, kHeadDim>];
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(ForwardTile<T, kHeadDim>::kThreads, ForwardTile<T, kHeadDim>::kBlocks)
    forward_kernel(const Forward p) {
  using Tile = ForwardTile<T, kHeadDim>;
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kTiles = kBlockN / 8;
  auto& shared = shared_memory<ForwardShared<T, kHeadDim>>();
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, Lq = p.shape.seqlen_q, Lk = p.shape.seqlen_k;
  const int query_tiles = ceil_div(Lq, kBlockM);
  const int m0 = (query_tiles - 1 - static_cast<int>(blockIdx.x) % query_tiles) * kBlockM;
  const int head = blockIdx.x / query_tiles, h = head % p.shape.heads, b = head / p.shape.heads;
  const int key_head = h / (p.shape.heads / p.shape.key_heads);
  const int warp_row = threadIdx.x / 32 * 16;
  const int m = m0 + warp_row + g;  // this warp's first query in the tile; this lane's two: m, m + 8
  unsigned char* const warp_q = shared.q + warp_row * kTileStride<T, kHeadDim>;
  const int64_t row = static_cast<int64_t>(head) * Lq + m;
  const Mask& mask = p.mask;
  const DropoutMask dropout(p.dropout);

  // Keys that take no part, or that the band excludes from the whole tile, may hold anything: they are read as zeros.
  const TileLoop loop = plan_tiles<kBlockN>(mask, b, h, m0, kBlockM, Lq, Lk);
  const int first_key = m0 + mask.band_lo, last_key = min(m0 + kBlockM, Lq) - 1 + mask.band_hi;
  const auto load_keys = [&](unsigned char* tile, const StridedMatrix& of, int columns, int i) {
    const Matrix<T> x(of, b, key_head, Lk, columns);  // local: saves registers
    const bool all = i >= loop.partial;
    load_tile<T, kBlockN, kHeadDim, Tile::kThreads>(tile, x, loop.tile(i) * kBlockN, [&](int n) {
      return all || (n >= first_key && n <= last_key && takes_part(mask, b, n));
    });
    cp_async_commit();
  };

  const Exponent<T> exponent(p.softmax_scale);
  float sum[kHeadDim / 8][4] = {};
  float row_max[2] = {-kInfinity, -kInfinity}, row_sum[2] = {};  // of queries m and m + 8; sums of the lane's columns
  load_tile<T, 16, kHeadDim, 32>(warp_q, Matrix<T>(p.q, b, h, Lq, p.shape.head_dim_k), m0 + warp_row,
                                 [](int) { return true; });
  cp_async_commit();
  if (loop.count > 0) load_keys(shared.k, p.k, p.shape.head_dim_k, 0);
  for (int i = 0; i < loop.count; i++) {
    const int n0 = loop.tile(i) * kBlockN;
    cp_async_wait<0>();
    __syncthreads();  // k is there, and v was read
    load_keys(shared.v, p.v, p.shape.head_dim_v, i);
    float s[kTiles][4];  // (j, e) is query m + e / 2 * 8, key n0 + 8 j + 2 c + e % 2
    multiply_rows<T, kHeadDim>(s, warp_q, 0, shared.k);
    cp_async_wait<0>();
    __syncthreads();  // v is there, and k was read
    if (i + 1 < loop.count) load_keys(shared.k, p.k, p.shape.head_dim_k, i + 1);

    exponent.scale(s);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (i < loop.partial) mask_scores(s, half, visible_bits<kBlockN>(mask, b, h, m + 8 * half, Lq, n0, Lk));
      float max = row_max[half];
#pragma unroll
      for (int j = 0; j < kTiles * 2; j++) max = fmaxf(max, s[j / 2][2 * half + j % 2]);
      max = quad_max(max);
      // A row without a visible key so far has the maximum -inf; 0 instead avoids -inf - -inf.
      const float shift = max == -kInfinity ? 0.0f : max;
      const float rescale = exp2_approximate((row_max[half] - shift) * exponent.unit);
      exponent.apply(s, half, exponent.folded ? shift * exponent.unit : shift);
      row_max[half] = max, row_sum[half] *= rescale;
#pragma unroll
      for (int j = 0; j < kTiles * 2; j++) row_sum[half] += s[j / 2][2 * half + j % 2];
#pragma unroll
      for (int j = 0; j < kHeadDim / 8 * 2; j++) sum[j / 2][2 * half + j % 2] *= rescale;
      // The softmax is normalised without dropout; the factor of kept values follows at the end.
      // The seed is read here, for each tile: kept over the loop, it takes up to 26 registers more.
      if (dropout.active()) drop(s, half, DropoutMask(p.dropout), row + 8 * half, n0);
    }
    add_weighted_rows<T, kHeadDim>(sum, s, shared.v, p.shape.head_dim_v);
  }

  cp_async_wait<0>();  // of q, where no tile was visited
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float total = quad_sum(row_sum[half]);
    const float factor = (dropout.active() ? dropout.scale() : 1.0f) / total;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8 * 2; j++) {
      float& value = sum[j / 2][2 * half + j % 2];
      value = total == 0.0f ? 0.0f : value * factor;  // a row without keys may have a sum of NaN, from those of others
    }
    if (c == 0 && m + 8 * half < Lq)
      p.lse[row + 8 * half] = total == 0.0f ? -kInfinity : row_max[half] * (exponent.unit * kLn2) + logf(total);
  }
  store_tile<T, kHeadDim>(Matrix<T>(p.out, b, h, Lq, p.shape.head_dim_v), m0 + warp_row, warp_q, sum, 1.0f);
}

template <class T, int kHeadDim>
void launch_forward(const Forward& p, cudaStream_t stream) {
  using Tile = ForwardTile<T, kHeadDim>;
  const int64_t blocks = int64_t{p.shape.batch} * p.shape.heads * ceil_div(p.shape.seqlen_q, Tile::kBlockM);
  if (blocks > 0)
    launch(forward_kernel<T, kHeadDim>, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads),
           sizeof(ForwardShared<T, kHeadDim>), stream, p);
}

}  // namespace

TileSize forward_tile(int head_dim, DType dtype) {
  TileSize size = {};
  with_kernel(head_dim, dtype, false, [&](auto t, auto padded) {
    using Tile = ForwardTile<decltype(t), padded()>;
    size = {Tile::kBlockM, Tile::kBlockN};
  });
  return size;
}

void forward(const Forward& p, cudaStream_t stream) {
  with_kernel(head_dim(p.shape), p.dtype, p.tf32,
              [&](auto t, auto padded) { launch_forward<decltype(t), padded()>(p, stream); });
}

}  // namespace fastattn::attention
