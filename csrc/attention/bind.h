// Python's view of attention: fastattn/backends/cuda/attention.py fills the structs and launches.   Conventions: arguments.h
#pragma once
#include "attention/arguments.h"
#include "attention/backward.h"
#include "attention/short_backward.h"

namespace fastattn::attention::bindings {

inline void forward(const Forward& p, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::forward(p, pointer<CUstream_st>(stream));
}

inline void weights(const Weights& p, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::weights(p, pointer<CUstream_st>(stream));
}

// dbias: its address, 0 for none, and its batch and heads. is_short: by the kernel of short sequences, which makes dbias
// itself unless batches or heads share it; then p.delta is given, for the kernel that adds it up.
inline void backward(const Backward& p, int64_t dbias, int batch, int heads, bool is_short, int device, int64_t stream_) {
  const DeviceGuard guard(device);
  const auto stream = pointer<CUstream_st>(stream_);
  if (is_short) {
    short_backward(p, p.delta == nullptr ? pointer<void>(dbias) : nullptr, stream);
  } else {
    backward_dq(p, stream);
    backward_dkdv(p, stream);
  }
  if (dbias != 0 && p.delta != nullptr) bias_gradient(p, pointer<void>(dbias), batch, heads, stream);
}

// (own, stream) of the forward, of backward_dq and of backward_dkdv.
inline std::array<int, 6> tiles(int head_dim, int dtype) {
  const TileSize forward = forward_tile(head_dim, DType(dtype)), backward = backward_tile(head_dim, DType(dtype));
  return {forward.own, forward.stream, backward.own, backward.stream, backward.own, backward.stream};
}

inline bool has_short_backward(int head_dim, int dtype, int device) {
  return attention::has_short_backward(head_dim, DType(dtype), device);
}

// Local to the module: a process may load several builds, as tests do.
inline void bind(pybind11::module_& m) {
  const pybind11::module_local local;
  pybind11::class_<Mask> mask(m, "AttentionMask", local);
  mask.def(pybind11::init([] { return Mask{}; }));
  mask.def_readwrite("band_lo", &Mask::band_lo).def_readwrite("band_hi", &Mask::band_hi);
  field<int64_t>(mask, "intervals", &Mask::intervals);
  mask.def_readwrite("intervals_stride_b", &Mask::intervals_stride_b);
  field<int64_t>(mask, "columns", &Mask::columns);
  mask.def_readwrite("columns_stride_b", &Mask::columns_stride_b);
  field<int64_t>(mask, "bits", &Mask::bits);
  mask.def_readwrite("bits_stride_b", &Mask::bits_stride_b).def_readwrite("bits_stride_h", &Mask::bits_stride_h);
  mask.def_readwrite("bits_stride_row", &Mask::bits_stride_row);
  field<int64_t>(mask, "counts", &Mask::counts);
  field<int64_t>(mask, "tiles", &Mask::tiles);
  mask.def_readwrite("max_tiles", &Mask::max_tiles);
  mask.def_readwrite("lists_stride_b", &Mask::lists_stride_b).def_readwrite("lists_stride_h", &Mask::lists_stride_h);

  using Matrix = std::array<int64_t, 4>;
  pybind11::class_<Forward> forward_arguments(m, "AttentionForward", local);
  common_fields(forward_arguments);
  field<Matrix>(forward_arguments, "v", &Forward::v);
  field<Matrix>(forward_arguments, "out", &Forward::out);
  forward_arguments.def_readwrite("mask", &Forward::mask);

  pybind11::class_<Weights> weights_arguments(m, "AttentionWeights", local);
  common_fields(weights_arguments);
  field<int64_t>(weights_arguments, "weights", &Weights::weights);
  weights_arguments.def_readwrite("mean", &Weights::mean).def_readwrite("mask", &Weights::mask);

  pybind11::class_<Backward> backward_arguments(m, "AttentionBackward", local);
  common_fields(backward_arguments);
  field<Matrix>(backward_arguments, "v", &Backward::v);
  field<Matrix>(backward_arguments, "out", &Backward::out);
  field<Matrix>(backward_arguments, "dout", &Backward::dout);
  field<Matrix>(backward_arguments, "dq", &Backward::dq);
  field<Matrix>(backward_arguments, "dk", &Backward::dk);
  field<Matrix>(backward_arguments, "dv", &Backward::dv);
  field<int64_t>(backward_arguments, "dlse", &Backward::dlse);
  field<int64_t>(backward_arguments, "delta", &Backward::delta);
  field<int64_t>(backward_arguments, "dbias_keys", &Backward::dbias_keys);
  backward_arguments.def_readwrite("by_query", &Backward::by_query).def_readwrite("by_key", &Backward::by_key);

  m.def("attention_forward", forward);
  m.def("attention_tiles", tiles);
  m.def("attention_backward", backward);
  m.def("attention_has_short_backward", has_short_backward);
  m.def("attention_weights", weights);
}

}  // namespace fastattn::attention::bindings
