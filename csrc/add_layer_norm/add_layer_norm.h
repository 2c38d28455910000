// Dropout + residual + LayerNorm or RMSNorm.   Specification: fastattn/backends/reference/add_layer_norm.py
//
//   z = residual + dropout(x + x_bias);   out = (z - mean) * rstd * weight + bias
//   mean, 1 / rstd^2 = mean(z), var(z) + eps of a row
//   RMSNorm, where bias is null:  out = z * rstd * weight;   1 / rstd^2 = mean(z^2) + eps
//   with eps_on_std:              1 / rstd = std + eps,   std^2 = var(z) * hidden / (hidden - 1);   hidden > 1
//
// Matrices are (rows, hidden), row-major and contiguous, of type T = float32, bfloat16 or float16; weight and bias are
// (hidden,), both of type float32 or both of type T; x_bias is (hidden,), of either type. Where T is float32, x and its
// gradient may be bfloat16 or float16, as autocast has them: x is read as float32, its gradient is rounded once.
// Pointers are device pointers, of any alignment: 16-byte vectors are used if all pointers and the row length allow it.
// hidden <= kMaxHidden, rows is any 64-bit count, including 0. Sums and statistics run in float32. Nothing
// synchronises with the host.
#pragma once
#include <cuda_runtime.h>

#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn::add_layer_norm {

constexpr int kMaxHidden = 16384;
constexpr int kMaxHiddenDxBias = 8192;         // above, the backward has no dx_bias: registers would spill
constexpr int kSpan = 17;                      // blocks of the backward whose sums the last adds; H100: 264 / 17
constexpr int kMaxBlocks = 2 * kSpan * kSpan;  // of the backward
constexpr int kTickets = 2 * kSpan + 1;        // one for each kSpan blocks, and one for all

// The statistics that the forward computes for the backward: mean (rows,), rstd (rows,), and kTickets zeros. The
// backward counts its blocks with the zeros and leaves them zero. With eps_on_std, ratio (rows,) follows: the factor of
// mean(g * normal) in the backward, (std + eps) / std * hidden / (hidden - 1), or 0 where std is 0. It is stored
// because rstd alone cannot distinguish a std far below eps from 0.

// The rows of `partial` in the backward: one for each block, one for each kSpan blocks.
constexpr int backward_partials(int blocks) { return blocks + (blocks + kSpan - 1) / kSpan; }

struct Forward {
  Array x;               // in   (rows, hidden) T; or where T is float32, 16 bits
  const void* residual;  // in   (rows, hidden) T, or null: z = dropout(x)
  const void* weight;    // in   (hidden,) weight_dtype
  const void* bias;      // in   (hidden,) weight_dtype, or null: RMSNorm
  Array x_bias;          // in   (hidden,), or null: 0
  void* out;             // out  (rows, hidden) T
  Array read;            // out  (rows, hidden), out rounded to 16 bits, where T is float32; or null
  void* z;               // out  (rows, hidden) T, the rounded sum, for backward; or null: not stored
  float* statistics;     // out  see above; of z before it is rounded
  int64_t rows;
  int hidden;
  float eps;
  bool eps_on_std;
  Dropout dropout;
  DType dtype, weight_dtype;
};

struct Backward {
  const void* dout;    // in   (rows, hidden) T
  const void* dz;      // in   (rows, hidden) T, the gradient of a returned z; or null: z was not returned
  const void* z;       // in   (rows, hidden) T, from forward
  const void* weight;  // in   (hidden,) weight_dtype
  float* statistics;   // in   from forward; work: its tickets, zero again at the end
  void* dsum;          // out  (rows, hidden) T, the gradient of z, of residual and, without dropout, of x; or null
  Array dx;            // out  (rows, hidden), of x's type, dropout applied to dsum; or null
  void* dweight;       // out  (hidden,) weight_dtype
  void* dbias;         // out  (hidden,) weight_dtype, or null: RMSNorm
  Array dx_bias;       // out  (hidden,), or null: no x_bias, or hidden > kMaxHiddenDxBias
  float* partial;      // work (backward_partials(blocks), 1 to 3, hidden): sums of dweight, dbias, dx_bias
  int64_t rows;
  int hidden, blocks;
  bool eps_on_std;
  Dropout dropout;
  DType dtype, weight_dtype;
};

void forward(const Forward& p, cudaStream_t stream);
void backward(const Backward& p, cudaStream_t stream);

// The blocks of `backward` on a device with `multiprocessors`.
int backward_blocks(int64_t rows, int hidden, int multiprocessors);

}  // namespace fastattn::add_layer_norm
