// The forward of attention on Hopper, for 16-bit types. Formula and parameters: attention.h
#pragma once
#include "attention/attention.h"

namespace fastattn::attention {

// The most rows of a tile; head_dim: the larger of the two. It may also have kNarrowRows, and as many columns.
constexpr int kNarrowRows = 128;
TileSize forward_sm90_tile(int head_dim);

// q, k, v and out have no empty dimension. They, their rows, heads and batches start at multiples of 16 bytes. mask:
// with lists of a tile of tile_rows, or without. A bias needs kNarrowRows. next_item: an int of scratch on the device.
void forward_sm90(const Forward& p, int tile_rows, int* next_item, cudaStream_t stream);

}  // namespace fastattn::attention
