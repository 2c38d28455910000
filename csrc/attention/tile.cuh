// Tiles of q, k, v and similar matrices in shared memory: loaded, multiplied by warps, and written back.
//
// A tile is some rows of kHeadDim elements. 16 bytes follow each row, against bank conflicts (fragment.cuh). Rows past
// the end of the matrix and columns past its width are zero in a tile.
#pragma once
#include <algorithm>

#include "attention/attention.h"
#include "common/fragment.cuh"
#include "common/vec.cuh"

namespace fastattn::attention {

// The type of a T in memory: Tf32 is float32 that is rounded when it is loaded for a product.
template <class T>
using Element = std::conditional_t<std::is_same_v<T, Tf32>, float, T>;

template <class T, int kHeadDim>
constexpr int kTileStride = kHeadDim * static_cast<int>(sizeof(T)) + 16;  // bytes

// A block that owns queries and loops over keys. kBlocks of them run on a multiprocessor, as far as registers decide.
template <class T, int kHeadDim>
struct ForwardTile {
  static constexpr bool k16Bit = sizeof(T) == 2;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlockM = 16 * kWarps, kBlockN = k16Bit ? 64 : 32;
  static constexpr int kBlocks = kHeadDim > 64 ? 1 : k16Bit ? 3 : 4;
};

// The matrix of one batch and head.
template <class T>
struct Matrix {
  Element<T>* data;
  int64_t stride;  // in elements
  int rows, columns;
  bool vectors;  // every row is made of aligned 16-byte vectors

  __device__ __forceinline__ Matrix(const StridedMatrix& of, int64_t b, int64_t h, int rows, int columns)
      : data(static_cast<Element<T>*>(of.data) + b * of.stride_b + h * of.stride_h), stride(of.stride), rows(rows),
        columns(columns),
        vectors((reinterpret_cast<uintptr_t>(data) | stride * sizeof(T) | columns * sizeof(T)) % 16 == 0) {}

  __device__ __forceinline__ Element<T>* row(int i) const { return data + i * stride; }
};

// Starts to copy rows first .. first + kRows - 1 of a matrix into a tile. A row that takes no part is not read, but
// zero. kThreads: a warp or the whole block. A commit and a wait must follow.
template <class T, int kRows, int kHeadDim, int kThreads, class TakesPart>
__device__ __forceinline__ void load_tile(unsigned char* tile, const Matrix<T>& x, int first, TakesPart takes_part) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T)), kVectors = kHeadDim / kVector;
  const int thread = threadIdx.x % kThreads;
  const auto inside = [&](int row) { return first + row < x.rows && takes_part(first + row); };
  if (x.vectors) {
    static_assert(kRows * kVectors % kThreads == 0);
#pragma unroll 4
    for (int i = thread; i < kRows * kVectors; i += kThreads) {
      const int row = i / kVectors, column = i % kVectors * kVector;
      cp_async(tile + row * kTileStride<T, kHeadDim> + column * sizeof(T), x.row(first + row) + column,
               column < x.columns && inside(row));
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kRows * kHeadDim; i += kThreads) {
      const int row = i / kHeadDim, column = i % kHeadDim;
      Element<T>* const to = reinterpret_cast<Element<T>*>(tile + row * kTileStride<T, kHeadDim>) + column;
      *to = column < x.columns && inside(row) ? x.row(first + row)[column] : Element<T>(0.0f);
    }
  }
}

// Writes factor * sum, the warp's 16 rows, to rows first .. first + 15 of a matrix, through `scratch`: 16 rows of a
// tile that no other warp uses any more.
template <class T, int kHeadDim>
__device__ __forceinline__ void store_tile(const Matrix<T>& x, int first, unsigned char* scratch,
                                           const float (&sum)[kHeadDim / 8][4], float factor) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T)), kVectors = kHeadDim / kVector;
  constexpr int kStride = kTileStride<T, kHeadDim>;
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; j++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      unsigned char* const to = scratch + (lane / 4 + 8 * half) * kStride + (8 * j + 2 * (lane % 4)) * sizeof(T);
      const float low = sum[j][2 * half] * factor, high = sum[j][2 * half + 1] * factor;
      if constexpr (sizeof(T) == 2)
        *reinterpret_cast<uint32_t*>(to) = pack_word<T>(low, high);
      else
        *reinterpret_cast<float2*>(to) = make_float2(low, high);
    }
  }
  __syncwarp();
  if (x.vectors) {
#pragma unroll
    for (int i = lane; i < 16 * kVectors; i += 32) {
      const int row = i / kVectors, column = i % kVectors * kVector;
      if (first + row < x.rows && column < x.columns)
        *reinterpret_cast<uint4*>(x.row(first + row) + column) =
            *reinterpret_cast<const uint4*>(scratch + row * kStride + column * sizeof(T));
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < 16 * kHeadDim; i += 32) {
      const int row = i / kHeadDim, column = i % kHeadDim;
      if (first + row < x.rows && column < x.columns)
        x.row(first + row)[column] = reinterpret_cast<const Element<T>*>(scratch + row * kStride)[column];
    }
  }
}

// The code of float products is long, and unrolled it would take up to 39 registers more.
template <class T>
constexpr int kUnrolled = std::is_same_v<T, float> ? 1 : 4;

// product (16 x 8 kTiles) = rows row .. row + 15 of tile a times the transpose of the first 8 kTiles rows of tile b.
template <class T, int kHeadDim, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&product)[kTiles][4], const unsigned char* a, int row,
                                              const unsigned char* b) {
  constexpr int kStride = kTileStride<T, kHeadDim>;
#pragma unroll
  for (int j = 0; j < kTiles; j++) product[j][0] = product[j][1] = product[j][2] = product[j][3] = 0.0f;
#pragma unroll(kUnrolled<T>)
  for (int from = 0; from < kHeadDim * static_cast<int>(sizeof(T)); from += 32) {
    uint32_t words[4];
    load_a<T, kStride>(words, a, row, from);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t pair[2][2];
      load_b_rows<T, kStride>(pair, b, 8 * j, from);
      mma<T>(product[j], words, pair[0]);
      mma<T>(product[j + 1], words, pair[1]);
    }
  }
}

// sum (16 x kHeadDim) += weights (16 x 8 kTiles, rounded to T) times the first 8 kTiles rows of tile b, whose width is
// `columns`. For floats the sum ends there, by branches without which ptxas begins all columns at once and spills.
template <class T, int kHeadDim, int kTiles>
__device__ __forceinline__ void add_weighted_rows(float (&sum)[kHeadDim / 8][4], const float (&weights)[kTiles][4],
                                                  const unsigned char* b, int columns) {
#pragma unroll
  for (int step = 0; step < 8 * kTiles / kMmaDepth<T>; step++) {
    uint32_t words[4];
    accumulator_as_a<T>(words, weights, step);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 2) {
      if (std::is_same_v<T, float> && j % 4 == 0 && 8 * j >= columns) break;
      uint32_t pair[2][2];
      load_b_columns<T, kTileStride<T, kHeadDim>>(pair, b, step * kMmaDepth<T>, 8 * j);
      mma<T>(sum[j], words, pair[0]);
      mma<T>(sum[j + 1], words, pair[1]);
    }
  }
}

// The compiled kernels. Calls f with a value of T and with the head dimension: Int<64>{}() is 64.
template <class Function>
void with_kernel(int head_dim, DType dtype, bool tf32, Function&& f) {
  const auto with_type = [&](auto t) { head_dim <= 64 ? f(t, Int<64>{}) : f(t, Int<128>{}); };
  if (dtype == DType::float32 && tf32) return with_type(Tf32{});
  dtype_switch(dtype, with_type);
}

}  // namespace fastattn::attention
