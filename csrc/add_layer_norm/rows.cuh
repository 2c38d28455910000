// Shared by forward and backward: the choice of the compiled kernel, and of the type of x and its gradient.
#pragma once
#include "add_layer_norm/add_layer_norm.h"
#include "common/norm.cuh"

namespace fastattn::add_layer_norm {

using norm::aligned;
using norm::column;
using norm::Int;

// Calls f with a null pointer to the type of x, or of its gradient: T, or where T is float, what the dtype is when the
// kernel runs. A uniform branch: as a template parameter it would need two more kernels for every five.
template <class T, class Function>
__device__ __forceinline__ void x_switch(DType dtype, Function&& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::bfloat16) return f(static_cast<__nv_bfloat16*>(nullptr));
    if (dtype == DType::float16) return f(static_cast<__half*>(nullptr));
  }
  f(static_cast<T*>(nullptr));
}

// Calls f(T, W, kChunks, kAligned): two values of the types and two integral constants.
template <class Function>
void dispatch(DType dtype, DType weight_dtype, int chunks, bool is_aligned, Function&& f) {
  dtype_switch(dtype, [&](auto t) {
    const auto with_shape = [&](auto w) {
      norm::shape_switch(chunks, is_aligned, [&](auto k, auto vectors) { f(t, w, k, vectors); });
    };
    weight_dtype == DType::float32 ? with_shape(float{}) : with_shape(t);
  });
}

}  // namespace fastattn::add_layer_norm
