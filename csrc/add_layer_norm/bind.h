// Python's view of add_layer_norm: fastattn/backends/cuda/add_layer_norm.py.
#pragma once
#include "add_layer_norm/add_layer_norm.h"
#include "common/bind.h"

namespace fastattn::add_layer_norm::bindings {

inline void forward(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, Typed x_bias, uintptr_t out,
                    uintptr_t z, uintptr_t statistics, int64_t rows, int hidden, float eps, bool eps_on_std,
                    uintptr_t rng_state, uint32_t threshold, float scale, int dtype, int weight_dtype, int device,
                    uintptr_t stream) {
  const DeviceGuard guard(device);
  const Dropout dropout{at(rng_state), threshold, scale};
  const Forward p{at(x),   at(residual), at(weight),     at(bias),     array(x_bias),
                  at(out), at(z),        at(statistics), rows,         hidden,
                  eps,     eps_on_std,   dropout,        DType(dtype), DType(weight_dtype)};
  add_layer_norm::forward(p, at(stream));
}

inline void backward(uintptr_t dout, uintptr_t dz, uintptr_t z, uintptr_t weight, uintptr_t statistics, uintptr_t dsum,
                     uintptr_t dx, uintptr_t dweight, uintptr_t dbias, Typed dx_bias, uintptr_t partial, int64_t rows,
                     int hidden, int blocks, bool eps_on_std, uintptr_t rng_state, uint32_t threshold, float scale,
                     int dtype, int weight_dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Dropout dropout{at(rng_state), threshold, scale};
  const Backward p{at(dout), at(dz),      at(z),      at(weight),     at(statistics), at(dsum),
                   at(dx),   at(dweight), at(dbias),  array(dx_bias), at(partial),    rows,
                   hidden,   blocks,      eps_on_std, dropout,        DType(dtype),   DType(weight_dtype)};
  add_layer_norm::backward(p, at(stream));
}

inline int backward_blocks(int64_t rows, int hidden, int device) {
  return add_layer_norm::backward_blocks(rows, hidden, device_attribute(cudaDevAttrMultiProcessorCount, device));
}

inline int backward_partials(int blocks) { return norm::backward_partials(blocks); }

inline void bind(pybind11::module_& m) {
  m.attr("NORM_MAX_HIDDEN") = norm::kMaxHidden;
  m.attr("NORM_TICKETS") = norm::kTickets;
  m.attr("NORM_MAX_HIDDEN_DX_BIAS") = norm::kMaxHiddenDxBias;
  m.def("add_layer_norm_fwd", forward);
  m.def("add_layer_norm_bwd", backward);
  m.def("add_layer_norm_bwd_blocks", backward_blocks);
  m.def("add_layer_norm_bwd_partials", backward_partials);
}

}  // namespace fastattn::add_layer_norm::bindings
