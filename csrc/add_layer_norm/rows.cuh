// Shared by forward and backward: the choice of the compiled kernel.
#pragma once
#include "add_layer_norm/add_layer_norm.h"
#include "common/norm.cuh"

namespace fastattn::add_layer_norm {

using norm::aligned;
using norm::column;
using norm::Int;

// Calls f(T, W, kChunks, kAligned): two values of the types and two integral constants.
template <class Function>
void dispatch(DType dtype, DType weight_dtype, int chunks, bool is_aligned, Function&& f) {
  dtype_switch(dtype, [&](auto t) {
    const auto with_shape = [&](auto w) {
      norm::shape_switch(chunks, is_aligned, [&](auto k, auto vectors) { f(t, w, k, vectors); });
    };
    weight_dtype == DType::float32 ? with_shape(float{}) : with_shape(t);
  });
}

}  // namespace fastattn::add_layer_norm
