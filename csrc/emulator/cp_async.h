// CPU version of common/cp_async.cuh. When a copy arrives: async.h.
#pragma once
#include <cstring>

#include "emulator/block.h"

namespace fastattn {

inline void cp_async(void* to, const void* from, bool inside, const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  emulator::Block& block = *emulator::Block::current;
  const std::string place = emulator::Site{"cp_async", file, line}.text();
  block.shared_offset(to, 16, place.c_str());
  if ((reinterpret_cast<uintptr_t>(to) | (inside ? reinterpret_cast<uintptr_t>(from) : 0)) % 16 != 0)
    block.fail(place + ": an address is not a multiple of 16");
  block.start(block.thread->copies, [=] { inside ? std::memcpy(to, from, 16) : std::memset(to, 0, 16); });
}

inline void cp_async_commit() { emulator::Block::current->thread->copies.commit(); }

template <int kUnderWay>
void cp_async_wait() {
  emulator::Block::current->thread->copies.wait(kUnderWay);
}

}  // namespace fastattn
