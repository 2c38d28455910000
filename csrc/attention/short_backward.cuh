// What the two kernels of short_backward.h share: P and dS of a block in shared memory, and what becomes of them.
//
// Scores are rows of queries, rounded to T, that no two lanes of a load meet in one memory bank of: fragment.cuh.
#pragma once
#include "attention/backward.cuh"
#include "attention/short_backward.h"

namespace fastattn::attention {

template <class T>
constexpr int kScoreStride = kMaxShort * static_cast<int>(sizeof(T)) + 16;  // bytes of a row of P or dS

// Two neighbours of a row, rounded to T.
template <class T>
__device__ __forceinline__ void store_pair(void* to, float low, float high) {
  if constexpr (sizeof(T) == 2)
    *static_cast<uint32_t*>(to) = pack_word<T>(low, high);
  else
    *static_cast<float2*>(to) = make_float2(low, high);
}

// A warp's 16 x 8 kTiles scores, of queries from `row` and keys from `key` on.
template <class T, int kTiles>
__device__ __forceinline__ void keep_scores(unsigned char* scores, int row, int key, const float (&s)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      store_pair<T>(scores + (row + lane / 4 + 8 * half) * kScoreStride<T> + (key + 8 * j + lane % 4 * 2) * sizeof(T),
                    s[j][2 * half], s[j][2 * half + 1]);
  }
}

// A of 16 queries from `row` on, the depth of a product of keys from `key` on. Of floats, depth comes in the order of
// load_b_columns: accumulator_as_a().
template <class T>
__device__ __forceinline__ void load_scores(uint32_t (&words)[4], const unsigned char* scores, int row, int key) {
  if constexpr (sizeof(T) == 2) {
    load_a<T, kScoreStride<T>>(words, scores, row, key * 2);
  } else {
    const int lane = threadIdx.x % 32;
    const unsigned char* const from = scores + (row + lane / 4) * kScoreStride<T> + (key + lane % 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(&words[i], from + i % 2 * 8 * kScoreStride<T> + i / 2 * 4, 4);
    round_words<T>(words);
  }
}

// The same of the transpose: 16 keys from `key` on, queries from `row` on.
template <class T>
__device__ __forceinline__ void load_transposed_scores(uint32_t (&words)[4], const unsigned char* scores, int key, int row) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 2) {
    ldmatrix<true>(words, scores + (row + lane % 8 + lane / 16 * 8) * kScoreStride<T> + (key + lane / 8 % 2 * 8) * 2);
  } else {
    const unsigned char* const at = scores + (row + lane % 4 * 2) * kScoreStride<T> + (key + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(&words[i], at + i / 2 * kScoreStride<T> + i % 2 * 32, 4);
    round_words<T>(words);
  }
}

// sum (16 x 8 kTiles) += 16 keys from `key` on of the transpose of scores, times rows 0 .. rows - 1 of tile b. Those rows of
// which takes_part(row) is false, a product's depth at a time, are left out.
template <class T, int kStride, int kTiles, class TakesPart>
__device__ __forceinline__ void add_transposed(float (&sum)[kTiles][4], const unsigned char* scores, int key,
                                               const unsigned char* b, int rows, TakesPart takes_part) {
#pragma unroll(kUnrolled<T>)
  for (int row = 0; row < rows; row += kMmaDepth<T>) {
    if (!takes_part(row)) continue;
    uint32_t words[4];
    load_transposed_scores<T>(words, scores, key, row);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t pair[2][2];
      load_b_columns<T, kStride>(pair, b, row, 8 * j);
      mma<T>(sum[j], words, pair[0]);
      mma<T>(sum[j + 1], words, pair[1]);
    }
  }
}

// sum (16 x 8 kTiles) += 16 queries from `row` on of scores, times columns from `column` on of tile b, whose rows are keys.
template <class T, int kStride, int kTiles, class TakesPart>
__device__ __forceinline__ void add_rows(float (&sum)[kTiles][4], const unsigned char* scores, int row,
                                         const unsigned char* b, int column, int keys, TakesPart takes_part) {
#pragma unroll 2
  for (int key = 0; key < keys; key += kMmaDepth<T>) {
    if (!takes_part(key)) continue;
    uint32_t words[4];
    load_scores<T>(words, scores, row, key);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t pair[2][2];
      load_b_columns<T, kStride>(pair, b, key, column + 8 * j);
      mma<T>(sum[j], words, pair[0]);
      mma<T>(sum[j + 1], words, pair[1]);
    }
  }
}

// factor * sum to rows row .. row + 15, columns from `column` on, of a matrix.
template <class T, int kTiles>
__device__ __forceinline__ void store_accumulators(const Matrix<T>& x, int row, int column, const float (&sum)[kTiles][4],
                                                   float factor) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = row + lane / 4 + 8 * half;
    if (at >= x.rows) continue;
#pragma unroll
    for (int j = 0; j < kTiles; j++) {
      const int first = column + 8 * j + lane % 4 * 2;
      Element<T>* const to = x.row(at) + first;
      const float low = sum[j][2 * half] * factor, high = sum[j][2 * half + 1] * factor;
      if (x.vectors) {
        if (first < x.columns) store_pair<T>(to, low, high);
      } else {
        if (first < x.columns) to[0] = Element<T>(low);
        if (first + 1 < x.columns) to[1] = Element<T>(high);
      }
    }
  }
}

// A warp's dS, of queries m .. and keys n .., to its place in dbias (B, H, Lq, Lk), whose matrix begins at row0.
template <class To, int kTiles>
__device__ __forceinline__ void write_dbias(void* dbias, int64_t row0, int m, int n, const Shape& shape,
                                            const float (&ds)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int query = m + lane / 4 + e / 2 * 8, key = n + 8 * j + lane % 4 * 2 + e % 2;
      if (query < shape.seqlen_q && key < shape.seqlen_k)
        static_cast<To*>(dbias)[(row0 + query) * shape.seqlen_k + key] = To(ds[j][e]);
    }
  }
}

// Column 8 j + 2 (lane % 4) + e of a warp's 16 x 8 kTiles scores, summed over its rows.
template <int kTiles>
__device__ __forceinline__ float column_sum(const float (&s)[kTiles][4], int j, int e) {
  float sum = s[j][e] + s[j][e + 2];
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  return sum;
}

// Does some query head of the group of key head h_k see key n? If not, it may hold anything, and is not loaded.
__device__ __forceinline__ bool group_sees(const Visibility& who, const Shape& shape, int b, int h_k, int n) {
  if (max(n - who.band_hi, 0) > min(n - who.band_lo, shape.seqlen_q - 1)) return false;
  const int group = shape.heads / shape.key_heads;
  bool some = false;
  for (int h = h_k * group; h < (h_k + 1) * group; h++) some |= key_is_seen(who, b, h, n);
  return some;
}

}  // namespace fastattn::attention
