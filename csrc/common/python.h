// Functions of C++ for Python, by its limited API: one build serves CPython 3.10 and all later ones.
#pragma once
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace fastattn {

// Thrown where a Python error is set. Python gets it when the function that it called ends.
struct PythonError {};

template <class... Values>
[[noreturn]] void raise(PyObject* error, const char* format, Values... values) {
  PyErr_Format(error, format, values...);
  throw PythonError();
}

// What a function of Python returned. At an error that is null or -1, which may also be results.
template <class T>
T checked(T returned) {
  if (returned == T(intptr_t{std::is_pointer_v<T> ? 0 : -1}) && PyErr_Occurred() != nullptr) throw PythonError();
  return returned;
}

// A reference that is owned.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* made) : object_(checked(made)) {}
  Object(const Object& other) noexcept : object_(other.object_) { Py_IncRef(object_); }
  Object& operator=(Object other) noexcept { return std::swap(object_, other.object_), *this; }
  ~Object() { Py_DecRef(object_); }  // a function, where Py_DECREF would be that of the Python of the build

  operator PyObject*() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// A Python object as a T. A TypeError if it is another; an OverflowError if an integer does not fit.
template <class T>
T from_python(PyObject* object) {
  if constexpr (std::is_same_v<T, bool>) {
    if (!PyNumber_Check(object)) raise(PyExc_TypeError, "a bool is needed");
    return checked(PyObject_IsTrue(object)) != 0;
  } else if constexpr (std::is_integral_v<T>) {
    const long long number = checked(PyLong_AsLongLong(object));
    if (number != static_cast<T>(number)) raise(PyExc_OverflowError, "the int is too large");
    return static_cast<T>(number);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(checked(PyFloat_AsDouble(object)));
  } else if constexpr (std::is_same_v<T, void*>) {
    return checked(PyLong_AsVoidPtr(object));
  } else {
    return T(object);
  }
}

// A tuple that is only looked at.
struct Tuple {
  Tuple(PyObject* object) : object(object) {
    if (!PyTuple_Check(object)) raise(PyExc_TypeError, "a tuple is needed");
  }
  Py_ssize_t size() const { return PyTuple_Size(object); }

  template <class T>
  T at(int i) const {
    return from_python<T>(checked(PyTuple_GetItem(object, i)));
  }

  PyObject* object;
};

// An integer, a text, or a tuple of such.
template <class T>
Object to_python(const T& value) {
  if constexpr (std::is_integral_v<T>) {
    return Object(PyLong_FromLongLong(value));
  } else if constexpr (std::is_same_v<T, std::string>) {
    return Object(PyUnicode_FromString(value.c_str()));
  } else if constexpr (std::is_same_v<T, Object>) {
    return value;
  } else {
    const auto pack = [](auto... of) { return PyTuple_Pack(sizeof...(of), static_cast<PyObject*>(to_python(of))...); };
    return Object(std::apply(pack, value));
  }
}

// What f returns. Null if it throws: the Python error is set.
template <class F>
PyObject* caught(const F& f) noexcept {
  try {
    return f();
  } catch (const PythonError&) {
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "fastattn: an unknown C++ exception");
  }
  return nullptr;
}

// The next argument of a function. A TypeError or an OverflowError says which one it is.
template <class T>
T argument(const char* function, PyObject* const* given, int& i) {
  try {
    return from_python<T>(given[i++]);
  } catch (const PythonError&) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_OverflowError)) throw;
    PyObject *type, *said, *traceback;
    PyErr_Fetch(&type, &said, &traceback);
    PyErr_Format(type, "%s(): argument %d: %S", function, i, said);
    for (PyObject* const fetched : {type, said, traceback}) Py_DecRef(fetched);
    throw;
  }
}

// As Python calls a function: with as many arguments as it has, in order, of its types.
template <class Result, class... Arguments>
PyObject* call(Result (*function)(Arguments...), const char* name, [[maybe_unused]] PyObject* const* given,
               Py_ssize_t count) {
  const int expected = sizeof...(Arguments);
  if (count != expected) raise(PyExc_TypeError, "%s() takes %d arguments, got %zd", name, expected, count);
  [[maybe_unused]] int i = 0;
  const std::tuple<std::decay_t<Arguments>...> arguments{argument<std::decay_t<Arguments>>(name, given, i)...};
  if constexpr (!std::is_void_v<Result>) return to_python(std::apply(function, arguments)).release();
  std::apply(function, arguments);
  return Py_IncRef(Py_None), Py_None;
}

template <auto function>
void add_function(PyObject* module, const char* name) {
  static PyMethodDef methods[2];  // the second ends the list
  const auto called = [](PyObject* /*module*/, PyObject* const* given, Py_ssize_t count) {
    return caught([&] { return call(function, methods->ml_name, given, count); });
  };
  methods[0] = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(+called)), METH_FASTCALL, nullptr};
  checked(PyModule_AddFunctions(module, methods));
}

}  // namespace fastattn
