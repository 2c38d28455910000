// A fiber: a call stack that runs until it switches to another. Each CUDA thread of the CPU runner is one.
//
// On x86-64 and aarch64 a switch is some twenty instructions (fiber.cpp); elsewhere, or with FASTATTN_EMULATOR_UCONTEXT defined,
// it is POSIX swapcontext. The runner's tests ran on aarch64 by emulation, with both, and with pages of 4 and 64 KiB.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <new>
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(FASTATTN_EMULATOR_UCONTEXT)
#define FASTATTN_EMULATOR_UCONTEXT
#endif
#ifdef FASTATTN_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace fastattn::emulator {

// 128 KiB of stack, of which only the touched pages cost memory, above a page that faults: 4 KiB, or 64 on some aarch64.
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

  char* base() const { return base_; }
  char* top() const { return base_ + kBytes; }

 private:
  const size_t guard_;
  char* base_;
};

#ifdef FASTATTN_EMULATOR_UCONTEXT

class Fiber {
 public:
  void start(const Stack& stack, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack.base();
    context_.uc_stack.ss_size = Stack::kBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  static void switch_between(Fiber& from, Fiber& to) { swapcontext(&from.context_, &to.context_); }

 private:
  ucontext_t context_;
};

#else

// Leaves the registers that a call preserves on the stack, its pointer in *from, and continues on the stack `to`, where this
// or start() left the same.
extern "C" void fastattn_switch_stacks(void** from, void* to);

class Fiber {
 public:
  void start(const Stack& stack, void (*entry)()) {
    void** const frame = reinterpret_cast<void**>(stack.top()) - kFrame;
    std::fill_n(frame, kFrame, nullptr);  // entry returns to address 0: it never does, and there an unwinder stops
    frame[kEntry] = reinterpret_cast<void*>(entry);
    stack_pointer_ = frame;
  }
  static void switch_between(Fiber& from, Fiber& to) { fastattn_switch_stacks(&from.stack_pointer_, to.stack_pointer_); }

 private:
  // Words on a fresh stack, and which of them is where to continue: after these, entry finds the alignment that a call has.
#ifdef __x86_64__
  static constexpr int kFrame = 10, kEntry = 6;
#else
  static constexpr int kFrame = 22, kEntry = 20;
#endif
  void* stack_pointer_ = nullptr;
};

#endif

}  // namespace fastattn::emulator
