// Python's view of feed_forward: fastattn/backends/cuda/feed_forward.py.
#pragma once
#include "common/bind.h"
#include "feed_forward/feed_forward.h"

namespace fastattn::feed_forward::bindings {

// What computes the product: our kernel for Hopper, or cuBLAS before this call: then a is the product.
// The numbers are those of fastattn/backends/cuda/feed_forward.py.
enum class GemmBackend : int { sm90 = 0, cublas = 1 };

// h: (tokens, d_inner), saved or made.
inline Hidden hidden_layer(const Tensor& h, int activation, bool gated, double dropout_p, const Tensor& rng_state) {
  const auto [tokens, d_inner] = h.sizes<2>();
  return {tokens, static_cast<int>(d_inner), Activation(activation), gated, dropout(rng_state, dropout_p), h.dtype()};
}

inline Operands operands(const Tensor& a, const Tensor& b) { return {a, b, static_cast<int>(a.sizes<2>()[1])}; }

inline void forward(int gemm, Tensor a, Tensor b, Tensor bias1, Tensor z, Tensor h, int activation, bool gated,
                    double dropout_p, Tensor rng_state) {
  const Forward p{hidden_layer(h, activation, gated, dropout_p, rng_state), bias1, z, h};
  if (p.hidden.tokens * p.hidden.d_inner == 0) return;
  const Stream stream(h);
  switch (GemmBackend(gemm)) {
    case GemmBackend::sm90: return forward_product_sm90(operands(a, b), p, stream);
    case GemmBackend::cublas: return forward_pointwise(a, p, stream);
  }
}

// h: where it is not stored again, null, and saved is h.
inline void backward(int gemm, Tensor a, Tensor b, Tensor saved, Tensor dz, Tensor h, Tensor partial, Tensor dbias1,
                     int activation, bool gated, double dropout_p, Tensor rng_state) {
  const Backward p{hidden_layer(h ? h : saved, activation, gated, dropout_p, rng_state), saved, dz, h, partial, dbias1};
  if (p.hidden.tokens * p.hidden.d_inner == 0) return;
  const Stream stream(dz);
  switch (GemmBackend(gemm)) {
    case GemmBackend::sm90: backward_product_sm90(operands(a, b), p, stream); break;
    case GemmBackend::cublas: backward_pointwise(a, p, stream); break;
  }
  bias_gradient(p, stream);
}

inline void bind(pybind11::module_& m) {
  m.attr("FEED_FORWARD_SUM_ROWS") = kSumRows;
  m.def("feed_forward_fwd", forward);
  m.def("feed_forward_bwd", backward);
}

}  // namespace fastattn::feed_forward::bindings
