// The position-wise feed-forward network.   Specification: fastattn/backends/reference/feed_forward.py
//
//   z = x weight1^T + bias1;   h = dropout(act(z)), gated: dropout(act(first half of z) * second half)
//   dh = dropout(dout weight2);   dz = dh * act'(z), gated: (dh * second * act'(first), dh * act(first))
//
// These two are here, with the column sums of dz; fastattn/backends/cuda/feed_forward.py calls cuBLAS for the other
// products. Each has two forms: one kernel for product and epilogue on Hopper (*_product_sm90), or the epilogue only,
// on a product that cuBLAS wrote (*_pointwise). The arithmetic of both is in hidden.cuh. Matrices are row-major and
// contiguous, of type T = float32, bfloat16 or float16. Products are for 16-bit types: their pointers are multiples of
// 16, and d_inner and depth of 8. The pointwise forms need no alignment, and use 16-byte vectors where they can. Sums
// run in float32. Nothing synchronises with the host.
#pragma once
#include <cuda_runtime.h>

#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn::feed_forward {

// The numbers are those of fastattn/backends/cuda/feed_forward.py.
enum class Activation : int { relu = 0, gelu = 1, gelu_tanh = 2, silu = 3 };

constexpr int kSumRows = 64;  // rows of dz whose sum is one row of `partial`

// The hidden layer, for both directions.
struct Hidden {
  int64_t tokens;
  int d_inner;
  Activation activation;
  bool gated;  // z has 2 * d_inner columns, else d_inner
  Dropout dropout;
  DType dtype;
};

struct Forward {
  Hidden hidden;
  const void* bias1;  // in   (columns of z,) T, or null
  void* z;            // out  (tokens, columns of z) T, or null: not stored
  void* h;            // out  (tokens, d_inner) T
};

struct Backward {
  Hidden hidden;
  const void* saved;  // in   (tokens, columns of z) T: z, or, for relu that is not gated, h
  void* dz;           // out  (tokens, columns of z) T
  void* h;            // out  (tokens, d_inner) T, or null: not stored
  float* partial;     // work (ceil(tokens / kSumRows), columns of z): sums of dz before it is rounded; or null
  void* dbias1;       // out  (columns of z,) T: the sum of partial's rows
};

// a (tokens, depth) times b: forward weight1 (columns of z, depth), transposed; backward weight2 (depth, d_inner).
struct Operands {
  const void* a;
  const void* b;
  int depth;
};

void forward_product_sm90(const Operands& product, const Forward& p, cudaStream_t stream);
void forward_pointwise(const void* z, const Forward& p, cudaStream_t stream);  // z with bias1; it may be h

void backward_product_sm90(const Operands& product, const Backward& p, cudaStream_t stream);
void backward_pointwise(const void* dh, const Backward& p, cudaStream_t stream);  // dh = dout weight2; it may be dz

// dbias1, from partial, if that is not null. Called after either form of the backward.
void bias_gradient(const Backward& p, cudaStream_t stream);

}  // namespace fastattn::feed_forward
