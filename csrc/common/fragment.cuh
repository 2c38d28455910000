// The operands of mma.cuh, from tiles in shared memory and from accumulators.
//
// A tile is rows of kStride bytes, a multiple of 16. There are no bank conflicts if kStride is 16 more than a multiple
// of 128, or, for rows of 64 bytes, than a multiple of 64.
#pragma once
#include <type_traits>

#include "common/cp_async.cuh"
#include "common/mma.cuh"

namespace fastattn {

#ifndef FASTATTN_EMULATOR
// Loads four matrices of 8 rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8. Word m of lane i is
// then word i % 4 of row i / 4 of matrix m; transposed, which is of 16-bit elements, elements 2 (i % 4) and the next of
// column i / 4.
template <bool kTransposed>
__device__ __forceinline__ void ldmatrix(uint32_t (&words)[4], const void* row) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}
#endif

template <class T, int kCount>
__device__ __forceinline__ void round_words(uint32_t (&words)[kCount]) {
  if constexpr (std::is_same_v<T, Tf32>) {
#pragma unroll
    for (int i = 0; i < kCount; i++) words[i] = round_tf32(words[i]);
  }
}

// A: rows row .. row + 15 of the tile, K elements from byte `from` on.
template <class T, int kStride>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const unsigned char* tile, int row, int from) {
  const int lane = threadIdx.x % 32;
  ldmatrix<false>(a, tile + (row + lane % 16) * kStride + from + lane / 16 * 16);
  round_words<T>(a);
}

// Two neighbouring B, whose columns are rows row .. row + 15 of the tile: a product with its transpose.
template <class T, int kStride>
__device__ __forceinline__ void load_b_rows(uint32_t (&b)[2][2], const unsigned char* tile, int row, int from) {
  const int lane = threadIdx.x % 32;
  uint32_t words[4];
  ldmatrix<false>(words, tile + (row + lane % 8 + lane / 16 * 8) * kStride + from + lane / 8 % 2 * 16);
  round_words<T>(words);
  b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
}

// Two neighbouring B, whose rows are rows row .. row + K - 1 of the tile and whose columns begin at `column`: a product
// with the tile itself. Its rows are in the order of accumulator_as_a(), which is different for floats only.
template <class T, int kStride>
__device__ __forceinline__ void load_b_columns(uint32_t (&b)[2][2], const unsigned char* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    uint32_t words[4];
    ldmatrix<true>(words, tile + (row + lane % 16) * kStride + (column + lane / 16 * 8) * 2);
    b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
  } else {
    const unsigned char* from = tile + (row + lane % 4 * 2) * kStride + (column + lane / 4) * 4;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) memcpy(&b[n][i], from + i * kStride + n * 32, 4);
      round_words<T>(b[n]);
    }
  }
}

// Columns K * step .. of a product (16 x 8n, as n accumulators) as the A of the next. No data moves between lanes. A
// float's column 2c + e goes to place c + 4e; load_b_columns reads the rows of B in that order.
template <class T, int kTiles>
__device__ __forceinline__ void accumulator_as_a(uint32_t (&a)[4], const float (&d)[kTiles][4], int step) {
  if constexpr (sizeof(T) == 2) {
    a[0] = pack_word<T>(d[2 * step][0], d[2 * step][1]), a[1] = pack_word<T>(d[2 * step][2], d[2 * step][3]);
    a[2] = pack_word<T>(d[2 * step + 1][0], d[2 * step + 1][1]),
    a[3] = pack_word<T>(d[2 * step + 1][2], d[2 * step + 1][3]);
  } else {
    a[0] = as_word(d[step][0]), a[1] = as_word(d[step][2]), a[2] = as_word(d[step][1]), a[3] = as_word(d[step][3]);
    round_words<T>(a);
  }
}

}  // namespace fastattn
