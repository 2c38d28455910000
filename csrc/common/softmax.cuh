// For a softmax over mma accumulators: powers of two, reciprocals, and sums and maxima over the four lanes that share a
// row.
#pragma once
#include "common/launch.cuh"

namespace fastattn {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// The hardware's power of two, with an error of up to 2 units in the last place; 0 for -inf.
__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef FASTATTN_EMULATOR
  return exp2f(x);
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}

// 1 / x, to one unit in the last place; 0 for x beyond 2^126.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef FASTATTN_EMULATOR
  return 1.0f / x;
#else
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#endif
}

// 1 / (1 + exp(-z)), with an error of a few units in the last place; 0 and 1 for large |z|.
__device__ __forceinline__ float sigmoid(float z) { return reciprocal(1.0f + exp2_approximate(-kLog2e * z)); }

// The larger one, NaN if either is: fmaxf drops NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#ifdef FASTATTN_EMULATOR
  return a < b ? b : a + (b - b);
#else
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#endif
}

// exp(x) for x <= 0 without the error of rounding x * log2(e), which grows with x: for float32.
__device__ __forceinline__ float exp_exact(float x) {
  constexpr float kLog2eRest = 1.9259630e-8f;  // log2(e) - kLog2e
  x = max_or_nan(x, -1e4f);                    // -inf would become NaN
  const float power = x * kLog2e, rest = fmaf(x, kLog2e, -power) + x * kLog2eRest, result = exp2_approximate(power);
  return fmaf(result, rest * kLn2, result);
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
