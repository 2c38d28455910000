// Barriers of Hopper: mbarriers, which also count the bytes of TMA loads.
//
// A Barrier is in shared memory. Its phases are numbered from 0. A phase ends when `arrivals` threads have arrived and
// all announced bytes are loaded. wait(parity) returns when the phase of that parity (phase number % 2) has ended: a
// fresh barrier lets wait(1) pass, as if phase -1 had ended.
#pragma once
#include "common/cp_async.cuh"

#ifdef FASTATTN_EMULATOR
#include "emulator/mbarrier.h"
#else

namespace fastattn::sm90 {

struct Barrier {
  uint64_t state;

  // Called by one thread, which then calls fence_barrier_init(); a barrier of the block follows.
  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives, if `condition` holds, without a branch.
  __device__ __forceinline__ void arrive_if(bool condition) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                     shared_address(this)),
                 "r"(static_cast<int>(condition))
                 : "memory");
  }
  // Arrives, and announces the bytes that TMA or a bulk copy will load.
  __device__ __forceinline__ void arrive_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra.uni DONE;\nbra.uni AGAIN;\nDONE:\n}" ::
            "r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the asynchronous proxy: to wgmma, TMA and bulk copies.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same instruction, used after this thread has read what TMA or a bulk copy will overwrite: it orders the reads.
__device__ __forceinline__ void fence_async_proxy_after_reads() { fence_async_proxy(); }

// A counter in global memory, by which blocks take turns: waits until it is `count`. What other blocks wrote before
// they raised it is then visible, also what they wrote by bulk copies that they had waited for.
__device__ __forceinline__ void wait_for_count(const int* counter, int count) {
  int found;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  while (found != count);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void raise_count(int* counter) {
  asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace fastattn::sm90
#endif
