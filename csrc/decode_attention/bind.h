// Python's view of decode_attention: fastattn/backends/cuda/decode_attention.py.
#pragma once
#include "common/bind.h"
#include "decode_attention/decode_attention.h"

namespace fastattn::decode_attention::bindings {

inline Cached cached(const Tensor& t, int64_t head_dim) {
  const auto [b, m, r, h] = t.strides<4>();
  return {t, b, m, r, h, static_cast<int>(head_dim)};
}

// work: (splits, the size of out and one number for each of its rows) float32, None with one split.
inline void forward(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor ancestors, Tensor bias, Tensor out,
                    Tensor work, int splits, float softmax_scale, float softcap) {
  const Stream stream(q);
  const auto [batch, queries, heads, head_dim_k] = q.sizes<4>();
  const auto [_, positions, rows, key_heads, head_dim_v] = v.sizes<5>();
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  Decode p{};
  p.q = q, p.k = cached(k, head_dim_k), p.v = cached(v, head_dim_v), p.lengths = lengths, p.out = out;
  const auto [q_b, q_w, q_h] = q.strides<3>();
  p.q_stride_b = q_b, p.q_stride_w = q_w, p.q_stride_h = q_h;
  if (ancestors) {
    const auto [b, w, m] = ancestors.strides<3>();
    p.ancestors = ancestors, p.ancestors_stride_b = b, p.ancestors_stride_w = w, p.ancestors_stride_m = m;
  }
  if (bias) {
    const auto [h, m] = bias.broadcast_strides<2>();
    p.bias = bias, p.bias_stride_h = h, p.bias_stride_m = m;
  }
  if (work) p.partial = work, p.lse = p.partial + splits * batch * queries * heads * head_dim_v;
  p.batch = narrow(batch), p.queries = narrow(queries), p.heads = narrow(heads), p.key_heads = narrow(key_heads);
  p.positions = narrow(positions), p.rows = narrow(rows), p.splits = splits;
  p.softmax_scale = softmax_scale, p.softcap = softcap, p.dtype = q.dtype();
  decode_attention::decode_attention(p, stream);
}

inline int splits(int batch, int queries, int heads, int key_heads, int positions, bool shared_keys, int device) {
  return decode_splits(batch, queries, heads, key_heads, positions, shared_keys,
                       device_attribute(cudaDevAttrMultiProcessorCount, device));
}

inline void bind(pybind11::module_& m) {
  m.attr("DECODE_MAX_HEAD_DIM") = kMaxHeadDim;
  m.def("decode_attention_fwd", forward);
  m.def("decode_attention_splits", splits);
}

}  // namespace fastattn::decode_attention::bindings
