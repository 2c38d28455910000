// Python's view of the cross-entropy of rows: fastattn/backends/cuda/linear_cross_entropy.py.
#pragma once
#include "common/bind.h"
#include "linear_cross_entropy/linear_cross_entropy.h"

namespace fastattn::linear_cross_entropy::bindings {

inline void rows(Tensor logits, Tensor bias, Tensor target, Tensor losses, Tensor dloss, int dloss_stride, Tensor count,
                 double label_smoothing, int64_t ignore_index, float logit_scale, bool has_gradient) {
  const Stream stream(logits);
  const auto [rows, classes] = logits.sizes<2>();
  const Params p{logits,
                 bias,
                 target,
                 losses,
                 dloss,
                 count,
                 rows,
                 logits.strides<1>()[0],
                 static_cast<int>(classes),
                 dloss_stride,
                 ignore_index,
                 logit_scale,
                 static_cast<float>(1 - label_smoothing),
                 static_cast<float>(label_smoothing / static_cast<double>(classes)),
                 has_gradient,
                 logits.dtype()};
  const int shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, stream.device());
  cross_entropy_rows(p, shared_bytes, stream);
}

inline void bind(pybind11::module_& m) { m.def("cross_entropy_rows", rows); }

}  // namespace fastattn::linear_cross_entropy::bindings
