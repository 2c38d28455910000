// Activations with their slopes, on float32. A gated form acts on its gate.
#pragma once
#include "common/softmax.cuh"
#include "feed_forward/feed_forward.h"

namespace fastattn::feed_forward {

// The normal distribution function at z, for results of type T; power: exp(-z^2 / 2), which the slope needs, too. In 16
// bits the error of 7.5e-8 does not matter, and a gelu needs 14 instructions instead of erff's 26.
// Source: Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 26.2.17, its constants over sqrt(2 pi).
template <class T>
__device__ __forceinline__ float normal_below(float z, float power) {
  if constexpr (sizeof(T) == 4) {
    constexpr float kSqrtHalf = 0.7071067811865476f;
    return 0.5f * (1.0f + erff(z * kSqrtHalf));
  } else {
    const float t = reciprocal(1.0f + 0.2316419f * fabsf(z));
    float sum = 0.5307027145f;
    sum = sum * t - 0.7265760135f;
    sum = sum * t + 0.7107068705f;
    sum = sum * t - 0.142248368f;
    sum = sum * t + 0.127414796f;
    const float beyond = sum * t * power;
    return z > 0.0f ? 1.0f - beyond : beyond;
  }
}

// at(z, slope): act(z), and act'(z) to `slope`.
struct Relu {
  static __device__ __forceinline__ float at(float z, float& slope) {
    slope = z <= 0.0f ? 0.0f : 1.0f;
    return z < 0.0f ? 0.0f : z;  // NaN stays NaN
  }
};

template <class T>
struct Gelu {
  static __device__ __forceinline__ float at(float z, float& slope) {
    constexpr float kInvSqrtTau = 0.3989422804014327f;
    const float power = exp2_approximate(-0.5f * kLog2e * z * z), below = normal_below<T>(z, power);
    slope = below + z * kInvSqrtTau * power;
    return z * below;
  }
};

template <class T>
struct GeluTanh {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  static __device__ __forceinline__ float at(float z, float& slope) {
    constexpr float kScale = 1.5957691216057308f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
    const float twice_u = (z + kCubic * z * z * z) * kScale;
    float share, rise;               // sigmoid and its slope
    if constexpr (sizeof(T) == 4) {  // the rounding of 1 - share would be multiplied by z^3
      const float power = exp2_approximate(-kLog2e * fabsf(twice_u)), inverse = reciprocal(1.0f + power);
      share = twice_u < 0.0f ? power * inverse : inverse;
      rise = power * inverse * inverse;
    } else {
      share = sigmoid(twice_u);
      rise = share * (1.0f - share);
    }
    slope = share + z * rise * kScale * (1.0f + 3.0f * kCubic * z * z);
    return z * share;
  }
};

struct Silu {
  static __device__ __forceinline__ float at(float z, float& slope) {
    const float share = sigmoid(z);
    slope = share + z * share * (1.0f - share);
    return z * share;
  }
};

// Calls f with a value of the activation's type, for results of type T: one uniform branch for a chunk.
template <class T, class Function>
__device__ __forceinline__ void with_activation(Activation activation, Function&& f) {
  switch (activation) {
    case Activation::relu: return f(Relu{});
    case Activation::gelu: return f(Gelu<T>{});
    case Activation::gelu_tanh: return f(GeluTanh<T>{});
    case Activation::silu: return f(Silu{});
  }
}

}  // namespace fastattn::feed_forward
