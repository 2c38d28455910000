// The backward of short sequences, Lq and Lk up to 128, in one launch.   Formulas: backward.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

// Should short_backward serve? It takes head dimensions up to 128, of float32 up to 64, and what a block of the device can
// hold; and, as a block takes the query heads of a group one after the other, groups only where there is a block for every
// multiprocessor: with fewer, most of the device would wait for a few blocks, each of which works for a whole group.
bool is_short(const Shape& shape, DType dtype, int device);

// dq, dk and dv. Of p it reads by_query, without lists, and neither out nor by_key. Where delta and remainder are not null it
// writes them: a launch of bias_gradient() makes dbias of them, for a bias that batches or heads share.
// dbias: null, or of a bias that nothing shares, (B, H, Lq, Lk), contiguous and of bias.dtype, which is float32 or p.dtype.
// Where the gradient of a bias is wanted that queries share, the other kernels serve.
void short_backward(const Backward& p, void* dbias, cudaStream_t stream);

}  // namespace fastattn::attention
