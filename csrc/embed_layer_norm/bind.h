// Python's view of embed_layer_norm: fastattn/backends/cuda/embed_layer_norm.py.
#pragma once
#include "common/bind.h"
#include "embed_layer_norm/embed_layer_norm.h"

namespace fastattn::embed_layer_norm::bindings {

inline Indices indices(const Tensor& t) { return t ? Indices{t, t.is_int64()} : Indices{}; }

inline Source source(const Tensor& embedding, const Tensor& tokens, const Tensor& position_table,
                     const Tensor& position, int64_t length, float scale, double dropout_p, const Tensor& rng_state) {
  return {indices(tokens),
          indices(position),
          array(embedding),
          array(position_table),
          embedding.sizes<1>()[0],
          position_table.sizes<1>()[0],
          length,
          scale,
          dropout(rng_state, dropout_p)};
}

inline void forward(Tensor embedding, Tensor weight, Tensor bias, Tensor tokens, Tensor position_table, Tensor position,
                    int64_t length, float scale, Tensor out, Tensor statistics, int64_t rows, int hidden, float eps,
                    double dropout_p, Tensor rng_state) {
  const Stream stream(embedding);
  const Source from = source(embedding, tokens, position_table, position, length, scale, dropout_p, rng_state);
  const Forward p{from, array(weight), array(bias), array(out), statistics, rows, hidden, eps};
  embed_layer_norm::forward(p, stream);
}

inline void backward(Tensor dout, Tensor embedding, Tensor weight, Tensor tokens, Tensor position_table,
                     Tensor position, int64_t length, float scale, Tensor statistics, Tensor drows, Tensor index,
                     Tensor dweight, Tensor dbias, Tensor partial, int64_t rows, int hidden, int blocks,
                     double dropout_p, Tensor rng_state) {
  const Stream stream(embedding);
  const Source from = source(embedding, tokens, position_table, position, length, scale, dropout_p, rng_state);
  const Backward p{from,           array(dout),  array(weight), statistics, array(drows), index,
                   array(dweight), array(dbias), partial,       rows,       hidden,       blocks};
  embed_layer_norm::backward(p, stream);
}

// The blocks of the backward, and the rows of its partial sums.
inline std::pair<int, int> backward_grid(int64_t rows, int hidden, int device) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, device);
  const int blocks = embed_layer_norm::backward_blocks(rows, hidden, multiprocessors);
  return {blocks, norm::backward_partials(blocks)};
}

inline void bind(pybind11::module_& m) {
  m.def("embed_layer_norm_fwd", forward);
  m.def("embed_layer_norm_bwd", backward);
  m.def("embed_layer_norm_bwd_grid", backward_grid);
}

}  // namespace fastattn::embed_layer_norm::bindings
