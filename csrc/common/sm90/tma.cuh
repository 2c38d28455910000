// TMA and bulk copies of Hopper: one thread moves a whole tile.
//
// Coordinates are those of a box's first element, innermost first, and may be outside the tensor. In shared memory a
// box is contiguous, innermost dimension first, at a multiple of 128 bytes, and addressed by swizzled().
// Loads signal a barrier that expects all bytes of the box. Before a store, each thread that wrote to shared memory
// calls fence_async_proxy(), and a barrier follows. Stores form groups, as cp.async does: after bulk_wait the results
// are in memory, after bulk_wait_read the source may be overwritten.
#pragma once
#include "common/sm90/barrier.cuh"
#include "common/sm90/tensor_map.h"

#ifdef FASTATTN_EMULATOR
#include "emulator/tma.h"
#else

namespace fastattn::sm90 {

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, Barrier& barrier, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Contiguous bytes; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_add(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most the kUnderWay latest groups of this thread are not done.
template <int kUnderWay>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kUnderWay) : "memory");
}
template <int kUnderWay>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kUnderWay) : "memory");
}

}  // namespace fastattn::sm90
#endif

namespace fastattn::sm90 {

constexpr int kLineBytes = 128;  // of a swizzled tile: 64 elements of 16 bits

// The byte offset of 16-byte chunk `chunk` of line `line` in a swizzled tile, which starts at a multiple of 1024.
__device__ __forceinline__ int swizzled(int line, int chunk) { return line * kLineBytes + ((chunk ^ (line % 8)) * 16); }

}  // namespace fastattn::sm90
