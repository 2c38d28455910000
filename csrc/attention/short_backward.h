// The backward of short sequences, Lq and Lk up to 128, 16-bit types, head dimensions up to 128, in one launch: a block
// for each (batch, key head), which computes the query heads of its group one after the other.   Formulas: backward.h
#pragma once
#include "attention/backward.h"

namespace fastattn::attention {

// Whether there is a kernel for up to kMaxShort keys of this type and head dimension, and whether it fits on the
// device. If not, the kernels of all lengths are used.
bool has_short_backward(int head_dim, DType dtype, int device);

// Writes dq, dk and dv, and dbias_keys if not null. It reads by_query, without lists, but not out and by_key. If delta
// is not null, it is written for bias_gradient(), which computes dbias of a bias by distance, or that batches or heads
// share. There must be no softcap: its derivative would be needed after P is overwritten.
// dbias: null, or for a bias (B, H, Lq, Lk) that is not shared, contiguous and of bias.dtype, which is float32 or
// p.dtype.
void short_backward(const Backward& p, void* dbias, cudaStream_t stream);

}  // namespace fastattn::attention
