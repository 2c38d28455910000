// Shared by the kernels of the backward: the sizes of their tiles, and probabilities from products.
//
// A warp holds 16 rows of a tile of scores in accumulators of mma.m16n8k16: lane 4g + c has rows g and g + 8 and
// columns 8j + 2c + {0, 1}. Rows are queries and columns keys or, with kByKey, the other way round: S^T, so that P^T
// and dS^T are operands in registers.
#pragma once
#include "attention/backward.h"
#include "attention/tile.cuh"
#include "attention/tile_loop.cuh"
#include "common/philox.cuh"
#include "common/softmax.cuh"

namespace fastattn::attention {

// A kernel's tile, kRows that a block owns by kColumns that it loops over: the accumulators fit into registers, and all
// buffers into 99 KiB of shared memory.
template <class T, int kHeadDim>
struct Tiling {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kRows = 64;
  static constexpr int kColumns = kRowBytes > 256 ? 16 : kRowBytes > 128 ? 32 : 64;
  static constexpr int kStages = kRowBytes > 256 ? 1 : 2;
  static constexpr int kThreads = kRows * 2;
  using RowTile = unsigned char[kRows * kTileStride<T, kHeadDim>];
  using ColumnTile = unsigned char[kColumns * kTileStride<T, kHeadDim>];
};

// Dropout of a tile of kQueries x kKeys scores. The whole block draws it into shared memory, a byte for eight keys: no
// number is drawn twice, and a lane can read its bits in either orientation of the tile.
template <int kQueries, int kKeys>
struct KeptBits {
  unsigned char of[kQueries][kKeys / 8];

  __device__ __forceinline__ void draw(const DropoutMask& mask, int64_t first_row, int first_key) {
    for (int i = threadIdx.x; i < kQueries * kKeys / 8; i += blockDim.x) {
      const int query = i / (kKeys / 8), group = i % (kKeys / 8);
      of[query][group] = static_cast<unsigned char>(mask.kept(first_row + query, first_key / 8 + group));
    }
  }
};

// exp(S - lse) from the products q k^T.
struct ScoreExponent {
  float scale;  // softmax_scale; folded: times log2(e)
  bool folded;  // one multiply-add an element; else lse is subtracted first, which is more exact

  // lse in the form that probability() needs; for a query that may attend to nothing +inf, so that all probabilities
  // are 0.
  __device__ __forceinline__ float shift(float lse) const {
    return lse == -kInfinity ? kInfinity : folded ? lse * kLog2e : lse;
  }
  __device__ __forceinline__ float probability(float product, float shift) const {
    if (folded) return exp2_approximate(product * scale - shift);
    return exp2_approximate((product * scale - shift) * kLog2e);
  }
};

template <class T>
__device__ __forceinline__ ScoreExponent make_exponent(const Backward& p) {
  return {sizeof(T) == 2 ? p.softmax_scale * kLog2e : p.softmax_scale, sizeof(T) == 2};
}

// Turns a tile of products q k^T into probabilities. shift: a function, of the query of element (j, i).
template <int kTiles, class Shift>
__device__ __forceinline__ void make_probabilities(float (&tile)[kTiles][4], const ScoreExponent& exponent,
                                                   Shift shift) {
#pragma unroll
  for (int j = 0; j < kTiles * 4; j++)
    tile[j / 4][j % 4] = exponent.probability(tile[j / 4][j % 4], shift(j / 4, j % 4));
}

// Sets masked elements of a lane's two rows to 0; bits: from visible_bits().
template <int kTiles>
__device__ __forceinline__ void clear_masked(float (&tile)[kTiles][4], uint32_t top, uint32_t bottom) {
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (((i < 2 ? top : bottom) >> (2 * j + i % 2) & 1) == 0) tile[j][i] = 0.0f;
  }
}

// sum_d out_d dout_d of a row; the four lanes of a quad share it.
template <class T>
__device__ __forceinline__ float row_product(const Matrix<T>& out, const Matrix<T>& dout, int row) {
  const auto sum_of = [&](auto vectors) {
    float sum = 0.0f;
    for (int column = threadIdx.x % 4 * kChunk; column < out.columns; column += 4 * kChunk) {
      Chunk<Element<T>> x, y;
      x.template load<decltype(vectors)::value>(out.row(row) + column, min(out.columns - column, kChunk));
      y.template load<decltype(vectors)::value>(dout.row(row) + column, min(out.columns - column, kChunk));
      float a[kChunk], b[kChunk];
      x.unpack(a), y.unpack(b);
#pragma unroll
      for (int j = 0; j < kChunk; j++) sum += a[j] * b[j];
    }
    return sum;
  };
  const bool whole = out.vectors && dout.vectors && out.columns % kChunk == 0;
  return quad_sum(whole ? sum_of(std::true_type{}) : sum_of(std::false_type{}));
}

// delta of query m with this lse, which is also written. The four lanes of a quad share the row.
template <class T>
__device__ __forceinline__ float make_delta(const Backward& p, const Matrix<T>& out, const Matrix<T>& dout,
                                            int64_t row0, int m, float lse) {
  float delta = row_product(out, dout, min(m, out.rows - 1));
  if (p.dlse != nullptr && m < out.rows) delta -= p.dlse[row0 + m];
  if (lse == -kInfinity) delta = 0.0f;
  if (threadIdx.x % 4 == 0 && m < out.rows) p.delta[row0 + m] = delta;
  return delta;
}

}  // namespace fastattn::attention
