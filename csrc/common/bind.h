// Used by every op's bind.h. A tensor comes from Python as the integer of its address, 0 for null.
//
// An op's bind.h is Python's view of the op. csrc/bindings.cpp includes them all, so that pybind11's headers, which are
// slow to compile, are compiled once.
#pragma once
#include <pybind11/pybind11.h>

#include <tuple>

#include "common/device.h"
#include "common/dtype_switch.h"

namespace fastattn {

// Python's integer, as a pointer of the type that is needed.
struct Address {
  uintptr_t value;

  template <class T>
  operator T*() const {
    return reinterpret_cast<T*>(value);
  }
};
inline Address at(uintptr_t value) { return {value}; }

// A tensor whose dtype a kernel reads when it runs: its address, and the dtype's number.
using Typed = std::tuple<uintptr_t, int>;

inline Array array(const Typed& t) { return {at(std::get<0>(t)), DType(std::get<1>(t))}; }

}  // namespace fastattn
