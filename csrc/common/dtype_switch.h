// From a dtype, known at run time, to a C++ type, known at compile time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <type_traits>
#include <utility>

namespace fastattn {

// The numbers are those of Python::dtypes in common/bind.h.
enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// Elements of a dtype that a kernel reads when it runs.
struct Array {
  void* at;
  DType dtype;
  __host__ __device__ explicit operator bool() const { return at != nullptr; }
};

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Calls f with a zero of the type: dtype_switch(dtype, [&](auto zero) { using T = decltype(zero); ... });
template <class Function>
void dtype_switch(DType dtype, Function&& f) {
  switch (dtype) {
    case DType::float32: return std::forward<Function>(f)(float{});
    case DType::bfloat16: return std::forward<Function>(f)(__nv_bfloat16{});
    case DType::float16: return std::forward<Function>(f)(__half{});
  }
  throw std::invalid_argument("fastattn: unknown dtype");
}

}  // namespace fastattn
