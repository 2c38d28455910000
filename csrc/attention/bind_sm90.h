// Python's view of attention on Hopper: fastattn/cuda/_attention_sm90.py.   Conventions: arguments.h
#pragma once
#include "attention/arguments.h"
#include "attention/backward_sm90.h"
#include "attention/forward_sm90.h"

namespace fastattn::attention::bindings_sm90 {

// Each tensor as (address, its strides but the last, which is 1); dropout as (rng_state, threshold, scale).
inline void forward(const Integers<4>& q, const Integers<4>& k, const Integers<4>& v, const Integers<4>& out, int64_t lse,
                    const std::array<int, 7>& sizes, float softmax_scale, const Who& who, const Integers<6>& added,
                    int64_t rng_state, uint32_t threshold, float scale, int dtype, int64_t next_work, int device,
                    int64_t stream) {
  const DeviceGuard guard(device);
  forward_sm90({rows(q), rows(k), rows(v), rows(out), pointer<float>(lse), shape(sizes), softmax_scale, visibility(who),
                bias(added), dropout(rng_state, threshold, scale), DType(dtype), false},
               pointer<int>(next_work), pointer<CUstream_st>(stream));
}

// matrices: q, k, v, out, dout, dq, dk, dv; vectors: lse, dlse, delta, remainder, dbias_keys; padded: those of PaddedRows;
// sum: dq's, or null; dbias: (address or null, its batch, its heads)
inline void backward(const std::array<Integers<4>, 8>& matrices, const Integers<5>& vectors, const Integers<3>& padded,
                     int64_t sum, const std::array<int, 7>& sizes, float softmax_scale, float coarse_from,
                     const Who& by_query, const Who& by_key, const Integers<6>& added,
                     const Integers<3>& dbias, int64_t rng_state, uint32_t threshold, float scale, int dtype, int device,
                     int64_t stream_) {
  const DeviceGuard guard(device);
  const auto stream = pointer<CUstream_st>(stream_);
  const auto& m = matrices;
  const Backward p{rows(m[0]), rows(m[1]), rows(m[2]), rows(m[3]), rows(m[4]), rows(m[5]), rows(m[6]), rows(m[7]),
                   pointer<float>(vectors[0]), pointer<float>(vectors[1]), pointer<float>(vectors[2]),
                   pointer<float>(vectors[3]), pointer<float>(vectors[4]), shape(sizes), softmax_scale, coarse_from,
                   visibility(by_query), visibility(by_key), bias(added), dropout(rng_state, threshold, scale), DType(dtype),
                   false};
  const PaddedRows of_rows{pointer<float>(padded[0]), pointer<float>(padded[1]), pointer<float>(padded[2])};
  if (p.remainder != nullptr) backward_rows(p, stream);
  backward_rows_sm90(p, of_rows, stream);
  if (sum != 0) {
    backward_sum_sm90(p, of_rows, pointer<float>(sum), stream);
    backward_round_sm90(p, pointer<float>(sum), stream);
  } else {
    backward_dq_sm90(p, of_rows, stream);
    backward_dkdv_sm90(p, of_rows, stream);
  }
  if (dbias[0] != 0)
    bias_gradient_sm90(p, of_rows, pointer<void>(dbias[0]), static_cast<int>(dbias[1]), static_cast<int>(dbias[2]), stream);
}

inline std::array<int, 2> forward_tile(int head_dim) {
  const TileSize size = forward_sm90_tile(head_dim);
  return {size.block_m, size.block_n};
}

// (own, stream) of backward_dq_sm90 and of backward_dkdv_sm90
inline std::array<int, 4> backward_tiles(int head_dim) {
  const BackwardTile dq = backward_dq_sm90_tile(head_dim), dkdv = backward_dkdv_sm90_tile(head_dim);
  return {dq.own, dq.stream, dkdv.own, dkdv.stream};
}

inline void bind(pybind11::module_& m) {
  m.def("attention_fwd_sm90", forward);
  m.def("attention_fwd_sm90_tile", forward_tile);
  m.def("attention_bwd_sm90", backward);
  m.def("attention_bwd_sm90_tiles", backward_tiles);
}

}  // namespace fastattn::attention::bindings_sm90
