// What a softmax over mma accumulators needs: a power of two, and sums and maxima over the four lanes that share a row.
#pragma once
#include "common/launch.cuh"

namespace fastattn {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// The hardware's, right to 2 units in the last place; 0 for -inf.
__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef FASTATTN_HOST
  return exp2f(x);
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

}  // namespace fastattn
