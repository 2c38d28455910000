// Python's view of feed_forward: fastattn/backends/cuda/feed_forward.py.
#pragma once
#include "common/bind.h"
#include "feed_forward/feed_forward.h"

namespace fastattn::feed_forward::bindings {

// What computes the product: our kernel for Hopper, or cuBLAS before this call: then a is the product.
// The numbers are those of fastattn/backends/cuda/feed_forward.py.
enum class GemmBackend : int { sm90 = 0, cublas = 1 };

inline void forward(int gemm, int depth, uintptr_t a, uintptr_t b, uintptr_t bias1, uintptr_t z, uintptr_t h,
                    int64_t tokens, int d_inner, int activation, bool gated, uintptr_t rng_state, uint32_t threshold,
                    float scale, int dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Operands product{at(a), at(b), depth};
  const Dropout dropout{at(rng_state), threshold, scale};
  const Hidden hidden{tokens, d_inner, Activation(activation), gated, dropout, DType(dtype)};
  const Forward p{hidden, at(bias1), at(z), at(h)};
  CUstream_st* const queue = at(stream);
  switch (GemmBackend(gemm)) {
    case GemmBackend::sm90: return forward_product_sm90(product, p, queue);
    case GemmBackend::cublas: return forward_pointwise(product.a, p, queue);
  }
}

inline void backward(int gemm, int depth, uintptr_t a, uintptr_t b, uintptr_t saved, uintptr_t dz, uintptr_t h,
                     uintptr_t partial, uintptr_t dbias1, int64_t tokens, int d_inner, int activation, bool gated,
                     uintptr_t rng_state, uint32_t threshold, float scale, int dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Operands product{at(a), at(b), depth};
  const Dropout dropout{at(rng_state), threshold, scale};
  const Hidden hidden{tokens, d_inner, Activation(activation), gated, dropout, DType(dtype)};
  const Backward p{hidden, at(saved), at(dz), at(h), at(partial), at(dbias1)};
  CUstream_st* const queue = at(stream);
  switch (GemmBackend(gemm)) {
    case GemmBackend::sm90: backward_product_sm90(product, p, queue); break;
    case GemmBackend::cublas: backward_pointwise(product.a, p, queue); break;
  }
  bias_gradient(p, queue);
}

inline void bind(pybind11::module_& m) {
  m.attr("FEED_FORWARD_SUM_ROWS") = kSumRows;
  m.def("feed_forward_fwd", forward);
  m.def("feed_forward_bwd", backward);
}

}  // namespace fastattn::feed_forward::bindings
