// How tests call the kernels of a .cu file in this folder: a table of names, and run_kernel(), which kernel_library.py
// loads.
#pragma once
#include <stdexcept>
#include <string>

// bug: 0 is none; others are numbered by the kernel's own enum.
struct Call {
  int bug;
  void* const* tensors;
  const int* numbers;
  template <class T>
  T* tensor(int i) const {
    return static_cast<T*>(tensors[i]);
  }
};

struct Named {
  const char* name;
  void (*run)(const Call&);
};

// Returns the error's text, or an empty string.
template <int kCount>
const char* run_named(const Named (&table)[kCount], const std::string& name, const Call& call) {
  static std::string message;
  message.clear();
  try {
    const Named* entry = table;
    while (entry < table + kCount && name != entry->name) entry++;
    if (entry == table + kCount) throw std::invalid_argument("no kernel " + name);
    entry->run(call);
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

#define EXPORT_KERNELS(table)                                                                                       \
  extern "C" __attribute__((visibility("default"))) const char* run_kernel(const char* name, int bug,               \
                                                                           void* const* tensors, const int* numbers) { \
    return run_named(table, name, {bug, tensors, numbers});                                                         \
  }
