// Asynchronous copies from global to shared memory (Ampere's cp.async).
//
// A thread's copies since its last commit are a group. wait<n>() returns when at most the n latest groups are not done.
// Copies of other threads are visible after their wait and a barrier.
#pragma once
#include "common/launch.cuh"

#ifdef FASTATTN_EMULATOR
#include "emulator/cp_async.h"
#else

namespace fastattn {

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// 16 bytes, or 16 zero bytes unless `inside`; then `from` is not read. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kUnderWay>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kUnderWay) : "memory");
}

}  // namespace fastattn
#endif
