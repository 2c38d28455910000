// A fiber: a call stack that runs until it switches to another. Each CUDA thread of the CPU runner is one.
//
// On x86-64 a switch is twelve instructions; elsewhere, or with FASTATTN_HOST_UCONTEXT defined, it is POSIX swapcontext.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>
#if !defined(__x86_64__) || defined(FASTATTN_HOST_UCONTEXT)
#define FASTATTN_HOST_UCONTEXT
#include <ucontext.h>
#endif

namespace fastattn::host {

// 128 KiB of stack, of which only the touched pages cost memory, above a page that faults.
class Stack {
 public:
  static constexpr size_t kBytes = 128 << 10;

  Stack() : base_(static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_, sysconf(_SC_PAGESIZE), PROT_NONE);
  }
  ~Stack() {
    if (base_ != nullptr) munmap(base_, kBytes);
  }
  Stack(Stack&& other) noexcept : base_(other.base_) { other.base_ = nullptr; }
  Stack& operator=(Stack&&) = delete;

  char* base() const { return base_; }
  char* top() const { return base_ + kBytes; }

 private:
  char* base_;
};

#ifdef FASTATTN_HOST_UCONTEXT

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

// Saves the registers that a call preserves, and continues on the stack `to`, where this or start() left them.
__attribute__((naked, noinline)) inline void switch_stacks(void** /*from: rdi*/, void* /*to: rsi*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

class Fiber {
 public:
  void start(const Stack& stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack.top()) - 2;
    *--top = nullptr;  // where entry would return to; it never does. Keeps the alignment that a call has.
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    stack_pointer_ = top;
  }
  static void switch_between(Fiber& from, Fiber& to) { switch_stacks(&from.stack_pointer_, to.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};

#endif

}  // namespace fastattn::host
