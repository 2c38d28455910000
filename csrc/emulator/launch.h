// Launching a kernel on the CPU: all blocks run to the end before launch() returns.
#pragma once
#include <vector>

#include "emulator/block.h"

namespace fastattn {
namespace emulator {

bool has_current_context();  // the calling thread

// While recording(), nothing runs, and launch() adds to recorded(). Tests read it, and it leaves the host's part of a
// launch, whose time is measured.
struct Launch {
  uintptr_t kernel;
  uint64_t blocks, threads, shared_bytes;  // threads and shared memory of a block
};
bool& recording();
std::vector<Launch>& recorded();

void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

}  // namespace emulator

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t /*stream*/,
            Arguments... arguments) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  emulator::run_grid(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, [&] { kernel(arguments...); });
}

template <class Shared>
Shared& shared_memory() {
  return *reinterpret_cast<Shared*>(emulator::Block::current->shared);
}

}  // namespace fastattn
