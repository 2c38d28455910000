// Python's view of decode_attention: fastattn/backends/cuda/decode_attention.py.
#pragma once
#include "common/bind.h"
#include "decode_attention/decode_attention.h"

namespace fastattn::decode_attention::bindings {

// at, its four strides in elements, head_dim
using CachedArguments = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int64_t, int>;

inline Cached cached(const CachedArguments& t) {
  return {at(std::get<0>(t)), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t), std::get<5>(t)};
}

inline void forward(uintptr_t q, std::tuple<int64_t, int64_t, int64_t> q_strides, const CachedArguments& k,
                    const CachedArguments& v, uintptr_t lengths, uintptr_t ancestors,
                    std::tuple<int64_t, int64_t, int64_t> ancestors_strides, uintptr_t out, uintptr_t partial,
                    uintptr_t lse, int batch, int queries, int heads, int key_heads, int positions, int rows,
                    int splits, float softmax_scale, int dtype, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const auto [q_b, q_w, q_h] = q_strides;
  const auto [a_b, a_w, a_m] = ancestors_strides;
  const Decode p{at(q), q_b,       q_w,       q_h,     cached(k),   cached(v),     at(lengths), at(ancestors),
                 a_b,   a_w,       a_m,       at(out), at(partial), at(lse),       batch,       queries,
                 heads, key_heads, positions, rows,    splits,      softmax_scale, DType(dtype)};
  decode_attention::decode_attention(p, at(stream));
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
