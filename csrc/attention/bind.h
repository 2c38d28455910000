// Python's view of attention: fastattn/backends/cuda/attention.py.
#pragma once
#include "attention/backward_sm90.h"
#include "attention/forward_sm90.h"
#include "common/bind.h"

namespace fastattn::attention::bindings {

// What computes a direction: SM80 and SM90 of fastattn/backends/cuda/attention.py.
enum class Kernels : int { sm80 = 80, sm90 = 90 };

using Sizes = std::array<int64_t, 4>;  // B, H, L, D

// A tensor (B, H, L, D) as these kernels can read or write it. Hopper's TMA needs rows, heads and samples that start at
// multiples of 16 bytes, none of them expanded.
class Matrix {
 public:
  Matrix(const Tensor& t, const Sizes& sizes) : sizes(sizes), strides_(t.strides<4>()), data_(t) {}

  // An input: matrix_of(t), or that of a copy, kept as long as this: the launch comes before another tensor of the
  // stream can get its memory. A result is not copied, but checked().
  template <class MatrixOf>
  static Matrix to_read(const Tensor& t, Kernels kernels, MatrixOf matrix_of) {
    const Matrix given = matrix_of(t);
    if (given.suits(kernels)) return given;
    pybind11::object owner;
    Matrix copy = matrix_of(t.contiguous_copy(owner));
    copy.owner_ = owner;
    return copy;
  }
  static Matrix to_read(const Tensor& t, const Sizes& sizes, Kernels kernels) {
    return to_read(t, kernels, [&](const Tensor& from) { return Matrix(from, sizes); });
  }

  // Heads side by side in rows, from element `first` of a row on.
  static Matrix in_rows(void* rows, DType dtype, const Sizes& sizes, int64_t stride_b, int64_t stride, int64_t first) {
    const int64_t bytes = dtype == DType::float32 ? 4 : 2;
    return {sizes, {stride_b, sizes[3], stride, 1}, static_cast<char*>(rows) + first * bytes};
  }

  // The heads that a tensor (B, L, rows) holds.
  static Matrix in_memory(const Tensor& t, int64_t heads, int64_t dim) {
    const auto [batch, length] = t.sizes<2>();
    const auto [stride_b, stride, stride_column] = t.strides<3>();
    return {{batch, heads, length, dim}, {stride_b, dim * stride_column, stride, stride_column}, t};
  }

  const Matrix& checked(Kernels kernels) const {
    if (!suits(kernels)) throw std::invalid_argument("fastattn: the kernel cannot read or write in these strides");
    return *this;
  }

  operator StridedMatrix() const { return {data_, strides_[0], strides_[1], strides_[2]}; }

  Sizes sizes;

 private:
  Matrix(const Sizes& sizes, const std::array<int64_t, 4>& strides, void* data)
      : sizes(sizes), strides_(strides), data_(data) {}

  bool suits(Kernels kernels) const {
    if (strides_[3] != 1) return false;
    if (kernels != Kernels::sm90) return true;
    const int64_t elements = 8;  // of 16 bits in 16 bytes
    for (int i = 0; i < 3; i++)
      if (sizes[i] > 1 && (strides_[i] <= 0 || strides_[i] % elements != 0)) return false;
    return reinterpret_cast<uintptr_t>(data_) % 16 == 0;
  }

  std::array<int64_t, 4> strides_;
  void* data_;
  pybind11::object owner_;
};

// Of PreparedMask, a tuple (fastattn/masks/kernel_format.py), or None.
inline Mask mask(pybind11::handle prepared) {
  if (prepared.is_none()) return {};
  if (PyTuple_Size(prepared.ptr()) != 8) throw std::invalid_argument("fastattn: PreparedMask has other fields");
  const auto number = [&](int i) { return static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(prepared.ptr(), i))); };
  const auto tensor = [&](int i) { return Tensor(PyTuple_GET_ITEM(prepared.ptr(), i)); };
  const Tensor intervals = tensor(2), columns = tensor(3), bits = tensor(4), counts = tensor(5), tiles = tensor(6);
  Mask p{};
  p.band_lo = number(0), p.band_hi = number(1);
  if (intervals) p.intervals = intervals, p.intervals_stride_b = intervals.broadcast_strides<1>()[0] / 2;
  if (columns) {
    p.bits = p.columns = columns;
    p.bits_stride_b = p.columns_stride_b = columns.broadcast_strides<1>()[0];
  }
  if (bits) {
    const auto [b, h, row] = bits.broadcast_strides<3>();
    p.bits = bits, p.bits_stride_b = b, p.bits_stride_h = h, p.bits_stride_row = row;
  }
  if (tiles) {
    const auto [b, h] = counts.broadcast_strides<2>();
    p.counts = counts, p.tiles = tiles, p.max_tiles = static_cast<int>(tiles.sizes<4>()[3]);
    p.lists_stride_b = b / 2, p.lists_stride_h = h / 2;  // in pairs
  }
  return p;
}

// A bias (B or 1, H or 1, Lq or 1, Lk or 1); or one by distance, (H or 1, R), whose column `zero` is distance 0.
inline Bias bias_of(const Tensor& bias, int zero, int seqlen_k) {
  char* const data = bias;
  const bool is_float = bias.dtype() == DType::float32;
  if (bias.dimensions() == 2) {
    const auto [h, n] = bias.broadcast_strides<2>();
    const int last = static_cast<int>(bias.sizes<2>()[1]) - 1 - zero;
    return {data + zero * n * (is_float ? 4 : 2), 0, h, -n, n, bias.dtype(), false, true, -zero, last};
  }
  const auto [b, h, m, n] = bias.broadcast_strides<4>();
  const bool is_even = (b | h | m | seqlen_k) % 2 == 0;
  const bool in_pairs = n == 1 && is_even && reinterpret_cast<uintptr_t>(data) % (is_float ? 8 : 4) == 0;
  return {data, b, h, m, n, bias.dtype(), in_pairs, false, -kAnyDistance, kAnyDistance};
}

// The fields that Forward, Backward and Weights share. v only gives its head dimension.
template <class Params>
Params common(const Matrix& q, const Matrix& k, const Matrix& v, DType dtype, const Tensor& lse, const Tensor& bias,
              int bias_zero, float softmax_scale, float softcap, double dropout_p, const Tensor& rng_state, bool tf32) {
  const auto size = [](const Matrix& of, int i) { return static_cast<int>(of.sizes[i]); };
  Params p{};
  p.q = q, p.k = k, p.lse = lse;
  p.shape = {size(q, 0), size(q, 1), size(k, 1), size(q, 2), size(k, 2), size(q, 3), size(v, 3)};
  if (bias) p.bias = bias_of(bias, bias_zero, p.shape.seqlen_k);
  if (rng_state) p.dropout = dropout(rng_state, dropout_p);
  p.dtype = dtype, p.softmax_scale = softmax_scale, p.softcap = softcap, p.tf32 = tf32;
  return p;
}

struct Heads {
  Matrix q, k, v;

  Sizes like_out() const { return {q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]}; }
};

inline Heads heads_to_read(const Tensor& q, const Tensor& k, const Tensor& v, Kernels kernels) {
  return {Matrix::to_read(q, q.sizes<4>(), kernels), Matrix::to_read(k, k.sizes<4>(), kernels),
          Matrix::to_read(v, v.sizes<4>(), kernels)};
}

// fastattn/backends/attention_rows.py: Python's sizes (B, L, n_head, n_head_kv, d_k, d_v), and what is in rows.
struct Rows {
  Rows(pybind11::handle sizes, DType dtype, Kernels kernels) : dtype(dtype), kernels(kernels) {
    if (PyTuple_Size(sizes.ptr()) != 6) throw std::invalid_argument("fastattn: attention of rows has six sizes");
    int64_t* const numbers[] = {&batch, &length, &heads, &heads_kv, &dim_k, &dim_v};
    for (int i = 0; i < 6; i++) *numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
  }

  // k, v: the memory, or None.
  Heads to_read(const Tensor& projected, const Tensor& k, const Tensor& v) const {
    return of(projected, k, v, [&](const Tensor& t, int64_t dim) {
      return Matrix::to_read(t, kernels, [&](const Tensor& from) { return Matrix::in_memory(from, heads_kv, dim); });
    });
  }
  Heads to_write(const Tensor& projected, const Tensor& k, const Tensor& v) const {
    return of(projected, k, v, [&](const Tensor& t, int64_t dim) { return Matrix::in_memory(t, heads_kv, dim); });
  }

  Matrix out(const Tensor& rows) const { return own(rows, heads, dim_v, heads * dim_v, 0); }

 private:
  template <class OfMemory>
  Heads of(const Tensor& projected, const Tensor& k, const Tensor& v, OfMemory of_memory) const {
    const int64_t width = heads * dim_k + (k ? 0 : heads_kv * (dim_k + dim_v));
    const Matrix q = own(projected, heads, dim_k, width, 0);
    if (k) return {q, of_memory(k, dim_k), of_memory(v, dim_v)};
    return {q, own(projected, heads_kv, dim_k, width, heads * dim_k),
            own(projected, heads_kv, dim_v, width, (heads + heads_kv) * dim_k)};
  }

  Matrix own(const Tensor& rows, int64_t count, int64_t dim, int64_t width, int64_t first) const {
    return Matrix::in_rows(rows, dtype, {batch, count, length, dim}, length * width, width, first).checked(kernels);
  }

  DType dtype;
  Kernels kernels;
  int64_t batch, length, heads, heads_kv, dim_k, dim_v;
};

// tile_rows_sm90: of the tile of Hopper's kernel; 0: the other kernel. next_item: an int32 of scratch for Hopper's.
inline Kernels forward_kernels(int tile_rows_sm90) { return tile_rows_sm90 > 0 ? Kernels::sm90 : Kernels::sm80; }

inline void launch_forward(const Heads& in, const Matrix& out, DType dtype, const Tensor& bias, int bias_zero,
                           pybind11::handle prepared_mask, const Tensor& lse, int tile_rows_sm90,
                           const Tensor& next_item, float softmax_scale, float softcap, double dropout_p,
                           const Tensor& rng_state, bool tf32, const Stream& stream) {
  auto p = common<Forward>(in.q, in.k, in.v, dtype, lse, bias, bias_zero, softmax_scale, softcap, dropout_p, rng_state,
                           tf32);
  p.v = in.v, p.out = out.checked(forward_kernels(tile_rows_sm90)), p.mask = mask(prepared_mask);
  if (tile_rows_sm90 > 0)
    forward_sm90(p, tile_rows_sm90, next_item, stream);
  else
    attention::forward(p, stream);
}

inline void forward(Tensor q, Tensor k, Tensor v, Tensor bias, int bias_zero, pybind11::handle prepared_mask,
                    Tensor out, Tensor lse, int tile_rows_sm90, Tensor next_item, float softmax_scale, float softcap,
                    double dropout_p, Tensor rng_state, bool tf32) {
  const Stream stream(q);
  const Heads in = heads_to_read(q, k, v, forward_kernels(tile_rows_sm90));
  launch_forward(in, Matrix(out, in.like_out()), q.dtype(), bias, bias_zero, prepared_mask, lse, tile_rows_sm90,
                 next_item, softmax_scale, softcap, dropout_p, rng_state, tf32, stream);
}

inline void rows_forward(Tensor projected, Tensor k, Tensor v, pybind11::handle sizes, pybind11::handle prepared_mask,
                         Tensor out, Tensor lse, int tile_rows_sm90, Tensor next_item, float softmax_scale,
                         double dropout_p, Tensor rng_state, bool tf32) {
  const Stream stream(projected);
  const DType dtype = projected.dtype();
  const Rows rows(sizes, dtype, forward_kernels(tile_rows_sm90));
  launch_forward(rows.to_read(projected, k, v), rows.out(out), dtype, Tensor(pybind11::none()), 0, prepared_mask, lse,
                 tile_rows_sm90, next_item, softmax_scale, 0.0f, dropout_p, rng_state, tf32, stream);
}

inline void weights(Tensor q_, Tensor k_, Tensor lse, Tensor bias, int bias_zero, pybind11::handle prepared_mask,
                    Tensor weights, float softmax_scale, float softcap, double dropout_p, Tensor rng_state, bool tf32) {
  const Stream stream(q_);
  const Matrix q(q_, q_.sizes<4>()), k(k_, k_.sizes<4>());
  auto p = common<Weights>(q, k, k, q_.dtype(), lse, bias, bias_zero, softmax_scale, softcap, dropout_p, rng_state,
                           tf32);
  p.weights = weights, p.mask = mask(prepared_mask);
  attention::weights(p, stream);
}

// dbias: of bias_gradient(); dbias_keys: dS summed over the queries. Either may be None.
// work, float32: for Hopper's kernels PaddedRows; for the others delta.
// sums, order: PartialSums' parts, and its counters and turns; None: a kernel owns dq.
inline void launch_backward(const Heads& in, const Matrix& out, const Matrix& dout, const Heads& grads, DType dtype,
                            const Tensor& dlse, const Tensor& lse, const Tensor& bias, int bias_zero,
                            pybind11::handle by_query, pybind11::handle by_key, Kernels kernels, const Tensor& dbias,
                            const Tensor& dbias_keys, const Tensor& work, const Tensor& sums, const Tensor& order,
                            float softmax_scale, float softcap, double dropout_p, const Tensor& rng_state, bool tf32,
                            const Stream& stream) {
  auto p = common<Backward>(in.q, in.k, in.v, dtype, lse, bias, bias_zero, softmax_scale, softcap, dropout_p, rng_state,
                            tf32);
  p.v = in.v, p.out = out, p.dout = dout, p.dlse = dlse, p.dbias_keys = dbias_keys;
  p.dq = grads.q.checked(kernels), p.dk = grads.k.checked(kernels), p.dv = grads.v.checked(kernels);
  p.by_query = mask(by_query), p.by_key = mask(by_key);
  const auto [batch, heads] = dbias ? dbias.sizes<2>() : std::array<int64_t, 2>{};
  const int dbias_batch = static_cast<int>(batch), dbias_heads = static_cast<int>(heads);
  switch (kernels) {
    case Kernels::sm90: {
      float* const shift = work;
      const int64_t blocks = (p.shape.seqlen_q + kRowBlock - 1) / kRowBlock;
      const PaddedRows rows{shift, shift + int64_t{p.shape.batch} * p.shape.heads * blocks * kRowBlock};
      int* const counters = order;
      const PartialSums partial = sums ? PartialSums{sums, counters, counters + parts_of(p.shape) + 1} : PartialSums{};
      backward_rows_sm90(p, rows, partial, stream);
      if (sums) {
        backward_sum_sm90(p, rows, partial, stream);
        backward_round_sm90(p, partial, stream);
      } else {
        backward_dq_sm90(p, rows, stream);
        backward_dkdv_sm90(p, rows, stream);
      }
      if (dbias) bias_gradient_sm90(p, rows, dbias, dbias_batch, dbias_heads, stream);
      return;
    }
    case Kernels::sm80:
      p.delta = work;
      backward_dq(p, stream);
      backward_dkdv(p, stream);
      if (dbias) bias_gradient(p, dbias, dbias_batch, dbias_heads, stream);
      return;
  }
}

inline void backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor bias,
                     int bias_zero, pybind11::handle by_query, pybind11::handle by_key, int kernels_, Tensor dq,
                     Tensor dk, Tensor dv, Tensor dbias, Tensor dbias_keys, Tensor work, Tensor sums, Tensor order,
                     float softmax_scale, float softcap, double dropout_p, Tensor rng_state, bool tf32) {
  const Stream stream(q);
  const Kernels kernels = Kernels(kernels_);
  const Heads in = heads_to_read(q, k, v, kernels);
  const Heads grads = {{dq, in.q.sizes}, {dk, in.k.sizes}, {dv, in.v.sizes}};
  launch_backward(in, Matrix::to_read(out, in.like_out(), kernels), Matrix::to_read(dout, in.like_out(), kernels),
                  grads, q.dtype(), dlse, lse, bias, bias_zero, by_query, by_key, kernels, dbias, dbias_keys, work,
                  sums, order, softmax_scale, softcap, dropout_p, rng_state, tf32, stream);
}

// dk, dv: of the memory, or None.
inline void rows_backward(Tensor dout, Tensor projected, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dprojected,
                          Tensor dk, Tensor dv, pybind11::handle sizes, pybind11::handle by_query,
                          pybind11::handle by_key, int kernels_, Tensor work, Tensor sums, Tensor order,
                          float softmax_scale, double dropout_p, Tensor rng_state, bool tf32) {
  const Stream stream(projected);
  const Kernels kernels = Kernels(kernels_);
  const DType dtype = projected.dtype();
  const Rows rows(sizes, dtype, kernels);
  const Tensor none{pybind11::none()};
  launch_backward(rows.to_read(projected, k, v), rows.out(out), rows.out(dout), rows.to_write(dprojected, dk, dv),
                  dtype, none, lse, none, 0, by_query, by_key, kernels, none, none, work, sums, order, softmax_scale,
                  0.0f, dropout_p, rng_state, tf32, stream);
}

// (rows, columns) of the tiles of the forward, of backward_dq and of backward_dkdv.
inline std::tuple<int, int, int, int, int, int> tiles(int head_dim, DType dtype, bool sm90) {
  const TileSize forward = sm90 ? forward_sm90_tile(head_dim) : forward_tile(head_dim, dtype);
  const TileSize dq = sm90 ? backward_dq_sm90_tile(head_dim) : backward_tile(head_dim, dtype);
  const TileSize dkdv = sm90 ? backward_dkdv_sm90_tile(head_dim) : dq;
  return {forward.rows, forward.columns, dq.rows, dq.columns, dkdv.rows, dkdv.columns};
}

inline void bind(pybind11::module_& m) {
  m.attr("ATTENTION_MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("ATTENTION_NARROW_ROWS") = kNarrowRows;
  m.attr("ATTENTION_ROW_BLOCK") = kRowBlock;
  m.attr("ATTENTION_MAX_HEAD_DIM_SUM") = kMaxHeadDimSum;
  m.attr("ATTENTION_PART_SIZE") = kPartSize;
  m.def("attention_fwd", forward);
  m.def("attention_bwd", backward);
  m.def("attention_rows_fwd", rows_forward);
  m.def("attention_rows_bwd", rows_backward);
  m.def("attention_weights", weights);
  m.def("attention_tiles", tiles);
}

}  // namespace fastattn::attention::bindings
