// Python's view of add_layer_norm: fastattn/backends/cuda/add_layer_norm.py.
#pragma once
#include "add_layer_norm/add_layer_norm.h"
#include "common/bind.h"

namespace fastattn::add_layer_norm::bindings {

inline void forward(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor x_bias, Tensor out, Tensor read,
                    Tensor z, Tensor statistics, int64_t rows, int hidden, float eps, bool eps_on_std, double dropout_p,
                    Tensor rng_state) {
  const Stream stream(x);
  const Dropout drop = dropout(rng_state, dropout_p);
  const DType dtype = out.dtype(), weight_dtype = weight.dtype();
  const Forward p{array(x),   residual, weight, bias, array(x_bias), out,  array(read), z,
                  statistics, rows,     hidden, eps,  eps_on_std,    drop, dtype,       weight_dtype};
  add_layer_norm::forward(p, stream);
}

inline void backward(Tensor dout, Tensor dz, Tensor z, Tensor weight, Tensor statistics, Tensor dsum, Tensor dx,
                     Tensor dweight, Tensor dbias, Tensor dx_bias, Tensor partial, int64_t rows, int hidden, int blocks,
                     bool eps_on_std, double dropout_p, Tensor rng_state) {
  const Stream stream(z);
  const Dropout drop = dropout(rng_state, dropout_p);
  const DType dtype = z.dtype(), weight_dtype = weight.dtype();
  const Backward p{dout,           dz,      z,    weight, statistics, dsum,       array(dx), dweight, dbias,
                   array(dx_bias), partial, rows, hidden, blocks,     eps_on_std, drop,      dtype,   weight_dtype};
  add_layer_norm::backward(p, stream);
}

// The backward's blocks, and the rows of its partial sums.
inline std::pair<int, int> backward_grid(int64_t rows, int hidden, int device) {
  const int blocks = backward_blocks(rows, hidden, device_attribute(cudaDevAttrMultiProcessorCount, device));
  return {blocks, backward_partials(blocks)};
}

inline void bind(PyObject* m) {
  checked(PyModule_AddIntConstant(m, "NORM_MAX_HIDDEN", kMaxHidden));
  checked(PyModule_AddIntConstant(m, "NORM_TICKETS", kTickets));
  checked(PyModule_AddIntConstant(m, "NORM_MAX_HIDDEN_DX_BIAS", kMaxHiddenDxBias));
  add_function<forward>(m, "add_layer_norm_fwd");
  add_function<backward>(m, "add_layer_norm_bwd");
  add_function<backward_grid>(m, "add_layer_norm_bwd_grid");
}

}  // namespace fastattn::add_layer_norm::bindings
