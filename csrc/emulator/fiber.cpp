// The switch between two fibers.
#include "emulator/fiber.h"

asm(".text\n"
    ".globl fastattn_switch_stacks\n"
    ".hidden fastattn_switch_stacks\n"
    ".type fastattn_switch_stacks, %function\n"
    "fastattn_switch_stacks:\n"
#ifdef __x86_64__  // from: rdi, to: rsi
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n"
#elif defined( \
    __aarch64__)  // from: x0, to: x1. The address to continue at has its own word: entry has a return address of 0.
    "hint #34\n"  // bti c: calls may land here
    "stp x29, x30, [sp, #-176]!\n"
    "stp x19, x20, [sp, #16]\n stp x21, x22, [sp, #32]\n stp x23, x24, [sp, #48]\n"
    "stp x25, x26, [sp, #64]\n stp x27, x28, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "str x30, [sp, #160]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldr x9, [sp, #160]\n"
    "ldp d14, d15, [sp, #144]\n ldp d12, d13, [sp, #128]\n ldp d10, d11, [sp, #112]\n ldp d8, d9, [sp, #96]\n"
    "ldp x27, x28, [sp, #80]\n ldp x25, x26, [sp, #64]\n"
    "ldp x23, x24, [sp, #48]\n ldp x21, x22, [sp, #32]\n ldp x19, x20, [sp, #16]\n"
    "ldp x29, x30, [sp], #176\n"
    "ret x9\n"
#else
#error "fastattn's emulator runs on x86-64 and aarch64"
#endif
    ".size fastattn_switch_stacks, .-fastattn_switch_stacks\n");
