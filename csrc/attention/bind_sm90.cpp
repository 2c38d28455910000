// Python's view of attention on Hopper: fastattn/cuda/_attention_sm90.py.   Conventions: bind.h
#include "attention/backward_sm90.h"
#include "attention/bind.h"
#include "attention/forward_sm90.h"

namespace fastattn {
namespace {

namespace py = pybind11;
using namespace attention;

// Each tensor as (address, its strides but the last, which is 1); dropout as (rng_state, threshold, scale).
void bind_forward(const Integers<4>& q, const Integers<4>& k, const Integers<4>& v, const Integers<4>& out, int64_t lse,
                  const std::array<int, 7>& sizes, float softmax_scale, const Integers<13>& who, const Integers<6>& added,
                  int64_t rng_state, uint32_t threshold, float scale, int dtype, int64_t next_work, int device,
                  int64_t stream) {
  const DeviceGuard guard(device);
  forward_sm90({rows(q), rows(k), rows(v), rows(out), pointer<float>(lse), shape(sizes), softmax_scale, visibility(who),
                bias(added), dropout(rng_state, threshold, scale), DType(dtype), false},
               pointer<int>(next_work), pointer<CUstream_st>(stream));
}

// matrices: q, k, v, out, dout, dq, dk, dv; vectors: lse, dlse; scratch: dq, shift, delta
void bind_backward(const std::array<Integers<4>, 8>& matrices, const Integers<2>& vectors, const Integers<3>& scratch,
                   const std::array<int, 7>& sizes, float softmax_scale, const Integers<13>& by_key, int64_t rng_state,
                   uint32_t threshold, float scale, int dtype, int device, int64_t stream) {
  const DeviceGuard guard(device);
  Backward p{};
  Rows* const targets[8] = {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < 8; i++) *targets[i] = rows(matrices[i]);
  p.lse = pointer<float>(vectors[0]), p.dlse = pointer<float>(vectors[1]);
  p.shape = shape(sizes), p.softmax_scale = softmax_scale, p.by_key = visibility(by_key);
  p.dropout = dropout(rng_state, threshold, scale), p.dtype = DType(dtype);
  backward_sm90(p, {pointer<float>(scratch[0]), pointer<float>(scratch[1]), pointer<float>(scratch[2])},
                pointer<CUstream_st>(stream));
}

std::array<int, 2> bind_forward_tile(int head_dim) {
  const TileSize size = forward_sm90_tile(head_dim);
  return {size.block_m, size.block_n};
}

std::array<int, 2> bind_backward_tile(int head_dim) {
  const BackwardTile tile = backward_sm90_tile(head_dim);
  return {tile.own, tile.stream};
}

}  // namespace

void bind_attention_sm90(py::module_& m) {
  m.def("attention_fwd_sm90", bind_forward);
  m.def("attention_fwd_sm90_tile", bind_forward_tile);
  m.def("attention_bwd_sm90", bind_backward);
  m.def("attention_bwd_sm90_tile", bind_backward_tile);
}

}  // namespace fastattn
