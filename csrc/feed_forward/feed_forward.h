// The position-wise feed-forward network.   Specification: fastattn/backends/reference/feed_forward.py
//
//   z = x weight1^T + bias1;   h = dropout(act(z)), gated: dropout(act(first half of z) * second half)
//   dh = dropout(dout weight2);   dz = dh * act'(z), gated: (dh * second * act'(first), dh * act(first))
//
// These two are here, with the column sums of dz; fastattn/backends/cuda/feed_forward.py has cuBLAS do the other products. Each comes
// in two forms: one kernel for product and epilogue on Hopper (*_product_sm90), or the epilogue alone, on a product that cuBLAS wrote
// (*_pointwise). The arithmetic of both is in hidden.cuh.
// Matrices are row-major and contiguous, of type T = float32, bfloat16 or float16. Products are for 16-bit types: their
// pointers are multiples of 16, and d_ff and depth of 8. The pointwise forms take anything, in 16-byte vectors where they can.
// Sums run in float32. Nothing synchronises with the host.
#pragma once
#include <cuda_runtime.h>

#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn::feed_forward {

// The numbers are those of fastattn/backends/cuda/feed_forward.py.
enum class Activation : int { relu = 0, gelu = 1, gelu_tanh = 2, silu = 3 };

constexpr int kSumRows = 64;  // rows of dz that one row of `partial` is the sum of

// What both directions know of the hidden layer.
struct Hidden {
  int64_t tokens;
  int d_ff;
  Activation activation;
  bool gated;  // z has 2 * d_ff columns, else d_ff
  Dropout dropout;
  DType dtype;
};

struct Forward {
  Hidden hidden;
  const void* bias1;  // in   (columns of z,) T, or null
  void* z;            // out  (tokens, columns of z) T, or null: not stored
  void* h;            // out  (tokens, d_ff) T
};

struct Backward {
  Hidden hidden;
  const void* saved;  // in   (tokens, columns of z) T: z, or, for relu that is not gated, h
  void* dz;           // out  (tokens, columns of z) T
  void* h;            // out  (tokens, d_ff) T, or null: not stored
  float* partial;     // work (ceil(tokens / kSumRows), columns of z): sums of dz before it is rounded; or null
  void* dbias1;       // out  (columns of z,) T: the sum of partial's rows
};

// a (tokens, depth) times b: forward weight1 (columns of z, depth), transposed; backward weight2 (depth, d_ff).
struct Operands {
  const void* a;
  const void* b;
  int depth;
};

void forward_product_sm90(const Operands& product, const Forward& p, cudaStream_t stream);
void forward_pointwise(const void* z, const Forward& p, cudaStream_t stream);  // z, which may be h: bias1 is in it

void backward_product_sm90(const Operands& product, const Backward& p, cudaStream_t stream);
void backward_pointwise(const void* dh, const Backward& p, cudaStream_t stream);  // dh = dout weight2, which may be dz

// dbias1, from partial, where that is not null: after either form of the backward.
void bias_gradient(const Backward& p, cudaStream_t stream);

}  // namespace fastattn::feed_forward
