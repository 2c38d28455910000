// A fiber: a call stack that runs until it switches to another. Each CUDA thread in the emulator is one.
//
// The switch is in assembly, for x86-64 and aarch64: fiber.cpp.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <new>

namespace fastattn::emulator {

// 128 KiB of stack, of which only used pages cost memory, above a page that faults: 4 KiB, or 64 on some aarch64.
class Stack {
 public:
  static constexpr size_t kBytes = 128 << 10;

  Stack() : guard_(sysconf(_SC_PAGESIZE)) {
    void* const mapped = mmap(nullptr, guard_ + kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapped, guard_, PROT_NONE);
    base_ = static_cast<char*>(mapped) + guard_;
  }
  ~Stack() {
    if (base_ != nullptr) munmap(base_ - guard_, guard_ + kBytes);
  }
  Stack(Stack&& other) noexcept : guard_(other.guard_), base_(other.base_) { other.base_ = nullptr; }
  Stack& operator=(Stack&&) = delete;

  char* top() const { return base_ + kBytes; }

 private:
  const size_t guard_;
  char* base_;
};

// Saves the registers that a call preserves on the stack, and its pointer in *from; then continues on the stack `to`,
// where this function or start() saved the same.
extern "C" void fastattn_switch_stacks(void** from, void* to);

class Fiber {
 public:
  void start(const Stack& stack, void (*entry)()) {
    void** const frame = reinterpret_cast<void**>(stack.top()) - kFrame;
    std::fill_n(frame, kFrame, nullptr);  // return address 0 of entry, which never returns: unwinders stop there
    frame[kEntry] = reinterpret_cast<void*>(entry);
    stack_pointer_ = frame;
  }
  static void switch_between(Fiber& from, Fiber& to) {
    fastattn_switch_stacks(&from.stack_pointer_, to.stack_pointer_);
  }

 private:
  // The words on a fresh stack, and which of them is the address to continue at: entry then has the alignment of a
  // call.
#ifdef __x86_64__
  static constexpr int kFrame = 10, kEntry = 6;
#else
  static constexpr int kFrame = 22, kEntry = 20;
#endif
  void* stack_pointer_ = nullptr;
};

}  // namespace fastattn::emulator
