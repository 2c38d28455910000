// The backward of short sequences, Lq and Lk up to 128, 16-bit types, head dimensions up to 128, in one launch: a block for
// each (batch, key head), which takes the query heads of a group one after the other.   Formulas: backward.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

// Is there a kernel for up to kMaxShort keys of this type and head dimension that a block of the device can hold? Where not,
// the kernels of all lengths serve.
bool has_short_backward(int head_dim, DType dtype, int device);

// dq, dk and dv, and dbias_keys, if wanted. Of p it reads by_query, without lists, and neither out nor by_key. Where delta is
// not null it is written, for bias_gradient(), which makes dbias of a bias that batches or heads share.
// dbias: null, or of a bias that nothing shares, (B, H, Lq, Lk), contiguous and of bias.dtype, which is float32 or p.dtype.
void short_backward(const Backward& p, void* dbias, cudaStream_t stream);

}  // namespace fastattn::attention
