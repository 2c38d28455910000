// Operations on a warp's tile of scores, (16 x 8 kTiles): element (j, e) of lane 4g + c is query g + e / 2 * 8 of the
// tile and key 8 j + 2 c + e % 2. `half` is one of a lane's two queries.
#pragma once
#include "attention/mask.cuh"
#include "common/philox.cuh"
#include "common/softmax.cuh"

#include <type_traits>

namespace fastattn::attention {

// Sets masked scores to -inf. visible: from visible_bits().
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kTiles][4], int half, uint32_t visible) {
#pragma unroll
  for (int j = 0; j < kTiles * 2; j++)
    if ((visible >> j & 1) == 0) s[j / 2][2 * half + j % 2] = -kInfinity;
}

// Sets dropped scores to 0, for row `row` of the dropout rule, from key n0 on.
template <int kTiles>
__device__ __forceinline__ void drop(float (&p)[kTiles][4], int half, const DropoutMask& dropout, int64_t row, int n0) {
  static_assert(kTiles % 4 == 0, "a quad draws for 32 keys at once");
#pragma unroll
  for (int part = 0; part < kTiles; part += 4) {
    const uint32_t kept = dropout.kept_by_quad(row, n0 / 8 + part) >> threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if ((kept >> (8 * (j / 2) + j % 2) & 1) == 0) p[part + j / 2][2 * half + j % 2] = 0.0f;
  }
}

// exp(score - shift) as a power of two, the only one that the hardware has. With softmax_scale folded into the unit it
// is one multiply-add an element. That rounds once more, which is too inexact for float32.
template <class T>
struct Exponent {
  static constexpr bool folded = sizeof(T) == 2;  // then scores are bare products, and shift is without the scale
  float softmax_scale, unit;

  explicit __device__ __forceinline__ Exponent(float softmax_scale)
      : softmax_scale(softmax_scale), unit(folded ? softmax_scale * kLog2e : kLog2e) {}

  template <int kTiles>
  __device__ __forceinline__ void scale(float (&s)[kTiles][4]) const {
    if constexpr (!folded) {
#pragma unroll
      for (int j = 0; j < kTiles * 4; j++) s[j / 4][j % 4] *= softmax_scale;
    }
  }

  // shift: if folded, already multiplied with the unit.
  template <int kTiles>
  __device__ __forceinline__ void apply(float (&s)[kTiles][4], int half, float shift) const {
    const auto each = [&](auto power) {
#pragma unroll
      for (int j = 0; j < kTiles * 2; j++) s[j / 2][2 * half + j % 2] = power(s[j / 2][2 * half + j % 2]);
    };
    if constexpr (std::is_same_v<T, float>) {
      each([&](float score) { return exp_exact(score - shift); });
    } else if constexpr (folded) {
      each([&](float score) { return exp2_approximate(score * unit - shift); });
    } else {
      each([&](float score) { return exp2_approximate((score - shift) * unit); });
    }
  }
};

}  // namespace fastattn::attention
