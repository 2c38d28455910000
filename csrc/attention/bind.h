// Python's view of attention.   Conventions: arguments.h
#pragma once
#include "attention/arguments.h"
#include "attention/backward.h"
#include "attention/prepare.h"
#include "attention/short_backward.h"

namespace fastattn::attention::bindings {

inline BitMatrix bit_matrix(const Integers<4>& t) {
  return {pointer<uint32_t>(t[0]), static_cast<int>(t[1]), static_cast<int>(t[2]), static_cast<int>(t[3])};
}

// sizes: (batch, rows, columns, sequences); bounds: low, high, from the start and from the end; offsets: of rows, of
// columns; padding: (address, its stride)
inline void make_spans(int64_t spans, const std::array<int, 4>& sizes, const Integers<4>& bounds, const Integers<2>& offsets,
                       const Integers<2>& padding, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::make_spans({pointer<int2>(spans), sizes[0], sizes[1], sizes[2], bounds[0], bounds[1], bounds[2], bounds[3],
                         pointer<int32_t>(offsets[0]), pointer<int32_t>(offsets[1]), sizes[3], pointer<bool>(padding[0]),
                         padding[1]},
                        pointer<CUstream_st>(stream));
}

// mask: (spans, stride, key_padding, stride, attn_mask, its strides)
inline void pack_bits(const Integers<9>& mask, int heads, const Integers<4>& bits, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::pack_bits({pointer<int2>(mask[0]), mask[1], pointer<bool>(mask[2]), mask[3], pointer<bool>(mask[4]), mask[5],
                        mask[6], mask[7], mask[8]},
                       heads, bit_matrix(bits), pointer<CUstream_st>(stream));
}

inline void transpose_bits(const Integers<4>& bits, int64_t transposed, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::transpose_bits(bit_matrix(bits), pointer<uint32_t>(transposed), pointer<CUstream_st>(stream));
}

// sizes: (batch, heads, seqlen_q, seqlen_k) of classes
inline void classify_tiles(int64_t classes, const std::array<int, 4>& sizes, int block_m, int block_n, const Who& who,
                           int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::classify_tiles({pointer<uint8_t>(classes), sizes[0], sizes[1], sizes[2], sizes[3], block_m, block_n,
                             visibility(who)},
                            pointer<CUstream_st>(stream));
}

inline void list_tiles(int64_t classes, int matrices, int row_tiles, int column_tiles, bool by_key, int64_t counts,
                       int64_t tiles, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::list_tiles(pointer<uint8_t>(classes), matrices, row_tiles, column_tiles, by_key, pointer<int2>(counts),
                        pointer<int32_t>(tiles), pointer<CUstream_st>(stream));
}

// sizes: (batch, heads, seqlen_q, seqlen_k) of seen; band: (band_lo, band_hi); what follows as (address, its strides)
inline void seen_keys(int64_t seen, const std::array<int, 4>& sizes, const std::array<int, 2>& band, const Integers<2>& spans,
                      const Integers<3>& bits, const Integers<2>& queries, const Integers<2>& padding,
                      const Integers<6>& added, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::seen_keys({pointer<uint32_t>(seen), sizes[0], sizes[1], sizes[2], sizes[3], band[0], band[1],
                        pointer<int2>(spans[0]), spans[1], pointer<uint32_t>(bits[0]), bits[1], bits[2],
                        pointer<uint32_t>(queries[0]), queries[1], pointer<bool>(padding[0]), padding[1], bias(added)},
                       pointer<CUstream_st>(stream));
}

// Each tensor as (address, its strides but the last, which is 1); dropout as (rng_state, threshold, scale).
inline void forward(const Integers<4>& q, const Integers<4>& k, const Integers<4>& v, const Integers<4>& out, int64_t lse,
                    const std::array<int, 7>& sizes, float softmax_scale, const Who& who, const Integers<6>& added,
                    int64_t rng_state, uint32_t threshold, float scale, int dtype, bool tf32, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::forward({rows(q), rows(k), rows(v), rows(out), pointer<float>(lse), shape(sizes), softmax_scale, visibility(who),
                      bias(added), dropout(rng_state, threshold, scale), DType(dtype), tf32},
                     pointer<CUstream_st>(stream));
}

inline std::array<int, 2> forward_tile(const std::array<int, 7>& sizes, int dtype) {
  const TileSize size = attention::forward_tile(shape(sizes), DType(dtype));
  return {size.block_m, size.block_n};
}

// out: (address, its stride along the batch); heads: (first, step, count)
inline void weights(const Integers<4>& q, const Integers<4>& k, int64_t lse, int64_t totals, const Integers<2>& out,
                    const std::array<int, 3>& heads, bool mean, const std::array<int, 7>& sizes, float softmax_scale,
                    const Who& who, const Integers<6>& added, int64_t rng_state, uint32_t threshold, float scale,
                    int dtype, bool tf32, int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::weights({rows(q), rows(k), pointer<float>(lse), pointer<float>(totals), pointer<void>(out[0]), out[1], heads[0],
                      heads[1], heads[2], mean, shape(sizes), softmax_scale, visibility(who), bias(added),
                      dropout(rng_state, threshold, scale), DType(dtype), tf32},
                     pointer<CUstream_st>(stream));
}

inline void alignment(const Integers<4>& q, const Integers<4>& k, int64_t keys, const std::array<int, 7>& sizes,
                      float softmax_scale, const Who& who, const Integers<6>& added, int dtype, bool tf32,
                      int device, int64_t stream) {
  const DeviceGuard guard(device);
  attention::alignment({rows(q), rows(k), pointer<int64_t>(keys), shape(sizes), softmax_scale, visibility(who), bias(added),
                        DType(dtype), tf32},
                       pointer<CUstream_st>(stream));
}

// matrices: q, k, v, out, dout, dq, dk, dv; rows: lse, dlse, delta, remainder, dbias_keys; dbias: (address, batch, heads)
inline void backward(const std::array<Integers<4>, 8>& matrices, const Integers<5>& vectors, const std::array<int, 7>& sizes,
                     float softmax_scale, float coarse_from, const Who& by_query, const Who& by_key,
                     const Integers<6>& added, const Integers<3>& dbias, int64_t rng_state, uint32_t threshold, float scale,
                     int dtype, bool tf32, int device, int64_t stream_) {
  const DeviceGuard guard(device);
  const auto stream = pointer<CUstream_st>(stream_);
  const auto& m = matrices;
  const Backward p{rows(m[0]), rows(m[1]), rows(m[2]), rows(m[3]), rows(m[4]), rows(m[5]), rows(m[6]), rows(m[7]),
                   pointer<float>(vectors[0]), pointer<float>(vectors[1]), pointer<float>(vectors[2]),
                   pointer<float>(vectors[3]), pointer<float>(vectors[4]), shape(sizes), softmax_scale, coarse_from,
                   visibility(by_query), visibility(by_key), bias(added), dropout(rng_state, threshold, scale), DType(dtype),
                   tf32};
  if (p.remainder != nullptr) backward_rows(p, stream);
  backward_dq(p, stream);
  backward_dkdv(p, stream);
  if (dbias[0] != 0) bias_gradient(p, pointer<void>(dbias[0]), static_cast<int>(dbias[1]), static_cast<int>(dbias[2]), stream);
}

inline bool is_short(const std::array<int, 7>& sizes) { return attention::is_short(shape(sizes)); }

inline int64_t short_backward_sums(const std::array<int, 7>& sizes, int dtype, int device) {
  return attention::short_backward_sums(shape(sizes), DType(dtype), device);
}

// matrices: q, k, v, dout, dq, dk, dv; vectors: lse, dlse, of a dbias that is a sum delta and remainder, dbias_keys, and
// memory for sums; dbias: (address, batch, heads)
inline void short_backward(const std::array<Integers<4>, 7>& matrices, const Integers<6>& vectors,
                           const Integers<3>& dbias, const std::array<int, 7>& sizes, float softmax_scale, const Who& who,
                           const Integers<6>& added, int64_t rng_state, uint32_t threshold, float scale, int dtype,
                           bool tf32, int device, int64_t stream) {
  const DeviceGuard guard(device);
  Backward p{};
  Rows* const targets[7] = {&p.q, &p.k, &p.v, &p.dout, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < 7; i++) *targets[i] = rows(matrices[i]);
  p.lse = pointer<float>(vectors[0]), p.dlse = pointer<float>(vectors[1]);
  p.delta = pointer<float>(vectors[2]), p.remainder = pointer<float>(vectors[3]), p.dbias_keys = pointer<float>(vectors[4]);
  p.shape = shape(sizes), p.softmax_scale = softmax_scale, p.by_query = visibility(who), p.bias = bias(added);
  p.dropout = dropout(rng_state, threshold, scale), p.dtype = DType(dtype), p.tf32 = tf32;
  void* const gradient = pointer<void>(dbias[0]);
  attention::short_backward(p, p.delta == nullptr ? gradient : nullptr, pointer<float>(vectors[5]), device,
                            pointer<CUstream_st>(stream));
  if (p.delta != nullptr)
    bias_gradient(p, gradient, static_cast<int>(dbias[1]), static_cast<int>(dbias[2]), pointer<CUstream_st>(stream));
}

inline std::array<int, 2> backward_tile(const std::array<int, 7>& sizes, int dtype) {
  const BackwardTile tile = attention::backward_tile(shape(sizes), DType(dtype));
  return {tile.own, tile.stream};
}

inline void bind(pybind11::module_& m) {
  m.def("attention_make_spans", make_spans);
  m.def("attention_pack_bits", pack_bits);
  m.def("attention_transpose_bits", transpose_bits);
  m.def("attention_classify_tiles", classify_tiles);
  m.def("attention_list_tiles", list_tiles);
  m.def("attention_seen_keys", seen_keys);
  m.def("attention_bwd", backward);
  m.def("attention_bwd_tile", backward_tile);
  m.def("attention_is_short", is_short);
  m.def("attention_bwd_short_sums", short_backward_sums);
  m.def("attention_bwd_short", short_backward);
  m.def("attention_fwd", forward);
  m.def("attention_fwd_tile", forward_tile);
  m.def("attention_weights", weights);
  m.def("attention_alignment", alignment);
}

}  // namespace fastattn::attention::bindings
