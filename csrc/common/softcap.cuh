// Scores between -softcap and softcap: softcap * tanh(score / softcap).
#pragma once
#include "common/softmax.cuh"

namespace fastattn {

// For 16-bit types from the hardware's exponential, with an absolute error of 2e-7. The hardware's tanh has one of
// 2^-11, as large as a rounding to float16.
template <class T>
__device__ __forceinline__ float tanh_for(float x) {
  if constexpr (sizeof(T) > 2)
    return tanhf(x);
  else
    return fmaf(2.0f, sigmoid(2.0f * x), -1.0f);
}

// Turns products q k^T into capped scores. use(j, e, derivative): of the cap, at element (j, e).
template <class T, int kTiles, class Use>
__device__ __forceinline__ void cap_scores(float (&s)[kTiles][4], float softmax_scale, float softcap, Use&& use) {
  const float scale = softmax_scale * reciprocal(softcap);
#pragma unroll
  for (int j = 0; j < kTiles; j++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float ratio = tanh_for<T>(s[j][e] * scale);
      s[j][e] = softcap * ratio;
      use(j, e, 1.0f - ratio * ratio);
    }
  }
}

}  // namespace fastattn
