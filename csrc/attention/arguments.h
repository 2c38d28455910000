// From fastattn/backends/cuda/attention.py to the structs of attention.h and backward.h, which Python fills field by field. Addresses
// come as integers, 0 for null; Rows, Bias, Dropout and Shape as tuples of their members.
#pragma once
#include <pybind11/stl.h>

#include <array>
#include <type_traits>

#include "attention/attention.h"
#include "common/bind.h"

namespace fastattn::attention {

// What Python gives for a field of each type.
inline Rows convert(const std::array<int64_t, 4>& t, Rows*) { return {pointer<void>(t[0]), t[1], t[2], t[3]}; }
inline Bias convert(const std::array<int64_t, 6>& t, Bias*) {
  return {pointer<void>(t[0]), t[1], t[2], t[3], t[4], DType(t[5])};
}
inline Dropout convert(const std::tuple<int64_t, uint32_t, float>& t, Dropout*) {
  return {pointer<int64_t>(std::get<0>(t)), std::get<1>(t), std::get<2>(t)};
}
inline Shape convert(const std::array<int, 7>& t, Shape*) { return {t[0], t[1], t[2], t[3], t[4], t[5], t[6]}; }
inline DType convert(int number, DType*) { return DType(number); }
template <class T>
T* convert(int64_t address, T**) { return pointer<T>(address); }

template <class Given, class Struct, class Value>
void field(pybind11::class_<Struct>& type, const char* name, Value Struct::*member) {
  type.def_property(name, nullptr, [member](Struct& s, const Given& given) {
    s.*member = convert(given, static_cast<Value*>(nullptr));
  });
}

// The fields that Forward, Backward and Weights share.
template <class Struct>
void common_fields(pybind11::class_<Struct>& type) {
  type.def(pybind11::init([] { return Struct{}; }));
  field<std::array<int64_t, 4>>(type, "q", &Struct::q);
  field<std::array<int64_t, 4>>(type, "k", &Struct::k);
  field<int64_t>(type, "lse", &Struct::lse);
  field<std::array<int, 7>>(type, "shape", &Struct::shape);
  field<std::array<int64_t, 6>>(type, "bias", &Struct::bias);
  field<std::tuple<int64_t, uint32_t, float>>(type, "dropout", &Struct::dropout);
  field<int>(type, "dtype", &Struct::dtype);
  type.def_readwrite("softmax_scale", &Struct::softmax_scale);
  type.def_readwrite("tf32", &Struct::tf32);
}

}  // namespace fastattn::attention
