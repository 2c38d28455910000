// Used by every op's bind.h: what a binding reads of Python's tensors.
//
// An op's bind.h is Python's view of the op: one function for each direction, which gets tensors as they are. Python
// has checked them. csrc/bindings.cpp includes all ops, so that pybind11's headers, which are slow to compile, are
// compiled once. The library is built without PyTorch: a tensor is asked through its Python methods, 20 to 60 ns each.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "common/device.h"
#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn {

// Python's names and objects that are needed in each call. The module keeps them for good.
struct Python {
  PyObject *data_ptr, *shape, *stride, *dtype, *get_device;
  PyObject* dtypes[3];       // as DType numbers them
  PyObject* current_stream;  // of a device's number; null where PyTorch has no CUDA
};
inline Python python;

inline void load_python() {
  const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
  const auto torch = pybind11::module_::import("torch"), internals = pybind11::module_::import("torch._C");
  const auto attribute = [&](const char* text) { return pybind11::object(torch.attr(text)).release().ptr(); };
  const char* const stream = "_cuda_getCurrentRawStream";
  const bool has_cuda = pybind11::hasattr(internals, stream);
  python = {name("data_ptr"),
            name("shape"),
            name("stride"),
            name("dtype"),
            name("get_device"),
            {attribute("float32"), attribute("bfloat16"), attribute("float16")},
            has_cuda ? pybind11::object(internals.attr(stream)).release().ptr() : nullptr};
}

// A tensor, or None.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(pybind11::handle object) : object_(object) {}

  explicit operator bool() const { return !object_.is_none(); }

  // The address of the first element; null for None.
  template <class T>
  operator T*() const {
    return object_.is_none() ? nullptr : static_cast<T*>(PyLong_AsVoidPtr(call(python.data_ptr).ptr()));
  }

  int dimensions() const { return static_cast<int>(PyTuple_Size(attribute(python.shape).ptr())); }

  // Of the first dimensions, of which there are at least n.
  template <size_t n>
  std::array<int64_t, n> sizes() const {
    return integers<n>(attribute(python.shape));
  }
  template <size_t n>
  std::array<int64_t, n> strides() const {
    return integers<n>(call(python.stride));
  }
  // 0 for dimensions of size 1, which are broadcast.
  template <size_t n>
  std::array<int64_t, n> broadcast_strides() const {
    const auto size = sizes<n>();
    auto stride = strides<n>();
    for (size_t i = 0; i < n; i++)
      if (size[i] == 1) stride[i] = 0;
    return stride;
  }

  DType dtype() const {
    const pybind11::object found = attribute(python.dtype);
    for (int i = 0; i < 3; i++)
      if (found.ptr() == python.dtypes[i]) return DType(i);
    throw std::invalid_argument("fastattn: unknown dtype");
  }
  int device() const { return static_cast<int>(PyLong_AsLong(call(python.get_device).ptr())); }  // -1: the CPU

  Tensor contiguous_copy(pybind11::object& owner) const {
    const auto format = pybind11::module_::import("torch").attr("contiguous_format");
    owner = object_.attr("clone")(pybind11::arg("memory_format") = format);
    return Tensor(owner);
  }

 private:
  pybind11::object call(PyObject* method) const { return checked(PyObject_CallMethodNoArgs(object_.ptr(), method)); }
  pybind11::object attribute(PyObject* name) const { return checked(PyObject_GetAttr(object_.ptr(), name)); }

  static pybind11::object checked(PyObject* made) {
    if (made == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  }

  template <size_t n>
  static std::array<int64_t, n> integers(const pybind11::object& tuple) {
    if (PyTuple_Size(tuple.ptr()) < static_cast<Py_ssize_t>(n))
      throw std::invalid_argument("fastattn: too few dimensions");
    std::array<int64_t, n> numbers;
    for (size_t i = 0; i < n; i++) numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), i));
    return numbers;
  }

  pybind11::handle object_;
};

// A tensor whose dtype a kernel reads when it runs; or none.
inline Array array(const Tensor& t) { return t ? Array{t, t.dtype()} : Array{}; }

// As constants.dropout_constants() of fastattn/backends/ calculates them; nearbyint rounds as Python does.
inline Dropout dropout(const Tensor& rng_state, double dropout_p) {
  const double scale = dropout_p >= 1 ? 0 : 1 / (1 - dropout_p);
  return {rng_state, static_cast<uint32_t>(std::nearbyint(dropout_p * 65536)), static_cast<float>(scale)};
}

// The device of a tensor, current while in scope, and its current stream of PyTorch.
class Stream {
 public:
  explicit Stream(const Tensor& t) : index_(t.device()), guard_(device()), stream_(current(index_)) {}

  int device() const { return std::max(index_, 0); }  // the emulator's is the CPU, which has no index
  operator CUstream_st*() const { return stream_; }

 private:
  static CUstream_st* current(int index) {
    if (index < 0) return nullptr;
    const auto number = pybind11::handle(python.current_stream)(index);
    return static_cast<CUstream_st*>(PyLong_AsVoidPtr(number.ptr()));
  }

  int index_;
  DeviceGuard guard_;
  CUstream_st* stream_;
};

}  // namespace fastattn

namespace pybind11::detail {

// Arguments Tensor are Python objects that are only looked at.
template <>
struct type_caster<fastattn::Tensor> {
  PYBIND11_TYPE_CASTER(fastattn::Tensor, const_name("torch.Tensor | None"));
  bool load(handle source, bool /*convert*/) {
    value = fastattn::Tensor(source);
    return true;
  }
};

// Arguments DType are torch.float32, torch.bfloat16 or torch.float16.
template <>
struct type_caster<fastattn::DType> {
  PYBIND11_TYPE_CASTER(fastattn::DType, const_name("torch.dtype"));
  bool load(handle source, bool /*convert*/) {
    for (int i = 0; i < 3; i++)
      if (source.ptr() == fastattn::python.dtypes[i]) return value = fastattn::DType(i), true;
    return false;
  }
};

}  // namespace pybind11::detail
