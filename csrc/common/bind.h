// What every op's bind.h uses: tensors come from Python as the integers of their addresses, 0 for null.
//
// An op's bind.h is Python's view of the op. csrc/bindings.cpp includes them all: one file to compile, as pybind11's
// headers cost more than everything else in it.
#pragma once
#include <pybind11/pybind11.h>

#include <tuple>

#include "common/device.h"
#include "common/dtype_switch.h"

namespace fastattn {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A tensor whose type is its own: its address, and the number of its elements' dtype.
using Typed = std::tuple<uintptr_t, int>;

inline Array array(const Typed& t) { return {pointer<void>(std::get<0>(t)), DType(std::get<1>(t))}; }

}  // namespace fastattn
