// The position-wise feed-forward network.   Specification: fastattn/backends/reference/feed_forward.py
//
//   z = x weight1^T + bias1;   h = dropout(act(z)), gated: dropout(act(first half of z) * second half)
//   dh = dropout(dout weight2);   dz = dh * act'(z), gated: (dh * second * act'(first), dh * act(first))
//
// fastattn/backends/cuda/feed_forward.py calls cuBLAS for all products. Here is what follows these two of them, with
// the column sums of dz; the arithmetic is in hidden.cuh. Matrices are row-major and contiguous, of type T = float32,
// bfloat16 or float16, of any alignment: 16-byte vectors are used where they can be. Sums run in float32. Nothing
// synchronises with the host.
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
  const void* z;  // in   (tokens, columns of z) T: the product, with bias1
  void* h;        // out  (tokens, d_inner) T; it may be z, if that is not gated
};

struct Backward {
  Hidden hidden;
  const void* dh;     // in   (tokens, d_inner) T: the product dout weight2
  const void* saved;  // in   (tokens, columns of z) T: z, or, for relu that is not gated, h
  void* dz;           // out  (tokens, columns of z) T; it may be dh, if it is not gated
  void* h;            // out  (tokens, d_inner) T, or null: not stored
  float* partial;     // work (ceil(tokens / kSumRows), columns of z): sums of dz before it is rounded; or null
  void* dbias1;       // out  (columns of z,) T: the sum of partial's rows
};

void forward(const Forward& p, cudaStream_t stream);

// In this order. bias_gradient: dbias1, from partial, if that is not null.
void backward(const Backward& p, cudaStream_t stream);
void bias_gradient(const Backward& p, cudaStream_t stream);

}  // namespace fastattn::feed_forward
