// FASTATTN_CHECK(call): a CUDA error becomes an exception (a RuntimeError in Python) that names the call and its source
// line.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define FASTATTN_CHECK(call)                                                                  \
  do {                                                                                        \
    const cudaError_t error_ = (call);                                                        \
    if (error_ != cudaSuccess)                                                                \
      throw std::runtime_error(std::string("fastattn: ") + cudaGetErrorString(error_) +       \
                               ", in " #call " at " __FILE__ ":" + std::to_string(__LINE__)); \
  } while (0)
