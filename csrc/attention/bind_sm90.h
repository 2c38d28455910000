// Python's view of attention on Hopper: fastattn/backends/cuda/_attention_sm90.py.   Conventions: arguments.h
#pragma once
#include "attention/bind.h"
#include "attention/backward_sm90.h"
#include "attention/forward_sm90.h"

namespace fastattn::attention::bindings_sm90 {

// next_item: the address of an int of scratch.
inline void forward(const Forward& p, int64_t next_item, int device, int64_t stream) {
  const DeviceGuard guard(device);
  forward_sm90(p, pointer<int>(next_item), pointer<CUstream_st>(stream));
}

// shift, delta: the addresses of PaddedRows. sum: of dq's float32 sum, or 0 for a kernel that owns dq. dbias: its address, 0
// for none, and its batch and heads.
inline void backward(const Backward& p, int64_t shift, int64_t delta, int64_t sum, int64_t dbias, int batch, int heads,
                     int device, int64_t stream_) {
  const DeviceGuard guard(device);
  const auto stream = pointer<CUstream_st>(stream_);
  const PaddedRows rows{pointer<float>(shift), pointer<float>(delta)};
  backward_rows_sm90(p, rows, stream);
  if (sum != 0) {
    backward_sum_sm90(p, rows, pointer<float>(sum), stream);
    backward_round_sm90(p, pointer<float>(sum), stream);
  } else {
    backward_dq_sm90(p, rows, stream);
    backward_dkdv_sm90(p, rows, stream);
  }
  if (dbias != 0) bias_gradient_sm90(p, rows, pointer<void>(dbias), batch, heads, stream);
}

// (own, stream) of the forward, of backward_dq_sm90 and of backward_dkdv_sm90.
inline std::array<int, 6> tiles(int head_dim) {
  const TileSize forward = forward_sm90_tile(head_dim);
  const TileSize dq = backward_dq_sm90_tile(head_dim), dkdv = backward_dkdv_sm90_tile(head_dim);
  return {forward.own, forward.stream, dq.own, dq.stream, dkdv.own, dkdv.stream};
}

inline void bind(pybind11::module_& m) {
  m.def("attention_forward_sm90", forward);
  m.def("attention_tiles_sm90", tiles);
  m.def("attention_backward_sm90", backward);
}

}  // namespace fastattn::attention::bindings_sm90
