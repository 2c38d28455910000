// Python's view of the cross-entropy of rows: fastattn/backends/cuda/linear_cross_entropy.py.
#pragma once
#include "common/bind.h"
#include "linear_cross_entropy/linear_cross_entropy.h"

namespace fastattn::linear_cross_entropy::bindings {

inline void rows(uintptr_t logits, uintptr_t bias, uintptr_t target, uintptr_t losses, uintptr_t dloss, uintptr_t count,
                 int64_t rows, int64_t stride, int classes, int dloss_stride, int64_t ignore_index, float logit_scale,
                 float on_target, float on_each, bool has_gradient, int dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Params p{at(logits), at(bias),     at(target),   at(losses),  at(dloss), at(count), rows,         stride,
                 classes,    dloss_stride, ignore_index, logit_scale, on_target, on_each,   has_gradient, DType(dtype)};
  const int shared_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cross_entropy_rows(p, shared_bytes, at(stream));
}

inline void bind(pybind11::module_& m) { m.def("cross_entropy_rows", rows); }

}  // namespace fastattn::linear_cross_entropy::bindings
