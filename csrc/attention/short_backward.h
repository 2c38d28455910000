// The backward of short sequences, Lq and Lk up to 128, in one launch: a block for each (batch, key head), which takes the
// query heads of a group one after the other.   Formulas: backward.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

bool is_short(const Shape& shape);

// dq, dk and dv, and dbias_keys, if wanted. Of p it reads by_query, without lists, and neither out nor by_key. Where delta
// and remainder are not null it writes them: a launch of bias_gradient() makes dbias of them, for a bias that batches or
// heads share.
// dbias: null, or of a bias that nothing shares, (B, H, Lq, Lk), contiguous and of bias.dtype, which is float32 or p.dtype.
// sums: memory for as many floats as short_backward_sums() says, or null for none.
void short_backward(const Backward& p, void* dbias, float* sums, int device, cudaStream_t stream);
int64_t short_backward_sums(const Shape& shape, DType dtype, int device);

// The kernel for whatever a block cannot hold as a whole: short_backward_wide.cu.
void short_backward_wide(const Backward& p, void* dbias, float* sums, cudaStream_t stream);
int64_t short_backward_wide_sums(const Shape& shape, DType dtype);

}  // namespace fastattn::attention
