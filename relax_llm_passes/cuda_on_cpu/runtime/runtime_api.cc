// The entry points of libcudart.so that TVM's CUDA runtime uses. A library of its own, because its
// symbols are versioned; memory lives in the other one.
#include <cstdint>
#include <cstring>

extern "C" {
void* emu_device_allocate(size_t size);
void* emu_host_allocate(size_t size);
void emu_device_free(void* p);
size_t emu_device_in_use();
const char* emu_last_error();
}

namespace {
constexpr int SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801;
constexpr size_t DEVICE_BYTES = 8ull << 30;
constexpr size_t TOTAL_MEMORY_OFFSET = 288;  // of cudaDeviceProp::totalGlobalMem

int attribute(int which) {
  switch (which) {             // enum cudaDeviceAttr
    case 1: return 1024;       // threads a block
    case 2: return 1024;       // block x
    case 3: return 1024;       // block y
    case 4: return 64;         // block z
    case 8: return 49152;      // shared memory a block
    case 10: return 32;        // warp size
    case 12: return 65536;     // registers a block
    case 13: return 1980000;   // clock, kHz
    case 16: return 132;       // multiprocessors
    case 38: return 50 << 20;  // L2
    case 75: return 9;         // compute capability
    case 76: return 0;
    case 97: return 232448;    // shared memory a block, opt-in
    default: return 0;
  }
}
}  // namespace

extern "C" {
int cudaDeviceGetAttribute(int* value, int which, int) {
  *value = attribute(which);
  return SUCCESS;
}
int cudaGetDeviceCount(int* count) {
  *count = 1;
  return SUCCESS;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return SUCCESS;
}
int cudaSetDevice(int) { return SUCCESS; }
int cudaGetDeviceProperties(char* properties, int) {
  memset(properties, 0, TOTAL_MEMORY_OFFSET + sizeof(size_t));
  strcpy(properties, "CUDA on CPU");
  memcpy(properties + TOTAL_MEMORY_OFFSET, &DEVICE_BYTES, sizeof DEVICE_BYTES);
  return SUCCESS;
}
int cudaMalloc(void** p, size_t size) {
  *p = emu_device_allocate(size);
  return *p ? SUCCESS : OUT_OF_MEMORY;
}
int cudaMallocHost(void** p, size_t size) {
  *p = emu_host_allocate(size);
  return *p ? SUCCESS : OUT_OF_MEMORY;
}
int cudaFree(void* p) {
  emu_device_free(p);
  return SUCCESS;
}
int cudaFreeHost(void* p) {
  emu_device_free(p);
  return SUCCESS;
}
int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *total = DEVICE_BYTES;
  *free_bytes = DEVICE_BYTES - emu_device_in_use();
  return SUCCESS;
}
int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void*) {
  memmove(to, from, size);
  return SUCCESS;
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void*) {
  memmove(to, from, size);
  return SUCCESS;
}
int cudaGetLastError() { return SUCCESS; }
int cudaPeekAtLastError() { return SUCCESS; }
const char* cudaGetErrorName(int) { return "cudaError"; }
const char* cudaGetErrorString(int) { return emu_last_error(); }

// Streams and events: everything is done when the call returns.
int cudaStreamCreate(void** s) {
  *s = (void*)2;
  return SUCCESS;
}
int cudaStreamCreateWithFlags(void** s, unsigned) { return cudaStreamCreate(s); }
int cudaStreamDestroy(void*) { return SUCCESS; }
int cudaStreamSynchronize(void*) { return SUCCESS; }
int cudaStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
int cudaEventCreate(void** e) {
  *e = (void*)1;
  return SUCCESS;
}
int cudaEventDestroy(void*) { return SUCCESS; }
int cudaEventRecord(void*, void*) { return SUCCESS; }
int cudaEventSynchronize(void*) { return SUCCESS; }
int cudaEventElapsedTime(float* milliseconds, void*, void*) {
  *milliseconds = 1;
  return SUCCESS;
}

// CUDA graphs are not emulated: TVM turns the error into an exception.
int cudaGraphDestroy(void*) { return SUCCESS; }
int cudaGraphExecDestroy(void*) { return SUCCESS; }
int cudaGraphInstantiate(void**) { return NOT_SUPPORTED; }
int cudaGraphLaunch(void*, void*) { return NOT_SUPPORTED; }
int cudaStreamBeginCapture(void*, int) { return NOT_SUPPORTED; }
int cudaStreamEndCapture(void*, void**) { return NOT_SUPPORTED; }
}
