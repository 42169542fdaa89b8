// What a translated kernel and the runtime that executes it have in common. Plain C ABI, no
// dependencies: it is included by the kernels (with device/emu.h) and by the runtime.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct EmuDim3 {
  unsigned x, y, z;
};

// The part of a thread that kernels read directly (threadIdx, the lane).
struct EmuThread {
  EmuDim3 index;
  int lane;
};

// One struct for everything that kernels read of the runtime, so that the memory checks can tell
// these reads from the kernel's own with one comparison.
struct EmuContext {
  EmuThread* thread;  // the running thread; null on the host
  EmuDim3 block_index, block_size, grid_size;
  char* dynamic_shared;
  size_t dynamic_shared_size;
};

// One row per __global__ function, exported by every kernel library as `emu_kernels`.
struct EmuKernel {
  const char* name;
  void (*call)(void** arguments);
  char* shared_begin;  // this kernel's static __shared__ section
  char* shared_end;
  int max_threads;  // __launch_bounds__, 0 when not given
};

// A place in the source, for reports and to tell one warp operation from another.
// line | counter << 20, where the counter separates several on one line.
typedef unsigned EmuSite;

// Runs once per warp operation, in the lane that arrives last: `lanes[i]` is what lane i passed,
// null when it does not take part. `error` may be set to a static text.
typedef void (*EmuWarpFunction)(void* const* lanes, unsigned mask, const char** error);

enum EmuSyncKind {
  EMU_WARP_SYNC,     // __syncwarp: orders memory between its lanes
  EMU_WARP_EXCHANGE  // shuffles, votes, matrix operations: exchange values, order nothing
};

extern "C" {
extern EmuContext emu_context;
void emu_barrier(EmuSite site);
unsigned emu_active_mask(EmuSite site);
// Waits until every lane named in `mask` is at the same `site`, then runs `function` once.
void emu_warp_operation(EmuSyncKind kind, const char* name, unsigned mask, EmuSite site,
                        void* lane, EmuWarpFunction function);
// Tells the checks where a static __shared__ variable lies (everything else in the section is
// a red zone), and that an atomic accessed memory.
void emu_shared_object(const char* name, void* begin, size_t size);
void emu_atomic_access(void* address, size_t size, EmuSite site);
// Copies that the kernel makes through an instruction rather than a load (cp.async, ldmatrix):
// checked and counted like loads and stores.
void emu_checked_read(const void* address, size_t size, EmuSite site);
void emu_checked_write(void* address, size_t size, EmuSite site);
// cp.async: the copy happens when its group is waited for, so that a missing wait reads old data.
void emu_async_copy(void* shared, const void* global, size_t size, size_t source_size,
                    EmuSite site);
void emu_async_commit(void);
void emu_async_wait(unsigned groups_left);
// Runs a kernel of a library that was not loaded as a module. `checked`: it was compiled with the
// hooks. 0, or an error that emu_last_error() explains.
int emu_launch_kernel(const EmuKernel* kernel, int checked, const unsigned grid[3],
                      const unsigned block[3], unsigned dynamic_shared, void** arguments);
const char* emu_last_error(void);
// Stops the launch with an error that names what is wrong.
void emu_fail(const char* kind, const char* text, EmuSite site);
}
