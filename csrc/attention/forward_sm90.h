// The forward of attention on Hopper, for 16-bit types. Formula and parameters: attention.h
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

TileSize forward_sm90_tile(int head_dim);  // the larger of the two

// q, k, v and out have no empty dimension. They, their rows, heads and batches start at multiples of 16 bytes. The
// scale is positive. next_item: an int of scratch on the device.
void forward_sm90(const Forward& p, int* next_item, cudaStream_t stream);

}  // namespace fastattn::attention
