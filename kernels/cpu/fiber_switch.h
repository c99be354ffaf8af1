// Switching stacks by hand: all inline assembly of the CPU target.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Saves the callee-saved registers and the stack pointer of the running context to *from and resumes `to`.
void hisparse_switch_stack(void** from, void* to);
// Where a fresh fiber starts: calls the entry function that prepare_stack put into a callee-saved register.
void hisparse_fiber_start();
}

namespace hisparse::cpu {
void* prepare_stack(unsigned char* stack, size_t bytes, void (*entry)());
}

#if defined(HISPARSE_DEFINE_FIBER_SWITCH)
#if defined(__x86_64__)

asm(R"(
.text
.p2align 4
.globl hisparse_switch_stack
.hidden hisparse_switch_stack
.type hisparse_switch_stack,@function
hisparse_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hisparse_switch_stack,.-hisparse_switch_stack
.p2align 4
.globl hisparse_fiber_start
.hidden hisparse_fiber_start
.type hisparse_fiber_start,@function
hisparse_fiber_start:
  callq *%r12
  ud2
.size hisparse_fiber_start,.-hisparse_fiber_start
)");

void* hisparse::cpu::prepare_stack(unsigned char* stack, size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(stack + bytes) - 2;
  *--top = reinterpret_cast<uintptr_t>(&hisparse_fiber_start);
  for (uintptr_t saved : {uintptr_t{0}, uintptr_t{0}, reinterpret_cast<uintptr_t>(entry), uintptr_t{0},
                          uintptr_t{0}, uintptr_t{0}})  // rbp, rbx, r12 ... r15
    *--top = saved;
  return top;
}

#elif defined(__aarch64__)

asm(R"(
.text
.p2align 4
.globl hisparse_switch_stack
.hidden hisparse_switch_stack
.type hisparse_switch_stack,%function
hisparse_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size hisparse_switch_stack,.-hisparse_switch_stack
.p2align 4
.globl hisparse_fiber_start
.hidden hisparse_fiber_start
.type hisparse_fiber_start,%function
hisparse_fiber_start:
  blr x19
  brk #1
.size hisparse_fiber_start,.-hisparse_fiber_start
)");

void* hisparse::cpu::prepare_stack(unsigned char* stack, size_t bytes, void (*entry)()) {
  auto* frame = reinterpret_cast<uintptr_t*>(stack + bytes) - 20;
  for (int i = 0; i < 20; ++i) frame[i] = 0;
  frame[0] = reinterpret_cast<uintptr_t>(entry);                   // x19
  frame[11] = reinterpret_cast<uintptr_t>(&hisparse_fiber_start);  // x30
  return frame;
}

#else
#error "the CPU target knows x86-64 and AArch64"
#endif
#endif
