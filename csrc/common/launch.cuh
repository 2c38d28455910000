// Included first by every kernel source: launches, shared memory and named barriers, for nvcc and for csrc/emulator.
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
#include <map>
#include <mutex>
#include <utility>

#include "common/check.h"

namespace fastattn {

// Asks for more than 48 KiB of shared memory where a kernel has not got as much on the current device yet. The runtime
// needs up to a microsecond. Never asks for less than before: another thread may be about to launch with that.
inline void allow_shared_memory(const void* kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (bytes <= kWithoutAsking) return;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;  // of a kernel and a device
  int device;
  FASTATTN_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  FASTATTN_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  most = bytes;
}

}  // namespace fastattn

#ifdef FASTATTN_EMULATOR
#include "emulator/intrinsics.h"
#include "emulator/launch.h"
#else
namespace fastattn {

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  FASTATTN_CHECK(cudaGetLastError());
}

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
  extern __shared__ __align__(1024) unsigned char fastattn_shared[];  // swizzled tiles need it
  return *reinterpret_cast<Shared*>(fastattn_shared);
}

// Named barrier `id` (1 to 15) of `threads` threads, whole warps: waits for all of them, or arrives and continues.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace fastattn
#endif
