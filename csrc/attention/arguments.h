// From what fastattn/cuda/ passes to the structs of attention.h: pointers come as integers, 0 for null, and a struct as the
// tuple of its integers.
#pragma once
#include <pybind11/stl.h>

#include <array>

#include "attention/attention.h"
#include "common/bind.h"

namespace fastattn::attention {

template <size_t kCount>
using Integers = std::array<int64_t, kCount>;

inline Rows rows(const Integers<4>& t) { return {pointer<void>(t[0]), t[1], t[2], t[3]}; }

inline Shape shape(const std::array<int, 7>& t) { return {t[0], t[1], t[2], t[3], t[4], t[5], t[6]}; }

inline Bias bias(const Integers<6>& t) { return {pointer<void>(t[0]), t[1], t[2], t[3], t[4], DType(t[5])}; }

// (band_lo, band_hi, spans, its stride, bits, its strides, counts, tiles, max_tiles, their strides, seen, its strides)
using Who = Integers<16>;
inline Visibility visibility(const Who& t) {
  const TileLists lists{pointer<int2>(t[8]), pointer<int32_t>(t[9]), static_cast<int>(t[10]), t[11], t[12]};
  return {static_cast<int>(t[0]), static_cast<int>(t[1]), pointer<int2>(t[2]), t[3], pointer<uint32_t>(t[4]), t[5], t[6],
          t[7], lists, pointer<uint32_t>(t[13]), t[14], t[15]};
}

inline Dropout dropout(int64_t rng_state, uint32_t threshold, float scale) {
  return {pointer<int64_t>(rng_state), threshold, scale};
}

}  // namespace fastattn::attention
