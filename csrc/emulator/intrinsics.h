// The keywords and intrinsics of CUDA that fastattn's kernels use, for a C++ compiler. Replaces nvcc's.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulator/block.h"

// CUDA's headers define these for other compilers, too, as attributes that g++ does not accept here.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#undef __grid_constant__
#define __grid_constant__

#define threadIdx (::fastattn::emulator::Block::current->thread->index)
#define blockIdx (::fastattn::emulator::Block::current->index)
#define blockDim (::fastattn::emulator::Block::current->dim)
#define gridDim (::fastattn::emulator::Block::current->grid)

using std::max;
using std::min;

namespace fastattn::emulator {

// A collective: each lane of the mask gives a value and gets take(lane, value_of), where value_of(lane) is another
// lane's.
template <class T, class Take>
T exchange(uint32_t mask, T value, Site site, Take take) {
  struct Slot {
    T brought, received;
  } mine{value, value};
  Block& block = *Block::current;
  block.collective(mask, &mine, site, [&](void* const* slots) {
    for (int lane = 0; lane < kLanes; lane++) {
      if ((mask >> lane & 1) == 0) continue;
      static_cast<Slot*>(slots[lane])->received = take(lane, [&](int other) {
        if ((mask >> other & 1) == 0)
          block.fail(site.text() + ": lane " + std::to_string(lane) + " reads lane " + std::to_string(other) +
                     ", which is not in the mask");
        return static_cast<Slot*>(slots[other])->brought;
      });
    }
  });
  return mine.received;
}

}  // namespace fastattn::emulator

// The last two parameters are the place in the kernel's source.
#define FASTATTN_EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define FASTATTN_EMULATOR_SITE (::fastattn::emulator::Site{__func__, file, line})

inline void __syncthreads(FASTATTN_EMULATOR_PLACE) {
  fastattn::emulator::Block::current->barrier(FASTATTN_EMULATOR_SITE);
}

namespace fastattn {

inline void named_barrier_sync(int id, int threads, FASTATTN_EMULATOR_PLACE) {
  emulator::Block::current->named_barrier(id, threads, true, FASTATTN_EMULATOR_SITE);
}
inline void named_barrier_arrive(int id, int threads, FASTATTN_EMULATOR_PLACE) {
  emulator::Block::current->named_barrier(id, threads, false, FASTATTN_EMULATOR_SITE);
}

}  // namespace fastattn

inline void __syncwarp(uint32_t mask = 0xffffffffu, FASTATTN_EMULATOR_PLACE) {
  fastattn::emulator::exchange(mask, 0, FASTATTN_EMULATOR_SITE, [](int, auto) { return 0; });
}

// Each lane gives its own source lane.
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, FASTATTN_EMULATOR_PLACE) {
  struct Brought {
    T value;
    int source;
  };
  const auto take = [](int lane, auto brought) { return Brought{brought(brought(lane).source % 32).value, 0}; };
  return fastattn::emulator::exchange(mask, Brought{value, source}, FASTATTN_EMULATOR_SITE, take).value;
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, FASTATTN_EMULATOR_PLACE) {
  const auto take = [&](int lane, auto value_of) { return value_of(lane ^ bits); };
  return fastattn::emulator::exchange(mask, value, FASTATTN_EMULATOR_SITE, take);
}

// Of each half of a word, without a carry into the other.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline uint32_t __viaddmin_u16x2(uint32_t a, uint32_t b, uint32_t most) {
  return std::min(((a >> 16) + (b >> 16)) & 0xffff, most >> 16) << 16 | std::min((a + b) & 0xffff, most & 0xffff);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, FASTATTN_EMULATOR_PLACE) {
  const auto take = [&](int, auto value_of) {
    uint32_t ballot = 0;
    for (int lane = 0; lane < fastattn::emulator::kLanes; lane++)
      if (mask >> lane & 1) ballot |= value_of(lane) << lane;
    return ballot;
  };
  return fastattn::emulator::exchange(mask, static_cast<uint32_t>(predicate != 0), FASTATTN_EMULATOR_SITE, take);
}

// Threads run one at a time, so each access is atomic and ordered. Then other blocks may run.
template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  auto& block = *fastattn::emulator::Block::current;
  if (!block.is_shared(address)) block.yield();
  return old;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline void __threadfence() {}

inline int __popc(uint32_t word) { return __builtin_popcount(word); }
