// Included first by every kernel source: launches and shared memory, for nvcc and for csrc/emulator.
//
//   launch(kernel, grid, block, shared_bytes, stream, arguments...)    checked; asynchronous on the device
//   Shared& shared = shared_memory<Shared>()                           in a kernel launched with sizeof(Shared) bytes
//
// A kernel has all its shared memory in one struct. The emulator can then fill it with NaN before each block, and
// notice writes outside of it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifdef FASTATTN_EMULATOR
#include "emulator/intrinsics.h"
#include "emulator/launch.h"
#else
#include "common/check.h"

namespace fastattn {

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking)
    FASTATTN_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  FASTATTN_CHECK(cudaGetLastError());
}

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(1024) unsigned char fastattn_shared[];  // swizzled tiles need it
  return *reinterpret_cast<Shared*>(fastattn_shared);
}

}  // namespace fastattn
#endif
