// Shared by forward and backward: how threads share a row, the choice of the compiled kernel, and of the type of x and
// its gradient.
#pragma once
#include "add_layer_norm/add_layer_norm.h"
#include "common/philox.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

#include <type_traits>

namespace fastattn::add_layer_norm {

constexpr int kMaxThreads = kMaxWarps * kWarp;

// A block is (row_warps * 32, rows) threads. A thread owns the chunks threadIdx.x, threadIdx.x + blockDim.x, ... of its
// row, kChunks of them at most.
struct Shape {
  int chunks, row_warps;
};

inline Shape shape_of(int hidden, int max_chunks) {
  const int width = (hidden + kWarp * kChunk - 1) / (kWarp * kChunk);  // of a row, in chunks of each lane of one warp
  const int chunks = width >= 4 && max_chunks >= 4 ? 4 : width >= 2 && max_chunks >= 2 ? 2 : 1;
  const int wanted = (width + chunks - 1) / chunks;
  return wanted <= kMaxWarps ? Shape{chunks, wanted} : shape_of(hidden, 2 * max_chunks);
}

__device__ __forceinline__ int column(int chunk) { return (chunk * blockDim.x + threadIdx.x) * kChunk; }

template <class... Pointers>
bool aligned(int hidden, Pointers... pointers) {
  return hidden % kChunk == 0 && ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

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
    const auto with_chunks = [&](auto w, auto k) { is_aligned ? f(t, w, k, Int<1>{}) : f(t, w, k, Int<0>{}); };
    const auto with_weight = [&](auto w) {
      chunks == 1 ? with_chunks(w, Int<1>{}) : chunks == 2 ? with_chunks(w, Int<2>{}) : with_chunks(w, Int<4>{});
    };
    weight_dtype == DType::float32 ? with_weight(float{}) : with_weight(t);
  });
}

}  // namespace fastattn::add_layer_norm
