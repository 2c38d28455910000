// Python's view of attention: fastattn/backends/cuda/attention.py.
#pragma once
#include "attention/backward_sm90.h"
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
    const Object owner = t.contiguous_copy();
    Matrix copy = matrix_of(Tensor(owner));
    copy.owner_ = owner;
    return copy;
  }
  static Matrix to_read(const Tensor& t, const Sizes& sizes, Kernels kernels) {
    return to_read(t, kernels, [&](const Tensor& from) { return Matrix(from, sizes); });
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

  Matrix(const Sizes& sizes, const std::array<int64_t, 4>& strides, void* data)
      : sizes(sizes), strides_(strides), data_(data) {}

  operator StridedMatrix() const { return {data_, strides_[0], strides_[1], strides_[2]}; }

  Sizes sizes;

 private:
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
  Object owner_;
};

// Of PreparedMask (fastattn/masks/kernel_format.py).
inline Mask mask(Tuple prepared) {
  if (prepared.size() != 8) throw std::invalid_argument("fastattn: PreparedMask has other fields");
  const auto tensor = [&](int i) { return prepared.at<Tensor>(i); };
  const Tensor intervals = tensor(2), columns = tensor(3), bits = tensor(4), counts = tensor(5), tiles = tensor(6);
  Mask p{};
  p.band_lo = prepared.at<int>(0), p.band_hi = prepared.at<int>(1);
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

struct Heads {
  Matrix q, k, v;

  Sizes like_out() const { return {q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]}; }
};

// The first number of PreparedMask's layout.launch.
inline Kernels kernels_of(Tuple prepared) { return Kernels(prepared.at<Tuple>(7).at<Tuple>(3).at<int>(0)); }

// What both directions get. options: softmax_scale, dropout_p, rng_state (or None), tf32.
inline void fill(Forward& p, const Heads& in, const Matrix& out, DType dtype, const Tensor& lse, const Mask& mask,
                 Tuple options) {
  const auto size = [](const Matrix& of, int i) { return static_cast<int>(of.sizes[i]); };
  p.q = in.q, p.k = in.k, p.v = in.v, p.out = out, p.lse = lse, p.mask = mask, p.dtype = dtype;
  p.shape = {size(in.q, 0), size(in.q, 1), size(in.k, 1), size(in.q, 2), size(in.k, 2), size(in.q, 3), size(in.v, 3)};
  if (options.size() != 4) throw std::invalid_argument("fastattn: attention has four options");
  p.softmax_scale = options.at<float>(0), p.tf32 = options.at<bool>(3);
  if (const auto rng_state = options.at<Tensor>(2)) p.dropout = dropout(rng_state, options.at<double>(1));
}

inline Heads heads_to_read(const Tensor& q, const Tensor& k, const Tensor& v, Kernels kernels) {
  return {Matrix::to_read(q, q.sizes<4>(), kernels), Matrix::to_read(k, k.sizes<4>(), kernels),
          Matrix::to_read(v, v.sizes<4>(), kernels)};
}

// fastattn/backends/attention_rows.py: Python's sizes (B, L, n_head, n_head_kv, d_k, d_v), and what is in rows.
struct Rows {
  Rows(Tuple sizes, DType dtype, Kernels kernels) : dtype(dtype), kernels(kernels) {
    if (sizes.size() != 6) throw std::invalid_argument("fastattn: attention of rows has six sizes");
    int64_t* const numbers[] = {&batch, &length, &heads, &heads_kv, &dim_k, &dim_v};
    for (int i = 0; i < 6; i++) *numbers[i] = sizes.at<int64_t>(i);
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

  // Heads side by side in rows, from element `first` of a row on.
  Matrix own(const Tensor& rows, int64_t count, int64_t dim, int64_t width, int64_t first) const {
    char* const at = static_cast<char*>(static_cast<void*>(rows)) + first * (dtype == DType::float32 ? 4 : 2);
    return Matrix({batch, count, length, dim}, {length * width, dim, width, 1}, at).checked(kernels);
  }

  DType dtype;
  Kernels kernels;
  int64_t batch, length, heads, heads_kv, dim_k, dim_v;
};

// next_item: an int of scratch for Hopper's kernel, or None.
inline void launch_forward(const Heads& in, const Matrix& out, DType dtype, Tuple prepared_mask, const Tensor& lse,
                           const Tensor& next_item, Tuple options, const Stream& stream) {
  const Kernels kernels = kernels_of(prepared_mask);
  Forward p{};
  fill(p, in, out.checked(kernels), dtype, lse, mask(prepared_mask), options);
  if (p.softmax_scale <= 0) throw std::invalid_argument("fastattn: the scale must be positive");
  kernels == Kernels::sm90 ? forward_sm90(p, next_item, stream) : attention::forward(p, stream);
}

inline void forward(Tensor q, Tensor k, Tensor v, Tuple prepared_mask, Tensor out, Tensor lse, Tensor next_item,
                    Tuple options) {
  const Stream stream(q);
  const Heads in = heads_to_read(q, k, v, kernels_of(prepared_mask));
  launch_forward(in, Matrix(out, in.like_out()), q.dtype(), prepared_mask, lse, next_item, options, stream);
}

inline void rows_forward(Tensor projected, Tensor k, Tensor v, Tuple sizes, Tuple prepared_mask, Tensor out, Tensor lse,
                         Tensor next_item, Tuple options) {
  const Stream stream(projected);
  const DType dtype = projected.dtype();
  const Rows rows(sizes, dtype, kernels_of(prepared_mask));
  launch_forward(rows.to_read(projected, k, v), rows.out(out), dtype, prepared_mask, lse, next_item, options, stream);
}

// work, float32: delta, (B, H, Lq); for Hopper's kernels attention_work_sm90() numbers.
inline void launch_backward(const Heads& in, const Matrix& out, const Matrix& dout, const Heads& grads, DType dtype,
                            const Tensor& dlse, const Tensor& lse, Tuple by_query, Tuple by_key, const Tensor& work,
                            Tuple options, const Stream& stream) {
  const Kernels kernels = kernels_of(by_query);
  Backward p{};
  fill(p, in, out, dtype, lse, mask(by_query), options);
  p.dout = dout, p.dlse = dlse, p.delta = work, p.by_key = mask(by_key);
  p.dq = grads.q.checked(kernels), p.dk = grads.k.checked(kernels), p.dv = grads.v.checked(kernels);
  if (kernels == Kernels::sm90) return backward_sm90(p, stream);
  backward_dq(p, stream);
  backward_dkdv(p, stream);
}

inline void backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tuple by_query,
                     Tuple by_key, Tensor dq, Tensor dk, Tensor dv, Tensor work, Tuple options) {
  const Stream stream(q);
  const Kernels kernels = kernels_of(by_query);
  const Heads in = heads_to_read(q, k, v, kernels);
  const Heads grads = {{dq, in.q.sizes}, {dk, in.k.sizes}, {dv, in.v.sizes}};
  launch_backward(in, Matrix::to_read(out, in.like_out(), kernels), Matrix::to_read(dout, in.like_out(), kernels),
                  grads, q.dtype(), dlse, lse, by_query, by_key, work, options, stream);
}

// dk, dv: of the memory, or None.
inline void rows_backward(Tensor dout, Tensor projected, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dprojected,
                          Tensor dk, Tensor dv, Tuple sizes, Tuple by_query, Tuple by_key, Tensor work, Tuple options) {
  const Stream stream(projected);
  const DType dtype = projected.dtype();
  const Rows rows(sizes, dtype, kernels_of(by_query));
  launch_backward(rows.to_read(projected, k, v), rows.out(out), rows.out(dout), rows.to_write(dprojected, dk, dv),
                  dtype, Tensor(Py_None), lse, by_query, by_key, work, options, stream);
}

// (rows, columns) of the tiles of the forward, and of the backward by query
// (Hopper's needs no lists of these) and by key.
inline std::tuple<int, int, int, int, int, int> tiles(int head_dim, DType dtype, bool sm90) {
  const TileSize forward = sm90 ? forward_sm90_tile(head_dim) : forward_tile(head_dim, dtype);
  const TileSize by_query = sm90 ? TileSize{} : backward_tile(head_dim, dtype);
  const TileSize by_key = sm90 ? backward_sm90_tile(head_dim) : by_query;
  return {forward.rows, forward.columns, by_query.rows, by_query.columns, by_key.rows, by_key.columns};
}

inline void bind(PyObject* m) {
  checked(PyModule_AddIntConstant(m, "ATTENTION_MAX_HEAD_DIM", kMaxHeadDim));
  add_function<forward>(m, "attention_fwd");
  add_function<backward>(m, "attention_bwd");
  add_function<rows_forward>(m, "attention_rows_fwd");
  add_function<rows_backward>(m, "attention_rows_bwd");
  add_function<tiles>(m, "attention_tiles");
  add_function<work_sm90>(m, "attention_work_sm90");
}

}  // namespace fastattn::attention::bindings
