// What forward and backward share: how a row is spread over threads, and which compiled kernel a call needs.
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

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Calls f(T, W, kChunks, kAligned), each as a value that carries the type or the number in its type.
template <class Function>
void dispatch(DType dtype, DType weight_dtype, int chunks, bool is_aligned, Function&& f) {
  dtype_switch(dtype, [&](auto t) {
    const auto with_alignment = [&](auto w, auto k) { is_aligned ? f(t, w, k, Int<1>{}) : f(t, w, k, Int<0>{}); };
    const auto with_chunks = [&](auto w) {
      chunks == 1 ? with_alignment(w, Int<1>{}) : chunks == 2 ? with_alignment(w, Int<2>{}) : with_alignment(w, Int<4>{});
    };
    weight_dtype == DType::float32 ? with_chunks(float{}) : with_chunks(t);
  });
}

}  // namespace fastattn::add_layer_norm
