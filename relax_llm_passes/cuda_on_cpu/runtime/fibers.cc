// Fibers: one per CUDA thread, switched by hand at barriers and warp operations, and the scheduler
// that decides who runs next and what a barrier means.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "runtime.h"

extern "C" {
EmuContext emu_context;
void emu_switch(void** save_stack_pointer, void* load_stack_pointer);
}

// Saves the callee-saved registers of the System V x86-64 ABI on the old stack, takes them from the
// new one. The floating-point control words are the same in every fiber.
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
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
.size emu_switch, .-emu_switch
.section .note.GNU-stack, "", @progbits
.text
)");

namespace emu {

std::vector<Fiber> fibers;

static std::vector<int> ready, round_;
static void* scheduler_stack_pointer;
static void (*kernel_to_run)(void**);
static void** kernel_arguments;
static bool abandoned;

void make_ready(Fiber* f) {
  f->state = READY;
  ready.push_back(f->linear);
}

void yield_to_scheduler() {
  finish_pending_write();
  Fiber* f = running();
  emu_switch(&f->stack_pointer, scheduler_stack_pointer);
}

void abandon_launch() {
  abandoned = true;
  if (running()) yield_to_scheduler();
  __builtin_unreachable();
}

static void fiber_main() {
  kernel_to_run(kernel_arguments);
  Fiber* f = running();
  async_thread_exits(f);
  f->state = EXITED;
  lane_exited(f);
  yield_to_scheduler();
  __builtin_unreachable();
}

char* stacks_begin;
char* stacks_end;

// All stacks lie in one range of addresses, of which only the pages in use cost memory.
static char* stack_for(size_t i) {
  if (!stacks_begin) {
    stacks_begin = (char*)mmap(nullptr, STACK_SIZE * MOST_THREADS, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks_end = stacks_begin + STACK_SIZE * MOST_THREADS;
    // An overflow faults instead of running into the next stack.
    for (size_t k = 0; k < MOST_THREADS; k++)
      mprotect(stacks_begin + k * STACK_SIZE, 4096, PROT_NONE);
  }
  return stacks_begin + i * STACK_SIZE;
}

static void start_fiber(Fiber& f, int linear) {
  memset(static_cast<void*>(&f), 0, sizeof f);
  unsigned x = emu_context.block_size.x, y = emu_context.block_size.y;
  f.linear = linear;
  f.lane = linear & 31;
  f.index = {linear % x, linear / x % y, linear / x / y};
  f.stack = stack_for(linear);
  // Locals that the kernel forgot to set read as NaN.
  if (config.checks) poison(f.stack + STACK_SIZE - 8192, 8192);
  void** top = (void**)(f.stack + STACK_SIZE);
  *--top = nullptr;  // where fiber_main would return to; keeps the stack 16-byte aligned
  *--top = (void*)fiber_main;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  f.stack_pointer = top;
  make_ready(&f);
}

static void run_ready() {
  while (!ready.empty() && !abandoned) {
    round_.swap(ready);
    ready.clear();
    if (config.order == DESCENDING) {
      std::sort(round_.rbegin(), round_.rend());
    } else if (config.order == ASCENDING) {
      std::sort(round_.begin(), round_.end());
    } else {
      for (size_t i = round_.size() - 1; i > 0; i--)
        std::swap(round_[i], round_[random_bits() % (i + 1)]);
    }
    for (int i : round_) {
      Fiber& f = fibers[i];
      if (f.state != READY) continue;
      emu_context.thread = &f;
      emu_switch(&scheduler_stack_pointer, f.stack_pointer);
      if (abandoned) break;
    }
  }
  emu_context.thread = nullptr;
}

static std::string site_line(EmuSite site) { return "line " + std::to_string(site & 0xfffff); }

// All threads that have not exited wait at a barrier: release them. The programming guide wants
// every thread of the block at the same __syncthreads(); devices count arrivals.
static void release_barrier(int exited) {
  EmuSite site = 0;
  int first = -1;
  for (Fiber& f : fibers) {
    if (f.state != AT_BARRIER || !config.divergence) continue;
    if (first < 0) {
      first = f.linear;
      site = f.site;
    } else if (f.site != site) {
      finding("divergent-barrier",
              thread_name(first) + " waits at " + site_line(site) + ", " +
                  thread_name(f.linear) + " at " + site_line(f.site),
              f.site);
      break;
    }
  }
  if (exited && config.divergence)
    finding("divergent-barrier",
            std::to_string(fibers.size() - exited) + " threads wait at a barrier that " +
                std::to_string(exited) + " threads of the block never reach",
            site);
  finish_segment();
  order_barrier();
  current.barriers++;
  for (Fiber& f : fibers)
    if (f.state == AT_BARRIER) make_ready(&f);
}

bool run_block(void (*kernel)(void**), void** arguments) {
  kernel_to_run = kernel;
  kernel_arguments = arguments;
  abandoned = false;
  ready.clear();
  start_warps((int)fibers.size());
  for (size_t i = 0; i < fibers.size(); i++) start_fiber(fibers[i], (int)i);
  for (;;) {
    run_ready();
    if (abandoned) return false;
    if (resolve_active_masks()) continue;
    size_t exited = 0, waiting = 0;
    for (Fiber& f : fibers) {
      exited += f.state == EXITED;
      waiting += f.state == AT_BARRIER;
    }
    if (exited == fibers.size()) break;
    if (exited + waiting < fibers.size()) {
      report_stuck_warp_operations();
      return false;
    }
    release_barrier((int)exited);
  }
  finish_segment();
  return true;
}

}  // namespace emu

extern "C" void emu_barrier(EmuSite site) {
  emu::Fiber* f = emu::running();
  f->state = emu::AT_BARRIER;
  f->site = site;
  emu::yield_to_scheduler();
}

extern "C" void emu_fail(const char* kind, const char* text, EmuSite site) {
  emu::finding(kind, text, site);
  emu::abandon_launch();
}
