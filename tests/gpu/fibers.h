// Threads of one CUDA block as fibers of one CPU thread, for executing kernels in tests.
//
// Waves run one after the other, each lane until it meets the others: at a shuffle or vote (all lanes of its wave
// must come), at a barrier (all threads of the block), or at the kernel's end. Anything else is divergence, which a
// GPU answers with a hang or with garbage, and which ends the launch here with a sentence. Every other block runs its
// waves and lanes from the last to the first: what is right in both orders does not lean on either.
#pragma once

// C's headers only: the C++ ones take longer to compile than a kernel does.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

namespace fibers {

enum State { READY, AT_WAVE, AT_BARRIER, DONE };

constexpr size_t STACK = 256 * 1024;
constexpr int THREADS = 128;  // of a block, at most
constexpr int SLOT = 64;  // bytes that a lane can hand to its wave at one meeting

struct Fiber {
  State state;
  const char* meeting;  // what it waits for at AT_WAVE
  int parity;           // slots alternate: a fast lane may write its next before a slow one has read the last
  alignas(16) char slot[2][SLOT];
  char* stack;
  void* stack_pointer;
  ucontext_t context;
};

inline Fiber all[THREADS];
inline int current, wave = 32;
inline bool backwards;
inline void (*body)();
inline void* scheduler_pointer;
inline ucontext_t scheduler_context;
inline char report[256];

#if defined(__x86_64__) && !defined(FIBERS_PORTABLE)

// Save the callee-saved registers on this stack, change stacks, restore. About 15 times as fast as swapcontext, which
// asks the kernel about signals each time.
extern "C" void fibers_switch(void** save, void* load);
asm(R"(.text
.globl fibers_switch
.type fibers_switch, @function
fibers_switch:
  endbr64
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
.size fibers_switch, .-fibers_switch
)");

inline void to_scheduler() { fibers_switch(&all[current].stack_pointer, scheduler_pointer); }

inline void to_fiber(int i) {
  current = i;
  fibers_switch(&scheduler_pointer, all[i].stack_pointer);
}

inline void prepare(Fiber& fiber, void (*entry)()) {
  void** top = (void**)(((size_t)fiber.stack + STACK) & ~(size_t)15);
  *--top = nullptr;        // keeps the stack aligned as a call would
  *--top = (void*)entry;   // where the first switch returns to
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.stack_pointer = top;
}

#else

inline void to_scheduler() { swapcontext(&all[current].context, &scheduler_context); }

inline void to_fiber(int i) {
  current = i;
  swapcontext(&scheduler_context, &all[i].context);
}

inline void prepare(Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#endif

inline void wait(State state, const char* meeting = "") {
  all[current].state = state;
  all[current].meeting = meeting;
  to_scheduler();
}

inline void run_body() {
  body();
  wait(DONE);
  abort();  // a finished fiber is never resumed
}

// Hand `value` to the wave, wait for all of it, and return where lane `i` of the wave put its own.
template <typename T>
struct Meeting {
  int parity, first;

  Meeting(const T& value, const char* name) {
    static_assert(sizeof(T) <= SLOT, "a slot is too small");
    Fiber& me = all[current];
    parity = me.parity ^= 1;
    memcpy(me.slot[parity], &value, sizeof(T));
    first = current / wave * wave;
    wait(AT_WAVE, name);
  }

  const T& of(int lane) const { return *(const T*)all[first + lane].slot[parity]; }
};

inline bool fail(const char* what, int thread) {
  snprintf(report, sizeof(report), "%s, thread %d", what, thread);
  return false;
}

// Run one wave until all of its lanes stand at a barrier or are done.
inline bool run_wave(int first, int end) {
  for (;;) {
    int meeting = 0;
    for (int i = 0; i < wave; i++) {
      const int lane = backwards ? end - 1 - i : first + i;
      if (all[lane].state == READY || all[lane].state == AT_WAVE) to_fiber(lane);
    }
    for (int i = first; i < end; i++) meeting += all[i].state == AT_WAVE;
    if (meeting == 0) return true;
    for (int i = first; i < end; i++) {
      if (all[i].state != AT_WAVE) return fail("divergence: a lane misses its wave's shuffle or vote", i);
      if (strcmp(all[i].meeting, all[first].meeting)) return fail("divergence: lanes meet at different operations", i);
    }
  }
}

// Run one block; false, with `report` set, where its threads diverge.
inline bool run_block(int threads) {
  for (int i = 0; i < threads; i++) {
    if (!all[i].stack) all[i].stack = (char*)aligned_alloc(64, STACK);
    all[i].state = READY;
    all[i].parity = 0;
    prepare(all[i], run_body);
  }
  for (;;) {
    int done = 0;
    for (int passed = 0; passed < threads; passed += wave) {
      const int first = backwards ? threads - wave - passed : passed;
      if (!run_wave(first, first + wave)) return false;
    }
    for (int i = 0; i < threads; i++) done += all[i].state == DONE;
    if (done == threads) return true;
    for (int i = 0; i < threads; i++) {
      if (all[i].state == DONE) return fail("divergence: a thread ends before the block's barrier", i);
      all[i].state = READY;
    }
  }
}

}  // namespace fibers
