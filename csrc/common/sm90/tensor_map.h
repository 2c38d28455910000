// A tensor map: the layout of a tensor for TMA, up to four dimensions of 16-bit elements. Plain C++.
#pragma once
#include <cstdint>

#ifdef FASTATTN_EMULATOR
#include <cstddef>
#else
#include <cuda.h>
#endif

namespace fastattn::sm90 {

// Innermost dimension first. Sizes and the box are in elements, strides in bytes: of dimensions 1 to 3, multiples of
// 16. The tensor starts at a multiple of 16 bytes. Outside the sizes a box is read as zero and not written. In shared
// memory boxes have the 128-byte swizzle: box[0] is 64 elements, and 16-byte chunk c of line r is at chunk c ^ (r % 8).
struct TensorLayout {
  const void* data;
  uint64_t size[4];
  uint64_t stride[3];
  uint32_t box[4];
};

#ifdef FASTATTN_EMULATOR
struct alignas(64) TensorMap {
  TensorLayout layout;
};
#else
using TensorMap = CUtensorMap;
#endif

// Throws std::runtime_error if TMA does not support the layout.
TensorMap make_tensor_map(const TensorLayout& layout);

}  // namespace fastattn::sm90
