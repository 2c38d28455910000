// The backward of short sequences, Lq and Lk up to 128, in one launch.   Formulas: backward.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

// Should short_backward serve? It takes 16-bit types, head dimensions up to 128, and what a block of the device can hold;
// and, as a block takes the query heads of a group one after the other, groups only where there is a block for every
// multiprocessor. It makes no dbias: where that is needed, of a bias that has keys, the other kernels serve.
bool is_short(const Shape& shape, DType dtype, int device);

// dq, dk and dv. Of p it reads by_query, without lists, and neither out, delta, remainder nor by_key.
void short_backward(const Backward& p, cudaStream_t stream);

}  // namespace fastattn::attention
