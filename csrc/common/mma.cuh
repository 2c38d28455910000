// A warp's matrix product: accumulator (16 x 8) += A (16 x K) * B (K x 8), rows of A and columns of B being 32 bytes
// long: K = 16 of bfloat16 or float16, 8 of float or Tf32. With g = lane / 4, c = lane % 4, a lane holds
//
//   accumulator  float[4]     (g, 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c + 1)
//   A            uint32_t[4]  word c of row g, of row g + 8, word c + 4 of row g, of row g + 8
//   B            uint32_t[2]  words c and c + 4 of column g
//
// where a word is two 16-bit elements or one float. All products run on tensor cores, those of floats as four in tf32
// of their two parts. Tensor cores round towards zero, so the sum of eight terms is added to d without them. Below
// 2^-113 an operand is exact to 2^-136, where its small part is subnormal, or to 2^-126 if the chip drops such parts.
#pragma once
#include "common/launch.cuh"

#include <cstring>
#include <type_traits>

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

}  // namespace fastattn

#ifdef FASTATTN_EMULATOR
#include "emulator/mma.h"
#else

namespace fastattn {

template <class T>
__device__ __forceinline__ void mma_instruction(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define FASTATTN_MMA(T, INSTRUCTION)                                                                                  \
  template <>                                                                                                         \
  __device__ __forceinline__ void mma_instruction<T>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile("mma.sync.aligned." INSTRUCTION " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"             \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                 \
  }
FASTATTN_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
FASTATTN_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
FASTATTN_MMA(Tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef FASTATTN_MMA

// To the nearest tf32. The instruction would truncate.
__device__ __forceinline__ uint32_t round_tf32(uint32_t word) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
}

}  // namespace fastattn
#endif

namespace fastattn {

// Floats as sums of two tf32: big is the nearest, small the rest, whose last bit the instruction may ignore. What is
// not finite, or would round to infinity, is all in small, and rest, which is multiplied by another rest, is 0:
// infinity times a number is infinity then, not inf - inf or inf * 0. Six instructions a number.
template <int kCount>
__device__ __forceinline__ void split_tf32(uint32_t (&big)[kCount], uint32_t (&small)[kCount], uint32_t (&rest)[kCount],
                                           const uint32_t (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const float value = as_float(words[i]);
    const bool is_finite = fabsf(value) < 0x1.ffep127f;
    big[i] = is_finite ? (words[i] + 0x1000u) & 0xffffe000u : 0u;
    small[i] = as_word(value - as_float(big[i]));
    rest[i] = is_finite ? small[i] : 0u;
  }
}

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, float>) {
    uint32_t a_big[4], a_small[4], a_rest[4], b_big[2], b_small[2], b_rest[2];
    split_tf32(a_big, a_small, a_rest, a), split_tf32(b_big, b_small, b_rest, b);
    float sum[4] = {};
    mma_instruction<Tf32>(sum, a_rest, b_rest);
    mma_instruction<Tf32>(sum, a_small, b_big);
    mma_instruction<Tf32>(sum, a_big, b_small);
    mma_instruction<Tf32>(sum, a_big, b_big);
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] += sum[i];
  } else {
    mma_instruction<T>(d, a, b);
  }
}

}  // namespace fastattn
