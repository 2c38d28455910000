// Cross-entropy of rows of logits, and its gradient in their place.
// Specification: fastattn/backends/reference/linear_cross_entropy.py
//
//   z = logit_scale * (logits + bias);   lse = log(sum over c of exp(z_c));   t: the target
//   loss = (1 - eps) * (lse - z_t) + eps * (lse - mean of z)
//   gradient of logits_c = dloss * logit_scale / count * (exp(z_c - lse) - eps / classes - (1 - eps) * [c = t])
//
// cuBLAS computes the three products, x weight^T, dlogits weight and dlogits^T x:
// fastattn/backends/cross_entropy_chunks.py. A row's gradient needs the lse of all its classes first, so our own
// epilogue would have to write the logits, as cuBLAS does, or compute them twice. Floor, n tokens, width d, v classes:
// 6 n d v FLOP and 4 n v elements, of which this kernel reads and writes n v each, 4 bytes a logit in 16-bit types. At
// d 512 and the ceilings of an H200 (788 TFLOP/s, 4.3 TB/s) that is a quarter of the products' time, at d 2048 a
// sixteenth.
//
// T = float32, bfloat16 or float16. Pointers are device pointers, of any alignment. Sums run in float32, each in one
// order: equal inputs give equal bits. Nothing synchronises with the host.
#pragma once
#include <cuda_runtime.h>

#include "common/dtype_switch.h"

namespace fastattn::linear_cross_entropy {

struct Params {
  void* logits;           // in   (rows, classes) T, rows `stride` elements apart; out, if has_gradient: their gradient
  const void* bias;       // in   (classes,) T, or null
  const int64_t* target;  // in   (rows,); if it is no class and not ignore_index, its row becomes NaN
  float* losses;          // out  (rows,)
  const float* dloss;     // in   (rows,), or () if dloss_stride is 0; null: 1
  const int64_t* count;   // in   (), divides the gradient; or null
  int64_t rows, stride;
  int classes, dloss_stride;
  int64_t ignore_index;
  float logit_scale, on_target, on_each;  // on_target: 1 - eps; on_each: eps / classes
  bool has_gradient;
  DType dtype;
};

// shared_bytes: the shared memory that a block may have on the current device.
void cross_entropy_rows(const Params& p, int shared_bytes, cudaStream_t stream);

}  // namespace fastattn::linear_cross_entropy
