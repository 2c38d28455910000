// Python's view of feed_forward: fastattn/backends/cuda/feed_forward.py.
#pragma once
#include "common/bind.h"
#include "feed_forward/feed_forward.h"

namespace fastattn::feed_forward::bindings {

// h: (tokens, d_inner), saved or made.
inline Hidden hidden_layer(const Tensor& h, int activation, bool gated, double dropout_p, const Tensor& rng_state) {
  const auto [tokens, d_inner] = h.sizes<2>();
  return {tokens, static_cast<int>(d_inner), Activation(activation), gated, dropout(rng_state, dropout_p), h.dtype()};
}

inline void forward(Tensor z, Tensor h, int activation, bool gated, double dropout_p, Tensor rng_state) {
  const Forward p{hidden_layer(h, activation, gated, dropout_p, rng_state), z, h};
  if (p.hidden.tokens * p.hidden.d_inner == 0) return;
  feed_forward::forward(p, Stream(h));
}

// h: where it is not stored again, null, and saved is h.
inline void backward(Tensor dh, Tensor saved, Tensor dz, Tensor h, Tensor partial, Tensor dbias1, int activation,
                     bool gated, double dropout_p, Tensor rng_state) {
  const Hidden hidden = hidden_layer(h ? h : saved, activation, gated, dropout_p, rng_state);
  const Backward p{hidden, dh, saved, dz, h, partial, dbias1};
  if (hidden.tokens * hidden.d_inner == 0) return;
  const Stream stream(dz);
  feed_forward::backward(p, stream);
  bias_gradient(p, stream);
}

inline void bind(PyObject* m) {
  checked(PyModule_AddIntConstant(m, "FEED_FORWARD_SUM_ROWS", kSumRows));
  add_function<forward>(m, "feed_forward_fwd");
  add_function<backward>(m, "feed_forward_bwd");
}

}  // namespace fastattn::feed_forward::bindings
