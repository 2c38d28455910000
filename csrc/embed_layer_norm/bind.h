// Python's view of embed_layer_norm: fastattn/backends/cuda/embed_layer_norm.py.
#pragma once
#include "common/bind.h"
#include "embed_layer_norm/embed_layer_norm.h"

namespace fastattn::embed_layer_norm::bindings {

inline Indices indices(const Typed& t) { return {at(std::get<0>(t)), std::get<1>(t) == 8}; }

inline Source source(const Typed& tokens, const Typed& position, const Typed& embedding, const Typed& position_table,
                     int64_t vocabulary, int64_t n_position, int64_t length, float scale, uintptr_t rng_state,
                     uint32_t threshold, float keep_scale) {
  const Dropout dropout{at(rng_state), threshold, keep_scale};
  return {indices(tokens), indices(position), array(embedding), array(position_table),
          vocabulary,      n_position,        length,           scale,
          dropout};
}

inline void forward(const Source& source, const Typed& weight, const Typed& bias, const Typed& out,
                    uintptr_t statistics, int64_t rows, int hidden, float eps, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Forward p{source, array(weight), array(bias), array(out), at(statistics), rows, hidden, eps};
  embed_layer_norm::forward(p, at(stream));
}

inline void backward(const Source& source, const Typed& dout, const Typed& weight, uintptr_t statistics,
                     const Typed& drows, uintptr_t index, const Typed& dweight, const Typed& dbias, uintptr_t partial,
                     int64_t rows, int hidden, int blocks, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Backward p{source,         array(dout),  array(weight), at(statistics), array(drows), at(index),
                   array(dweight), array(dbias), at(partial),   rows,           hidden,       blocks};
  embed_layer_norm::backward(p, at(stream));
}

inline int backward_blocks(int64_t rows, int hidden, int device) {
  return embed_layer_norm::backward_blocks(rows, hidden, device_attribute(cudaDevAttrMultiProcessorCount, device));
}

inline void bind(pybind11::module_& m) {
  // Local: tests load several builds of this module into one process.
  pybind11::class_<Source>(m, "EmbedLayerNormSource", pybind11::module_local()).def(pybind11::init(&source));
  m.def("embed_layer_norm_fwd", forward);
  m.def("embed_layer_norm_bwd", backward);
  m.def("embed_layer_norm_bwd_blocks", backward_blocks);
}

}  // namespace fastattn::embed_layer_norm::bindings
