// What CUTLASS's kernels need to run as fibers. Included before a source that instantiates them; CUDA's
// own headers, read as a host compiler reads them, declare types and the runtime.
#pragma once
#include <cuda_runtime.h>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define EMU_CUDA_HEADERS
#include "emu.h"
#include "emu_ptx.h"

// The types that CUDA gives them.
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#define threadIdx (reinterpret_cast<const uint3&>(emu_context.thread->index))
#define blockIdx (reinterpret_cast<const uint3&>(emu_context.block_index))
#define blockDim (reinterpret_cast<const dim3&>(emu_context.block_size))
#define gridDim (reinterpret_cast<const dim3&>(emu_context.grid_size))
// Named by kernels for newer architectures, which are read and not instantiated.
#undef __syncthreads_and
#undef __syncthreads_or
#undef __syncthreads_count
int __syncthreads_and(int);
namespace cutlass {
namespace arch {
int SmId();
int LaneId();
}
}  // namespace cutlass

// The stand-in for the runtime does not know these: nothing needs to be allowed.
static inline cudaError_t emu_allow(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
static inline cudaError_t emu_occupancy(int* blocks) {
  *blocks = 1;
  return cudaSuccess;
}
#define cudaFuncSetAttribute(kernel, attribute, value) \
  emu_allow((const void*)(kernel), attribute, value)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, ...) emu_occupancy(blocks)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, ...) emu_occupancy(blocks)

static thread_local cudaError_t emu_status = cudaSuccess;
static inline cudaError_t emu_take_status() {
  const cudaError_t status = emu_status;
  emu_status = cudaSuccess;
  return status;
}
#define cudaGetLastError() emu_take_status()
#define cudaGetErrorString(status) emu_last_error()

template <auto kernel>
static void emu_call(void** arguments) {
  emu_apply(kernel, arguments);
}
#ifdef __SANITIZE_THREAD__
constexpr int emu_checked = 1;
#else
constexpr int emu_checked = 0;
#endif

// kernel<<<grid, block, shared, stream>>>(parameters)
template <auto kernel, class Parameters>
static void emu_launch(const char* name, dim3 grid, dim3 block, size_t shared, cudaStream_t,
                       Parameters& parameters) {
  static const EmuKernel row = {name, emu_call<kernel>, nullptr, nullptr, 0};
  const unsigned blocks[3] = {grid.x, grid.y, grid.z}, threads[3] = {block.x, block.y, block.z};
  void* arguments[] = {(void*)&parameters};
  emu_status = (cudaError_t)emu_launch_kernel(&row, emu_checked, blocks, threads, (unsigned)shared,
                                              arguments);
}
