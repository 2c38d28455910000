// Used by every op's bind.h: what a binding reads of Python's tensors.
//
// An op's bind.h is Python's view of the op: one function for each direction, which gets tensors as they are. Python
// has checked them. The library is built without PyTorch: a tensor is asked through its methods, 20 to 60 ns each.
#pragma once
#include "common/python.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/device.h"
#include "common/dropout.h"
#include "common/dtype_switch.h"

namespace fastattn {

// Python's names and objects that are needed in each call. The module keeps them for good.
struct Python {
  PyObject *data_ptr, *shape, *stride, *dtype, *get_device, *tensor, *contiguous_format;
  PyObject* dtypes[3];       // as DType numbers them
  PyObject* current_stream;  // of a device's number; null where PyTorch has no CUDA
};
inline Python python;

inline void load_python() {
  const auto name = [](const char* text) { return Object(PyUnicode_InternFromString(text)).release(); };
  const Object torch(PyImport_ImportModule("torch")), internals(PyImport_ImportModule("torch._C"));
  const auto get = [](PyObject* of, const char* text) { return Object(PyObject_GetAttrString(of, text)).release(); };
  const char* const stream = "_cuda_getCurrentRawStream";
  python = {name("data_ptr"),
            name("shape"),
            name("stride"),
            name("dtype"),
            name("get_device"),
            get(torch, "Tensor"),
            get(torch, "contiguous_format"),
            {get(torch, "float32"), get(torch, "bfloat16"), get(torch, "float16")},
            PyObject_HasAttrString(internals, stream) ? get(internals, stream) : nullptr};
}

// torch.float32, torch.bfloat16 or torch.float16.
template <>
inline DType from_python(PyObject* object) {
  for (int i = 0; i < 3; i++)
    if (object == python.dtypes[i]) return DType(i);
  raise(PyExc_TypeError, "torch.float32, torch.bfloat16 or torch.float16 is needed");
}

// A tensor, or None. It is only looked at.
class Tensor {
 public:
  explicit Tensor(PyObject* object) : object_(object) {
    if (object != Py_None && !PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(python.tensor)))
      raise(PyExc_TypeError, "a torch.Tensor or None is needed");
  }

  explicit operator bool() const { return object_ != Py_None; }

  // The address of the first element; null for None.
  template <class T>
  operator T*() const {
    return object_ == Py_None ? nullptr : static_cast<T*>(from_python<void*>(call(python.data_ptr)));
  }

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

  DType dtype() const { return from_python<DType>(attribute(python.dtype)); }
  int device() const { return from_python<int>(call(python.get_device)); }  // -1: the CPU

  Object contiguous_copy() const {
    const Object clone(PyObject_GetAttrString(object_, "clone")), nothing(PyTuple_New(0));
    const Object options(Py_BuildValue("{sO}", "memory_format", python.contiguous_format));
    return Object(PyObject_Call(clone, nothing, options));
  }

 private:
  Object call(PyObject* method) const { return Object(PyObject_CallMethodObjArgs(object_, method, nullptr)); }
  Object attribute(PyObject* name) const { return Object(PyObject_GetAttr(object_, name)); }

  template <size_t n>
  static std::array<int64_t, n> integers(const Object& object) {
    const Tuple tuple(object);
    if (tuple.size() < static_cast<Py_ssize_t>(n)) throw std::invalid_argument("fastattn: too few dimensions");
    std::array<int64_t, n> numbers;
    for (size_t i = 0; i < n; i++) numbers[i] = tuple.at<int64_t>(static_cast<int>(i));
    return numbers;
  }

  PyObject* object_;
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
    const Object of(PyLong_FromLong(index));
    const Object stream(PyObject_CallFunctionObjArgs(python.current_stream, static_cast<PyObject*>(of), nullptr));
    return static_cast<CUstream_st*>(from_python<void*>(stream));
  }

  int index_;
  DeviceGuard guard_;
  CUstream_st* stream_;
};

}  // namespace fastattn
