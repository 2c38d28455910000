// Python's view of add_layer_norm: fastattn/backends/cuda/add_layer_norm.py passes pointers as integers, 0 for null.
#pragma once
#include "add_layer_norm/add_layer_norm.h"
#include "common/bind.h"

namespace fastattn::add_layer_norm::bindings {

inline void forward(uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, Typed x_bias, uintptr_t out,
                    uintptr_t z, uintptr_t statistics, int64_t rows, int hidden, float eps, bool eps_on_std,
                    uintptr_t rng_state, uint32_t threshold, float scale, int dtype, int weight_dtype, int device,
                    uintptr_t stream) {
  const DeviceGuard guard(device);
  add_layer_norm::forward({pointer<void>(x), pointer<void>(residual), pointer<void>(weight), pointer<void>(bias),
                           array(x_bias), pointer<void>(out), pointer<void>(z), pointer<float>(statistics), rows, hidden, eps,
                           eps_on_std, {pointer<int64_t>(rng_state), threshold, scale}, DType(dtype), DType(weight_dtype)},
                          pointer<CUstream_st>(stream));
}

inline void backward(uintptr_t dout, uintptr_t dz, uintptr_t z, uintptr_t weight, uintptr_t statistics, uintptr_t dsum,
                     uintptr_t dx, uintptr_t dweight, uintptr_t dbias, Typed dx_bias, uintptr_t partial, int64_t rows,
                     int hidden, int blocks, bool eps_on_std, uintptr_t rng_state, uint32_t threshold, float scale,
                     int dtype, int weight_dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  add_layer_norm::backward({pointer<void>(dout), pointer<void>(dz), pointer<void>(z), pointer<void>(weight),
                            pointer<float>(statistics), pointer<void>(dsum), pointer<void>(dx), pointer<void>(dweight),
                            pointer<void>(dbias), array(dx_bias), pointer<float>(partial), rows, hidden, blocks,
                            eps_on_std, {pointer<int64_t>(rng_state), threshold, scale}, DType(dtype), DType(weight_dtype)},
                           pointer<CUstream_st>(stream));
}

inline int backward_blocks(int64_t rows, int hidden, int device) {
  return add_layer_norm::backward_blocks(rows, hidden, device_attribute(cudaDevAttrMultiProcessorCount, device));
}

inline int backward_partials(int blocks) { return norm::backward_partials(blocks); }

inline void bind(pybind11::module_& m) {
  m.def("add_layer_norm_fwd", forward);
  m.def("add_layer_norm_bwd", backward);
  m.def("add_layer_norm_bwd_blocks", backward_blocks);
  m.def("add_layer_norm_bwd_partials", backward_partials);
}

}  // namespace fastattn::add_layer_norm::bindings
