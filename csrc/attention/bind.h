// Python's view of attention. fastattn/backends/cuda/attention.py fills the structs of attention.h and backward.h field
// by field: a tensor is the integer of its address, 0 for null; StridedMatrix, Bias, Dropout and Shape are tuples of
// their members.
#pragma once
#include <pybind11/stl.h>

#include <array>
#include <type_traits>

#include "attention/backward_sm90.h"
#include "attention/forward_sm90.h"
#include "attention/short_backward.h"
#include "common/bind.h"

namespace fastattn::attention::bindings {

// What Python gives for a field of each type.
inline StridedMatrix convert(const std::array<int64_t, 4>& t, StridedMatrix*) { return {at(t[0]), t[1], t[2], t[3]}; }
inline Bias convert(const std::array<int64_t, 6>& t, Bias*) { return {at(t[0]), t[1], t[2], t[3], t[4], DType(t[5])}; }
inline Dropout convert(const std::tuple<int64_t, uint32_t, float>& t, Dropout*) {
  return {at(std::get<0>(t)), std::get<1>(t), std::get<2>(t)};
}
inline Shape convert(const std::array<int, 7>& t, Shape*) { return {t[0], t[1], t[2], t[3], t[4], t[5], t[6]}; }
inline DType convert(int number, DType*) { return DType(number); }
template <class T>
T* convert(int64_t address, T**) {
  return at(address);
}

template <class Given, class Struct, class Value>
void field(pybind11::class_<Struct>& type, const char* name, Value Struct::* member) {
  type.def_property(name, nullptr, [member](Struct& s, const Given& given) {
    s.*member = convert(given, static_cast<Value*>(nullptr));
  });
}

// The fields that Forward, Backward and Weights share.
template <class Struct>
void common_fields(pybind11::class_<Struct>& type) {
  type.def(pybind11::init([] { return Struct{}; }));
  field<std::array<int64_t, 4>>(type, "q", &Struct::q);
  field<std::array<int64_t, 4>>(type, "k", &Struct::k);
  field<int64_t>(type, "lse", &Struct::lse);
  field<std::array<int, 7>>(type, "shape", &Struct::shape);
  field<std::array<int64_t, 6>>(type, "bias", &Struct::bias);
  field<std::tuple<int64_t, uint32_t, float>>(type, "dropout", &Struct::dropout);
  field<int>(type, "dtype", &Struct::dtype);
  type.def_readwrite("softmax_scale", &Struct::softmax_scale);
  type.def_readwrite("tf32", &Struct::tf32);
}

inline void forward(const Forward& p, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::forward(p, at(stream));
}

inline void weights(const Weights& p, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::weights(p, at(stream));
}

// dbias: its address, 0 for none, and its batch and heads. is_short: by the kernel of short sequences, which writes
// dbias itself unless batches or heads share it; then p.delta is given, for the kernel that adds it up.
inline void backward(const Backward& p, int64_t dbias, int batch, int heads, bool is_short, int device,
                     int64_t stream_) {
  const DeviceGuard guard(device);
  CUstream_st* const stream = at(stream_);
  if (is_short) {
    short_backward(p, at(p.delta == nullptr ? dbias : 0), stream);
  } else {
    backward_dq(p, stream);
    backward_dkdv(p, stream);
  }
  if (dbias != 0 && p.delta != nullptr) bias_gradient(p, at(dbias), batch, heads, stream);
}

// next_item: the address of an int of scratch.
inline void forward_sm90(const Forward& p, int64_t next_item, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::forward_sm90(p, at(next_item), at(stream));
}

// shift, delta: the addresses of PaddedRows. sum: of dq's float32 sum, or 0 for a kernel that owns dq. dbias: its
// address, 0 for none, and its batch and heads.
inline void backward_sm90(const Backward& p, int64_t shift, int64_t delta, int64_t sum, int64_t dbias, int batch,
                          int heads, int device, int64_t stream_) {
  const DeviceGuard guard(device);
  CUstream_st* const stream = at(stream_);
  const PaddedRows rows{at(shift), at(delta)};
  backward_rows_sm90(p, rows, stream);
  if (sum != 0) {
    backward_sum_sm90(p, rows, at(sum), stream);
    backward_round_sm90(p, at(sum), stream);
  } else {
    backward_dq_sm90(p, rows, stream);
    backward_dkdv_sm90(p, rows, stream);
  }
  if (dbias != 0) bias_gradient_sm90(p, rows, at(dbias), batch, heads, stream);
}

// (rows, columns) of the tiles of the forward, of backward_dq and of backward_dkdv.
inline std::array<int, 6> tiles(int head_dim, int dtype) {
  const TileSize forward = forward_tile(head_dim, DType(dtype)), backward = backward_tile(head_dim, DType(dtype));
  return {forward.rows, forward.columns, backward.rows, backward.columns, backward.rows, backward.columns};
}

inline std::array<int, 6> tiles_sm90(int head_dim) {
  const TileSize forward = forward_sm90_tile(head_dim);
  const TileSize dq = backward_dq_sm90_tile(head_dim), dkdv = backward_dkdv_sm90_tile(head_dim);
  return {forward.rows, forward.columns, dq.rows, dq.columns, dkdv.rows, dkdv.columns};
}

inline bool has_short_backward(int head_dim, int dtype, int device) {
  return attention::has_short_backward(head_dim, DType(dtype), device);
}

// Local to the module: a process may load several builds, as tests do.
inline void bind(pybind11::module_& m) {
  const pybind11::module_local local;
  pybind11::class_<Mask>(m, "AttentionMask", local)
      .def(pybind11::init([](int band_lo, int band_hi, int64_t intervals, int64_t intervals_stride_b, int64_t columns,
                             int64_t columns_stride_b, int64_t bits, int64_t bits_stride_b, int64_t bits_stride_h,
                             int64_t bits_stride_row, int64_t counts, int64_t tiles, int max_tiles,
                             int64_t lists_stride_b, int64_t lists_stride_h) {
        return Mask{band_lo,          band_hi,   at(intervals), intervals_stride_b, at(columns),
                    columns_stride_b, at(bits),  bits_stride_b, bits_stride_h,      bits_stride_row,
                    at(counts),       at(tiles), max_tiles,     lists_stride_b,     lists_stride_h};
      }));

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

  m.attr("ATTENTION_MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("ATTENTION_MAX_SHORT") = kMaxShort;
  m.attr("ATTENTION_ROW_BLOCK") = kRowBlock;
  m.attr("ATTENTION_MAX_HEAD_DIM_SUM") = kMaxHeadDimSum;
  m.def("attention_forward", forward);
  m.def("attention_forward_sm90", forward_sm90);
  m.def("attention_tiles", tiles);
  m.def("attention_tiles_sm90", tiles_sm90);
  m.def("attention_backward", backward);
  m.def("attention_backward_sm90", backward_sm90);
  m.def("attention_has_short_backward", has_short_backward);
  m.def("attention_weights", weights);
}

}  // namespace fastattn::attention::bindings
