// Embedding + positions + dropout + LayerNorm.   Specification: fastattn/backends/reference/embed_layer_norm.py
//
//   z = dropout(embedding[token] * scale + position_table[position]);   out = (z - mean) * rstd * weight + bias
//
// Matrices are row-major and contiguous, their rows `hidden` wide. Every tensor has its own type, float32, bfloat16 or
// float16, which the kernels read at run time; only weight and bias, and their gradients, share one. Pointers are
// device pointers, of any alignment: 16-byte vectors are used if all pointers and the row length allow it. hidden <=
// norm::kMaxHidden, rows is any 64-bit count, including 0. z is float32 and never stored. Nothing synchronises with the
// host. A token or a position out of range reads nothing: its row of out is NaN, and so is its row of drows.
#pragma once
#include <cuda_runtime.h>

#include "common/dropout.h"
#include "common/dtype_switch.h"
#include "common/norm.h"

namespace fastattn::embed_layer_norm {

struct Indices {
  const void* at;  // (rows,) int64 or int32, or null: there are none
  bool wide;       // int64
};

// The source of the rows of z.
struct Source {
  Indices tokens;        // in   rows of embedding
  Indices position;      // in   rows of position_table; null: that of row r is r % length
  Array embedding;       // in   (vocabulary, hidden)
  Array position_table;  // in   (n_position, hidden)
  int64_t vocabulary, n_position, length;
  float scale;
  Dropout dropout;
};

struct Forward {
  static constexpr bool eps_on_std = false;  // norm.cuh

  Source source;
  Array weight;       // in   (hidden,)
  Array bias;         // in   (hidden,)
  Array out;          // out  (rows, hidden)
  float* statistics;  // out  (2 rows + norm::kTickets,): mean and rstd of z, and zeros for backward
  int64_t rows;
  int hidden;
  float eps;
};

struct Backward {
  static constexpr bool kHasXBias = false, eps_on_std = false;  // norm_backward.cuh

  Source source;
  Array dout;         // in   (rows, hidden)
  Array weight;       // in   (hidden,)
  float* statistics;  // in   from forward; work: its tickets, zero again at the end
  Array drows;        // out  (rows, hidden), what each row adds to the gradient of its row of embedding
  int64_t* index;     // out  (rows,): this row; 0 for a token or position out of range
  Array dweight;      // out  (hidden,)
  Array dbias;        // out  (hidden,)
  float* partial;     // work (norm::backward_partials(blocks), 2, hidden): sums of dweight and dbias
  int64_t rows;
  int hidden, blocks;
};

void forward(const Forward& p, cudaStream_t stream);
void backward(const Backward& p, cudaStream_t stream);

// The blocks of `backward` on a device with `multiprocessors`.
int backward_blocks(int64_t rows, int hidden, int multiprocessors);

}  // namespace fastattn::embed_layer_norm
