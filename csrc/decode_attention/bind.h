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
inline void forward(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor ancestors, Tensor out, Tensor work, int splits,
                    float softmax_scale) {
  const Stream stream(q);
  const auto [batch, queries, heads, head_dim_k] = q.sizes<4>();
  const auto [_, positions, rows, key_heads, head_dim_v] = v.sizes<5>();
  const auto [q_b, q_w, q_h] = q.strides<3>();
  const auto [a_b, a_w, a_m] = ancestors ? ancestors.strides<3>() : std::array<int64_t, 3>{};
  float* const partial = work;
  float* const lse = partial == nullptr ? nullptr : partial + splits * batch * queries * heads * head_dim_v;
  const auto narrow = [](int64_t size) { return static_cast<int>(size); };
  const Decode p{q,
                 q_b,
                 q_w,
                 q_h,
                 cached(k, head_dim_k),
                 cached(v, head_dim_v),
                 lengths,
                 ancestors,
                 a_b,
                 a_w,
                 a_m,
                 out,
                 partial,
                 lse,
                 narrow(batch),
                 narrow(queries),
                 narrow(heads),
                 narrow(key_heads),
                 narrow(positions),
                 narrow(rows),
                 splits,
                 softmax_scale,
                 q.dtype()};
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
