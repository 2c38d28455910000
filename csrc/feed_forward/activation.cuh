// Activations with their slopes, on float32. A gated form acts on its gate.
#pragma once
#include "common/softmax.cuh"
#include "feed_forward/feed_forward.h"

namespace fastattn::feed_forward {

// 1 / (1 + exp(-z)), right to a few units in the last place where it matters; 0 and 1 far out.
__device__ __forceinline__ float sigmoid(float z) {
  const float inverse = 1.0f + exp2_approximate(-kLog2e * z);
#ifdef FASTATTN_HOST
  return 1.0f / inverse;
#else
  return __fdividef(1.0f, inverse);
#endif
}

// at(z, slope): act(z), and act'(z) to `slope`.
struct Relu {
  static __device__ __forceinline__ float at(float z, float& slope) {
    slope = z > 0.0f ? 1.0f : 0.0f;
    return z < 0.0f ? 0.0f : z;  // NaN stays NaN
  }
};

struct Gelu {
  static __device__ __forceinline__ float at(float z, float& slope) {
    constexpr float kSqrtHalf = 0.7071067811865476f, kInvSqrtTau = 0.3989422804014327f;
    const float below = 0.5f * (1.0f + erff(z * kSqrtHalf));
    slope = below + z * kInvSqrtTau * exp2_approximate(-0.5f * kLog2e * z * z);
    return z * below;
  }
};

struct GeluTanh {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  static __device__ __forceinline__ float at(float z, float& slope) {
    constexpr float kScale = 1.5957691216057308f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
    const float share = sigmoid((z + kCubic * z * z * z) * kScale);
    slope = share + z * share * (1.0f - share) * kScale * (1.0f + 3.0f * kCubic * z * z);
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

// Calls f with a value of the activation's type: one branch for a chunk, which all threads take alike.
template <class Function>
__device__ __forceinline__ void with_activation(Activation activation, Function&& f) {
  switch (activation) {
    case Activation::relu: return f(Relu{});
    case Activation::gelu: return f(Gelu{});
    case Activation::gelu_tanh: return f(GeluTanh{});
    case Activation::silu: return f(Silu{});
  }
}

}  // namespace fastattn::feed_forward
