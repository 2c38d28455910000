// dbias of a bias that has queries and keys: dS, summed over the batches and heads that share it. Formulas: backward.h
//
// A separate kernel: dS is computed again, so that each element of dbias has one writer, which sums in a fixed order.
// The gradient of a bias without queries comes from backward_dkdv. A bias without keys needs no kernel: it adds one
// number to a whole row of scores and so to lse, changes no probability, and its gradient is that of lse.
// Grid: one block per (batch or part, head or 1, 64 queries, 64 keys) of dbias. It loops over the batches and heads that
//   are summed. For a bias by distance one block per (part, head or 1, diagonal of such tiles): all tiles of a diagonal
//   have equal distances at equal places, so a block adds them up in registers, too, and then the diagonals of the sum.
// Registers: the sum of dS and a tile each of S and dP, [16, 64] of each warp, float32.
// Work: 2 * (Dk + Dv) FLOPs a score in tiles that are not masked as a whole; bytes: q, k, v and dout once per tile.
// Compiled offline with nvcc 13.0, bfloat16, sm_80 / sm_90 (not timed), nothing spills, 2 blocks a multiprocessor:
//   249 / 249 registers, 19 KiB of shared memory; by distance 250 / 254
#include "attention/backward_common.cuh"

namespace fastattn::attention {
namespace {

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

// Whether `mine` is true for any thread of the block.
template <class T>
__device__ __forceinline__ bool any_in_block(ScoreShared<T>& shared, bool mine) {
  __syncthreads();  // the answer before was read
  if (threadIdx.x == 0) shared.any = 0;
  __syncthreads();
  if (mine) shared.any = 1;
  __syncthreads();
  return shared.any != 0;
}

// product = rows m0 .. of x times the transpose of rows n0 .. of y. The head dimension comes in parts of 128 bytes.
template <class T, class ReadRow, class ReadColumn>
__device__ __forceinline__ void multiply_parts(ScoreShared<T>& shared, ScoreTile& product, Matrix<T> x, Matrix<T> y,
                                               int m0, int n0, ReadRow read_row, ReadColumn read_column) {
#pragma unroll
  for (int j = 0; j < kScoreTile / 8; j++) product[j][0] = product[j][1] = product[j][2] = product[j][3] = 0.0f;
#pragma unroll 1
  for (; x.columns > 0; x.columns -= kPart<T>, y.columns -= kPart<T>, x.data += kPart<T>, y.data += kPart<T>) {
    __syncthreads();  // the part before was read
    load_tile<T, kScoreTile, kPart<T>, kScoreThreads>(shared.a, x, m0, read_row);
    load_tile<T, kScoreTile, kPart<T>, kScoreThreads>(shared.b, y, n0, read_column);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply_rows<T, kPart<T>>(product, shared.a, threadIdx.x / 32 * 16, shared.b, true);
  }
}

// Computes the probabilities and dP of queries m0 .. and keys n0 .. of a batch and head; returns false if all of them
// are masked. lse: of a lane's two rows. Called by the whole block.
template <class T>
__device__ __forceinline__ bool make_scores(const Backward& p, ScoreShared<T>& shared, int b, int h, int m0, int n0,
                                            const float (&lse)[2], ScoreTile& s, ScoreTile& dp) {
  const Shape& shape = p.shape;
  const Mask& mask = p.by_query;
  const int row = m0 + threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  uint32_t bits[2];
#pragma unroll
  for (int half = 0; half < 2; half++)
    bits[half] = visible_bits<kScoreTile>(mask, b, h, row + g + 8 * half, shape.seqlen_q, n0, shape.seqlen_k);
  if (!any_in_block(shared, ((bits[0] | bits[1]) & 0xffff) != 0)) return false;

  const int h_k = h / (shape.heads / shape.key_heads), last_m = min(m0 + kScoreTile, shape.seqlen_q) - 1;
  const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
  const Matrix<T> q(p.q, b, h, shape.seqlen_q, shape.head_dim_k), dout(p.dout, b, h, shape.seqlen_q, shape.head_dim_v);
  const Matrix<T> k(p.k, b, h_k, shape.seqlen_k, shape.head_dim_k), v(p.v, b, h_k, shape.seqlen_k, shape.head_dim_v);
  const auto read_query = [&](int m) { return p.lse[row0 + m] != -kInfinity; };
  const auto read_key = [&](int n) {
    return n >= m0 + mask.band_lo && n <= last_m + mask.band_hi && takes_part(mask, b, n);
  };
  multiply_parts<T>(shared, s, q, k, m0, n0, read_query, read_key);
  multiply_parts<T>(shared, dp, dout, v, m0, n0, read_query, read_key);

  cap_products<T>(s, p, [](int, int, float) {});
  const ScoreExponent exponent = make_exponent<T>(p);
  const float shift[2] = {exponent.shift(lse[0]), exponent.shift(lse[1])};
  make_probabilities<T, false>(s, exponent, p, b, h, row, n0, [&](int, int e) { return shift[e / 2]; });
  clear_masked(s, bits[0], bits[1]);
  const DropoutMask dropout(p.dropout);
  if (dropout.active()) {
    shared.kept.draw(dropout, row0 + m0, n0);  // what was drawn before was read before any_in_block
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

// sum += dS of queries m0 .. and keys n0 .., over samples first_b, first_b + batch, .. and heads first_h,
// first_h + heads, .. Called by the whole block.
template <class T>
__device__ __forceinline__ void add_gradients(const Backward& p, ScoreShared<T>& shared, int first_b, int batch,
                                              int first_h, int heads, int m0, int n0, ScoreTile& sum) {
  const Shape& shape = p.shape;
  for (int b = first_b; b < shape.batch; b += batch) {
    for (int h = first_h; h < shape.heads; h += heads) {
      const int64_t row0 = (static_cast<int64_t>(b) * shape.heads + h) * shape.seqlen_q;
      float lse[2], delta[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int m = m0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        lse[half] = m < shape.seqlen_q ? p.lse[row0 + m] : -kInfinity;
        delta[half] = m < shape.seqlen_q ? p.delta[row0 + m] : 0.0f;
      }
      ScoreTile s, dp;
      if (!make_scores(p, shared, b, h, m0, n0, lse, s, dp)) continue;
#pragma unroll
      for (int j = 0; j < kScoreTile / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[j][e] += s[j][e] * (dp[j][e] - delta[e / 2]);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kScoreThreads, 2)
    bias_gradient_kernel(const Backward p, void* dbias, int batch, int heads) {
  auto& shared = shared_memory<ScoreShared<T>>();
  const Shape& shape = p.shape;
  const int tiles_n = ceil_div(shape.seqlen_k, kScoreTile), tiles_m = ceil_div(shape.seqlen_q, kScoreTile);
  const int n0 = blockIdx.x % tiles_n * kScoreTile, m0 = blockIdx.x / tiles_n % tiles_m * kScoreTile;
  const int matrix = blockIdx.x / tiles_n / tiles_m, first_h = matrix % heads, first_b = matrix / heads;

  ScoreTile sum = {};
  add_gradients(p, shared, first_b, batch, first_h, heads, m0, n0, sum);
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const auto store = [&](auto zero) {
    auto* const to =
        static_cast<decltype(zero)*>(dbias) + static_cast<int64_t>(matrix) * shape.seqlen_q * shape.seqlen_k;
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

// What a block adds up, and then its sum, in rows without bank conflicts.
template <class T>
union DiagonalShared {
  ScoreShared<T> scores;
  float sum[kScoreTile][kScoreTile + 8];
};

// Diagonals of tiles before that of distance 0, and after it, that have a distance of the bias.
__host__ __device__ __forceinline__ int diagonals_before(const Bias& bias) { return ceil_div(-bias.first, kScoreTile); }
__host__ __device__ __forceinline__ int diagonals_after(const Bias& bias) { return ceil_div(bias.last, kScoreTile); }

template <class T>
__global__ void __launch_bounds__(kScoreThreads, 2)
    relative_bias_gradient_kernel(const Backward p, float* dbias, int parts, int heads) {
  auto& shared = shared_memory<DiagonalShared<T>>();
  const int tiles_m = ceil_div(p.shape.seqlen_q, kScoreTile), tiles_n = ceil_div(p.shape.seqlen_k, kScoreTile);
  const int before = diagonals_before(p.bias), diagonals = before + 1 + diagonals_after(p.bias);
  const int diagonal = static_cast<int>(blockIdx.x) % diagonals - before, matrix = blockIdx.x / diagonals;

  ScoreTile sum = {};
  for (int i = max(-diagonal, 0); i < min(tiles_m, tiles_n - diagonal); i++)
    add_gradients(p, shared.scores, matrix / heads, parts, matrix % heads, heads, i * kScoreTile,
                  (i + diagonal) * kScoreTile, sum);

  __syncthreads();  // the last tiles were read
#pragma unroll
  for (int j = 0; j < kScoreTile / 8; j++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<float2*>(&shared.sum[threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half]
                                            [8 * j + threadIdx.x % 4 * 2]) =
          make_float2(sum[j][2 * half], sum[j][2 * half + 1]);
  }
  __syncthreads();
  const int distance = static_cast<int>(threadIdx.x) - (kScoreTile - 1);  // in the tile
  float total = 0.0f;
  for (int i = max(-distance, 0); i < min(kScoreTile, kScoreTile - distance); i++)
    total += shared.sum[i][i + distance];
  dbias[static_cast<int64_t>(blockIdx.x) * kScoreThreads + threadIdx.x] = total;
}

}  // namespace

void bias_gradient(const Backward& p, void* dbias, int batch, int heads, cudaStream_t stream) {
  int64_t blocks = static_cast<int64_t>(batch) * heads;
  if (p.bias.by_distance)
    blocks *= diagonals_before(p.bias) + 1 + diagonals_after(p.bias);
  else
    blocks *= int64_t{ceil_div(p.shape.seqlen_q, kScoreTile)} * ceil_div(p.shape.seqlen_k, kScoreTile);
  if (blocks == 0) return;
  with_type(p.dtype, p.tf32, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, auto* to, size_t shared) {
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kScoreThreads), shared, stream, p, to, batch, heads);
    };
    if (p.bias.by_distance)
      run(relative_bias_gradient_kernel<T>, static_cast<float*>(dbias), sizeof(DiagonalShared<T>));
    else
      run(bias_gradient_kernel<T>, dbias, sizeof(ScoreShared<T>));
  });
}

}  // namespace fastattn::attention
