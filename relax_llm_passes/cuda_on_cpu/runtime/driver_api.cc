// The entry points of libcuda.so.1 that TVM's CUDA runtime uses.
#include <cstdint>
#include <cstdio>

#include "runtime.h"

using emu::Function;
using emu::Module;

namespace {
constexpr int SUCCESS = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, NOT_FOUND = 500,
              LAUNCH_FAILED = 719, NOT_SUPPORTED = 801;

// CUlaunchAttribute: an id and 64 bytes of value, 8-byte aligned.
struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};
constexpr int COOPERATIVE = 2, CLUSTER_DIMENSION = 4;

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

int fail(int code, const std::string& text) {
  emu::set_last_error(text);
  return code;
}
}  // namespace

extern "C" {
int cuModuleLoadData(Module** module, const void* image) {
  std::string error;
  *module = emu::load_module(image, &error);
  return *module ? SUCCESS : fail(INVALID_IMAGE, error);
}

int cuModuleUnload(Module* module) {
  emu::unload_module(module);
  return SUCCESS;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  std::string error;
  *function = emu::find_function(module, name, &error);
  if (*function) return SUCCESS;
  // TVM reports a missing function without this text.
  fprintf(stderr, "%s\n", error.c_str());
  return fail(NOT_FOUND, error);
}

int cuFuncSetAttribute(Function*, int, int) { return SUCCESS; }

int cuLaunchKernelEx(const LaunchConfig* c, Function* function, void** arguments, void**) {
  for (unsigned i = 0; i < c->attribute_count; i++) {
    const LaunchAttribute& a = c->attributes[i];
    bool cluster = a.id == CLUSTER_DIMENSION && a.value[0] * a.value[1] * a.value[2] > 1;
    if (cluster || (a.id == COOPERATIVE && a.value[0]))
      return fail(NOT_SUPPORTED, "clusters and cooperative launches are not emulated");
  }
  std::string error;
  if (emu::launch(function, c->grid, c->block, c->shared_bytes, arguments, &error)) return SUCCESS;
  return fail(LAUNCH_FAILED, error);
}

int cuGetErrorName(int code, const char** text) {
  *text = code == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR";
  return SUCCESS;
}
int cuGetErrorString(int, const char** text) {
  *text = emu::last_error();
  return SUCCESS;
}
int cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "CUDA on CPU");
  return SUCCESS;
}
int cuTensorMapEncodeTiled() { return fail(NOT_SUPPORTED, "TMA is not emulated"); }
}
