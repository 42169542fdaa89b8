// Shared between the files of the runtime that executes CUDA kernels on the CPU. One launch runs at
// a time, its blocks one after the other, each thread of a block as a fiber.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../device/emu_abi.h"

namespace emu {

// ---- configuration (control.cc)
enum Order { ASCENDING = 0, DESCENDING = 1, RANDOM = 2 };
struct Config {
  int order = ASCENDING;     // of threads and of blocks
  uint64_t seed = 1;         // of RANDOM
  bool checks = false;       // run the instrumented build; poison and divergence need none
  bool bounds = true;        // accesses outside of allocations and shared variables
  bool races = true;         // data races in shared and in global memory
  bool uninitialised = true; // reads of shared memory that nobody wrote
  bool access_groups = true; // sectors, bank conflicts, lanes per access
  bool poison = true;        // memory that nobody wrote reads as NaN, else as zero
  bool divergence = true;    // barriers and warp operations that some threads do not reach
  bool lockstep = false;     // volatile accesses in warp lockstep, as before Volta
  unsigned max_shared_bytes = 232448;
};
extern Config config;
uint64_t random_bits();

// ---- findings (findings.cc): what the checks report; equal ones are counted.
void finding(const char* kind, const std::string& text, EmuSite site);
// Accesses made by the emulation on behalf of the kernel have no instruction of their own: their site
// stands in for it, marked by an address that no library has.
constexpr uint64_t SITE_MARK = 0x5a00000000000000ull;
inline void* site_as_instruction(EmuSite site) { return (void*)(SITE_MARK | (uint64_t)site << 1); }
// The same, with a place given by an instruction of the kernel's library, or by such a stand-in.
void finding_at(const char* kind, const std::string& text, void* instruction);
std::string thread_name(int linear_thread);
// Ends the launch: never returns to the kernel.
[[noreturn]] void abandon_launch();

// ---- fibers (fibers.cc)
enum State { READY, AT_BARRIER, AT_WARP_OPERATION, AT_ACTIVE_MASK, EXITED };
struct Fiber : EmuThread {
  void* stack_pointer;
  char* stack;
  int linear;
  State state;
  EmuSite site;
  // of the warp operation it waits at
  EmuSyncKind kind;
  const char* operation;
  unsigned mask, result_mask;
  void* argument;
  EmuWarpFunction function;
  uint64_t accesses;  // since the last barrier
};
constexpr size_t STACK_SIZE = 256 << 10, MOST_THREADS = 1024;
extern char *stacks_begin, *stacks_end;
extern std::vector<Fiber> fibers;  // of the running block
inline Fiber* running() { return static_cast<Fiber*>(emu_context.thread); }
inline int warp_of(const Fiber* f) { return f->linear >> 5; }
void yield_to_scheduler();
void make_ready(Fiber* f);
// Runs all threads of one block; false when the launch was abandoned.
bool run_block(void (*kernel)(void**), void** arguments);

// ---- warps (warp.cc)
void start_warps(int threads);
void lane_exited(Fiber* f);
bool resolve_active_masks();            // true when some lane became ready
void report_stuck_warp_operations();

// ---- order of memory operations (ordering.cc)
// Sequence numbers grow with every synchronisation; an access is ordered before another one of the
// same block when both threads took part in one that lies between.
extern uint64_t sequence, launch_start, block_start, last_barrier;
extern uint32_t block_number;
void order_launch();
void order_block(uint32_t number, int threads);
void order_barrier();
void order_warp(int warp, unsigned mask);
bool ordered(uint64_t when, int earlier_thread, int later_thread);

// ---- device memory (memory.cc)
struct Shadow;
struct Allocation {
  char* begin;
  size_t size;
  char* base;  // with the guards
  Shadow* shadow;
};
constexpr size_t GUARD_SIZE = 4096;
Allocation* find_allocation(const void* p);
bool in_guard(const void* p);
void poison(void* p, size_t n);
size_t allocated_bytes();

// ---- shared memory of the running kernel (shared.cc)
struct SharedRegion {
  char *begin, *end;
  Shadow* shadow;
};
extern SharedRegion static_shared, dynamic_shared;
void start_shared(char* begin, char* end, size_t dynamic_size);
void poison_shared();
size_t shared_object_bytes();
const char* shared_object_at(const void* p, size_t n);  // null: between the objects

// ---- checks (checks.cc)
void check_access(void* p, size_t n, bool write, bool atomic, void* instruction);
void finish_pending_write();

// ---- cp.async (async_copy.cc)
void start_async_copies(size_t threads);
void async_thread_exits(Fiber* f);

// ---- counters (counters.cc)
struct LaunchStats {
  std::string kernel;
  EmuDim3 grid, block;
  size_t static_shared, dynamic_shared;
  uint64_t barriers;         // summed over the blocks
  uint64_t warp_operations;
  double milliseconds;       // of this CPU: says nothing about a GPU
  bool checked;              // the figures below are there only then
  uint64_t global_read, global_written;                // bytes, each thread's accesses
  uint64_t global_read_unique, global_written_unique;  // bytes touched at all
  uint64_t global_read_sectors, global_write_sectors;  // of 32 bytes, per warp access
  uint64_t shared_read, shared_written;
  uint64_t shared_accesses, bank_conflicts;  // warp accesses, and cycles beyond the first
  uint64_t warp_accesses, lane_accesses;     // warp accesses to memory, and lanes in them
  double balance_mean, balance_max;          // accesses of a thread between barriers
  uint64_t atomics;
};
extern LaunchStats current;
extern std::vector<LaunchStats> launches;
void count_access(Fiber* f, void* p, size_t n, bool write, bool shared, void* instruction);
void finish_segment();  // at a barrier and at the end of a block
void finish_groups();
void forget_instructions();  // before a launch: addresses of instructions may be reused

// ---- kernels (modules.cc)
struct Function;
struct Module;
// Null and an error text when the image is not one of ours.
Module* load_module(const void* image, std::string* error);
void unload_module(Module* m);
Function* find_function(Module* m, const char* name, std::string* error);
bool launch(Function* f, const unsigned grid[3], const unsigned block[3], unsigned dynamic_shared,
            void** arguments, std::string* error);
void set_last_error(const std::string& text);
const char* last_error();

}  // namespace emu

extern "C" {
void* emu_device_allocate(size_t size);
void* emu_host_allocate(size_t size);
void emu_device_free(void* p);
size_t emu_device_in_use();
const char* emu_last_error();
}
