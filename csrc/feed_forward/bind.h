// Python's view of feed_forward: fastattn/backends/cuda/feed_forward.py passes pointers as integers, 0 for null.
#pragma once
#include "common/bind.h"
#include "feed_forward/feed_forward.h"

namespace fastattn::feed_forward::bindings {

// What makes the product: our kernel for Hopper, or cuBLAS before this is called: a is the product then.
// The numbers are those of fastattn/backends/cuda/feed_forward.py.
enum class Route : int { sm90 = 0, cublas = 1 };

inline void forward(int route, uintptr_t a, uintptr_t b, int depth, uintptr_t bias1, uintptr_t z, uintptr_t h,
                    int64_t tokens, int d_ff, int activation, bool gated, uintptr_t rng_state, uint32_t threshold,
                    float scale, int dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Operands product{pointer<void>(a), pointer<void>(b), depth};
  const Forward p{{tokens, d_ff, Activation(activation), gated, {pointer<int64_t>(rng_state), threshold, scale}, DType(dtype)},
                  pointer<void>(bias1), pointer<void>(z), pointer<void>(h)};
  const auto queue = pointer<CUstream_st>(stream);
  switch (Route(route)) {
    case Route::sm90: return forward_product_sm90(product, p, queue);
    case Route::cublas: return forward_pointwise(product.a, p, queue);
  }
}

inline void backward(int route, uintptr_t a, uintptr_t b, int depth, uintptr_t saved, uintptr_t dz, uintptr_t h,
                     uintptr_t partial, uintptr_t dbias1, int64_t tokens, int d_ff, int activation, bool gated,
                     uintptr_t rng_state, uint32_t threshold, float scale, int dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Operands product{pointer<void>(a), pointer<void>(b), depth};
  const Backward p{{tokens, d_ff, Activation(activation), gated, {pointer<int64_t>(rng_state), threshold, scale}, DType(dtype)},
                   pointer<void>(saved), pointer<void>(dz), pointer<void>(h), pointer<float>(partial), pointer<void>(dbias1)};
  const auto queue = pointer<CUstream_st>(stream);
  switch (Route(route)) {
    case Route::sm90: backward_product_sm90(product, p, queue); break;
    case Route::cublas: backward_pointwise(product.a, p, queue); break;
  }
  bias_gradient(p, queue);
}

inline void bind(pybind11::module_& m) {
  m.def("feed_forward_fwd", forward);
  m.def("feed_forward_bwd", backward);
}

}  // namespace fastattn::feed_forward::bindings
