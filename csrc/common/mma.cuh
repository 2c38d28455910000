// A warp's matrix product: accumulator (16 x 8) += A (16 x K) * B (K x 8), rows of A and columns of B being 32 bytes
// long: K = 16 of bfloat16 or float16, 8 of float or Tf32. With g = lane / 4, c = lane % 4, a lane holds
//
//   accumulator  float[4]     (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1)
//   A            uint32_t[4]  word c of row g, of row g + 8, word c + 4 of row g, of row g + 8
//   B            uint32_t[2]  words c and c + 4 of column g
//
// where a word is two 16-bit elements or one float. Products of 16-bit types and Tf32 run on tensor cores; those of
// float are exact multiply-adds: lanes exchange their fragments by shuffles, at a quarter of the rate without tensor
// cores.
#pragma once
#include "common/launch.cuh"

#include <cstring>

namespace fastattn {

// The type of float32 data that is multiplied in tf32: rounded to 10 bits of mantissa.
struct Tf32 {
  float value;
};

template <class T>
constexpr int kMmaDepth = 32 / static_cast<int>(sizeof(T));  // K

__device__ __forceinline__ float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
__device__ __forceinline__ uint32_t as_word(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// Two elements as a word of a 16-bit type, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack_word(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_word<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &both, 4);
  return word;
}
template <>
__device__ __forceinline__ uint32_t pack_word<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &both, 4);
  return word;
}

// The product of exact floats: eight steps, each a column of A times a row of B, read from the lanes that hold them.
// The eight are added up before they are added to d, as tensor cores do it: a long sum loses less in pieces of eight.
__device__ __forceinline__ void mma_exact(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int lane = threadIdx.x % 32, c = lane % 4, row = lane - c, column = 2 * c * 4;
  float sum[4] = {};
#pragma unroll 1
  for (int k = 0; k < 8; k++) {  // not unrolled: a kernel has many copies of it, and shuffles are its bound
    const int from = k % 4;
    const float top = __shfl_sync(0xffffffffu, as_float(k < 4 ? a[0] : a[2]), row + from);
    const float bottom = __shfl_sync(0xffffffffu, as_float(k < 4 ? a[1] : a[3]), row + from);
    const float left = __shfl_sync(0xffffffffu, as_float(k < 4 ? b[0] : b[1]), column + from);
    const float right = __shfl_sync(0xffffffffu, as_float(k < 4 ? b[0] : b[1]), column + 4 + from);
    sum[0] += top * left, sum[1] += top * right, sum[2] += bottom * left, sum[3] += bottom * right;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) d[i] += sum[i];
}

}  // namespace fastattn

#ifdef FASTATTN_EMULATOR
#include "emulator/mma.h"
#else

namespace fastattn {

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define FASTATTN_MMA(T, INSTRUCTION)                                                                      \
  template <>                                                                                             \
  __device__ __forceinline__ void mma<T>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile("mma.sync.aligned." INSTRUCTION " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                     \
  }
FASTATTN_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
FASTATTN_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
FASTATTN_MMA(Tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef FASTATTN_MMA

template <>
__device__ __forceinline__ void mma<float>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma_exact(d, a, b);
}

// To the nearest tf32. The instruction would truncate.
__device__ __forceinline__ uint32_t round_tf32(uint32_t word) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
}

}  // namespace fastattn
#endif
