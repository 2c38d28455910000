// Chunk<T>: eight consecutive elements of a row, the unit in which kernels read, write and compute.
//
// Eight 16-bit numbers are one 16-byte vector, eight floats are two; eight elements are one Philox call (philox.cuh).
// If a row is not made of aligned 16-byte vectors (an odd width, an unaligned tensor), kAligned is false and elements
// are read and written one by one. The thread that owns an element is the same.
#pragma once
#include "common/launch.cuh"

#include <cstring>

namespace fastattn {

constexpr int kChunk = 8;

__device__ __forceinline__ void unpack_pair(const float* pair, float& low, float& high) {
  low = pair[0], high = pair[1];
}
__device__ __forceinline__ void unpack_pair(const __nv_bfloat16* pair, float& low, float& high) {
  low = __bfloat162float(pair[0]), high = __bfloat162float(pair[1]);
}
__device__ __forceinline__ void unpack_pair(const __half* pair, float& low, float& high) {
  low = __half2float(pair[0]), high = __half2float(pair[1]);
}

__device__ __forceinline__ void pack_pair(float* pair, float low, float high) { pair[0] = low, pair[1] = high; }
__device__ __forceinline__ void pack_pair(__nv_bfloat16* pair, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);  // one instruction for two conversions
  pair[0] = both.x, pair[1] = both.y;
}
__device__ __forceinline__ void pack_pair(__half* pair, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  pair[0] = both.x, pair[1] = both.y;
}

// *to = value in one instruction. nvcc splits some such assignments into four.
__device__ __forceinline__ void store_vector(uint4* to, const uint4& value) {
#ifdef FASTATTN_EMULATOR
  *to = value;
#else
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
#endif
}

// How many of the kChunk columns from `col` on a row of `hidden` has. An aligned row consists of whole chunks.
template <bool kAligned>
__device__ __forceinline__ int columns_inside(int col, int hidden) {
  if (kAligned) return col < hidden ? kChunk : 0;
  return min(max(hidden - col, 0), kChunk);
}

template <class T>
struct alignas(16) Chunk {
  T at[kChunk];

  // Reads `count` elements from `from`; the others are zero. kOverwritten: the same kernel may write there, in place,
  // so the read-only path, ld.global.nc, is not used.
  template <bool kAligned, bool kOverwritten = false>
  __device__ __forceinline__ void load(const T* from, int count) {
    uint4 words[sizeof(Chunk) / 16] = {};
    if (kAligned) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Chunk) / 16); i++)
        if (count > 0) {
          const uint4* const word = reinterpret_cast<const uint4*>(from) + i;
          words[i] = kOverwritten ? *word : __ldg(word);
        }
      memcpy(at, words, sizeof(Chunk));
    } else {
      memcpy(at, words, sizeof(Chunk));
#pragma unroll
      for (int j = 0; j < kChunk; j++)
        if (j < count) at[j] = from[j];
    }
  }

  // Writes the first `count` elements to `to`.
  template <bool kAligned>
  __device__ __forceinline__ void store(T* to, int count) const {
    if (kAligned) {
      uint4 words[sizeof(Chunk) / 16];
      memcpy(words, at, sizeof(Chunk));
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Chunk) / 16); i++)
        if (count > 0) store_vector(reinterpret_cast<uint4*>(to) + i, words[i]);
    } else {
#pragma unroll
      for (int j = 0; j < kChunk; j++)
        if (j < count) to[j] = at[j];
    }
  }

  __device__ __forceinline__ void unpack(float (&values)[kChunk]) const {
#pragma unroll
    for (int j = 0; j < kChunk; j += 2) unpack_pair(at + j, values[j], values[j + 1]);
  }

  __device__ __forceinline__ void pack(const float (&values)[kChunk]) {
#pragma unroll
    for (int j = 0; j < kChunk; j += 2) pack_pair(at + j, values[j], values[j + 1]);
  }
};

template <bool kAligned, class T>
__device__ __forceinline__ void store_chunk(T* to, const float (&values)[kChunk], int count) {
  Chunk<T> chunk;
  chunk.pack(values);
  chunk.template store<kAligned>(to, count);
}

}  // namespace fastattn
