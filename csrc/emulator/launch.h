// Launching a kernel on the CPU: the blocks run one after the other, to the end, before launch() returns. With
// FASTATTN_EMULATOR_LAUNCHES=file nothing runs: each launch adds a line to the file, with the kernel's address in this
// library, the number of blocks, of threads in a block, and the bytes of shared memory. Tests read it.
#pragma once
#include "emulator/block.h"

namespace fastattn {
namespace emulator {

bool has_current_context();  // the calling thread

void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

}  // namespace emulator

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t /*stream*/,
            Arguments... arguments) {
  emulator::run_grid(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, [&] { kernel(arguments...); });
}

template <class Shared>
Shared& shared_memory() {
  return *reinterpret_cast<Shared*>(emulator::Block::current->shared);
}

}  // namespace fastattn
