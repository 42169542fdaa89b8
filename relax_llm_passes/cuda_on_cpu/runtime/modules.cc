// From an image (CUDA source) to a shared library, and from a launch to blocks.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <unordered_map>

#include "runtime.h"

namespace emu {

static const char MAGIC[] = "RELAXLLM-CUDA-SOURCE\n";

// Set by the Python side: translates and compiles the source, returns the library's path, or null
// after calling emu_set_build_error.
typedef const char* (*BuildFunction)(const char* source, int checked);
static BuildFunction build;
static std::string error_text;

void set_last_error(const std::string& text) { error_text = text; }
const char* last_error() { return error_text.c_str(); }

struct Function {
  Module* module;
  std::string name;
};

struct Module {
  std::string source;
  const EmuKernel* kernels[2] = {};  // plain, checked
  std::unordered_map<std::string, Function*> functions;
};

Module* load_module(const void* image, std::string* error) {
  if (memcmp(image, MAGIC, sizeof MAGIC - 1) != 0) {
    *error =
        "this module holds code for a real GPU (a cubin or PTX); compile it after "
        "relax_llm_passes.cuda_on_cpu.install() to run it on the CPU";
    return nullptr;
  }
  auto* m = new Module;
  m->source = (const char*)image + sizeof MAGIC - 1;
  return m;
}

void unload_module(Module* m) {
  // The library stays loaded: findings may still name its instructions.
  for (auto& [name, f] : m->functions) delete f;
  delete m;
}

static const EmuKernel* kernels_of(Module* m, bool checked, std::string* error) {
  if (m->kernels[checked]) return m->kernels[checked];
  error_text.clear();
  const char* path = build ? build(m->source.c_str(), checked) : nullptr;
  if (!path) {
    *error = build ? error_text : "relax_llm_passes.cuda_on_cpu.install() was not called";
    return nullptr;
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    *error = dlerror();
    return nullptr;
  }
  m->kernels[checked] = (const EmuKernel*)dlsym(library, "emu_kernels");
  if (!m->kernels[checked]) *error = std::string(path) + " exports no kernels";
  return m->kernels[checked];
}

static const EmuKernel* kernel_of(Function* f, bool checked, std::string* error) {
  const EmuKernel* k = kernels_of(f->module, checked, error);
  if (!k) return nullptr;
  for (; k->name; k++)
    if (f->name == k->name) return k;
  *error = "no kernel named " + f->name;
  return nullptr;
}

Function* find_function(Module* m, const char* name, std::string* error) {
  auto it = m->functions.find(name);
  if (it != m->functions.end()) return it->second;
  auto* f = new Function{m, name};
  if (!kernel_of(f, config.checks, error)) {
    delete f;
    return nullptr;
  }
  return m->functions[name] = f;
}

static bool valid(const EmuKernel* k, const unsigned grid[3], const unsigned block[3],
                  std::string* error) {
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  char s[300];
  s[0] = 0;
  if (threads == 0 || threads > 1024 || block[2] > 64)
    snprintf(s, sizeof s, "a block of (%u,%u,%u) threads: 1 to 1024 are allowed, at most 64 in z",
             block[0], block[1], block[2]);
  else if (k->max_threads && threads > (uint64_t)k->max_threads)
    snprintf(s, sizeof s, "%llu threads in a block, above its __launch_bounds__ of %d",
             (unsigned long long)threads, k->max_threads);
  else if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffffu || grid[1] > 65535 ||
           grid[2] > 65535)
    snprintf(s, sizeof s, "a grid of (%u,%u,%u) blocks: at least 1, at most (2^31-1,65535,65535)",
             grid[0], grid[1], grid[2]);
  if (!s[0]) return true;
  *error = "invalid launch of " + current.kernel + ": " + s;
  finding("invalid-launch", *error, 0);
  return false;
}

// The sizes of the static variables are known once a block has run.
static bool shared_memory_fits(std::string* error) {
  char s[200];
  s[0] = 0;
  if (current.static_shared > 49152)
    snprintf(s, sizeof s, "%zu bytes of static shared memory: at most 49152 are allowed",
             current.static_shared);
  else if (current.static_shared + current.dynamic_shared > config.max_shared_bytes)
    snprintf(s, sizeof s, "%zu bytes of shared memory: the device has %u a block",
             current.static_shared + current.dynamic_shared, config.max_shared_bytes);
  if (!s[0]) return true;
  *error = "invalid launch of " + current.kernel + ": " + s;
  finding("invalid-launch", *error, 0);
  return false;
}

static std::vector<uint32_t> block_order(uint64_t blocks) {
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (config.order == DESCENDING) std::reverse(order.begin(), order.end());
  if (config.order == RANDOM)
    for (size_t i = blocks - 1; i > 0; i--) std::swap(order[i], order[random_bits() % (i + 1)]);
  return order;
}

static bool launch_kernel(const EmuKernel* k, bool checked, const unsigned grid[3],
                          const unsigned block[3], unsigned dynamic_shared, void** arguments,
                          std::string* error) {
  current = LaunchStats();
  current.kernel = k->name;
  current.grid = {grid[0], grid[1], grid[2]};
  current.block = {block[0], block[1], block[2]};
  current.dynamic_shared = dynamic_shared;
  current.checked = checked;
  emu_context.grid_size = current.grid;
  emu_context.block_size = current.block;
  if (!valid(k, grid, block, error)) return false;

  auto began = std::chrono::steady_clock::now();
  fibers.resize((size_t)block[0] * block[1] * block[2]);
  forget_instructions();
  start_async_copies(fibers.size());
  start_shared(k->shared_begin, k->shared_end, dynamic_shared);
  order_launch();
  bool completed = true;
  for (uint32_t b : block_order((uint64_t)grid[0] * grid[1] * grid[2])) {
    emu_context.block_index = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
    order_block(b, (int)fibers.size());
    poison_shared();
    completed = run_block(k->call, arguments);
    if (!completed) break;
    if (!current.static_shared && (current.static_shared = shared_object_bytes()) &&
        !shared_memory_fits(error))
      return false;
  }
  if (!shared_memory_fits(error)) return false;
  emu_context.thread = nullptr;
  current.milliseconds =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
  launches.push_back(current);
  if (!completed) *error = current.kernel + " was stopped; see relax_llm_passes.cuda_on_cpu.findings()";
  return completed;
}

bool launch(Function* f, const unsigned grid[3], const unsigned block[3], unsigned dynamic_shared,
            void** arguments, std::string* error) {
  const EmuKernel* k = kernel_of(f, config.checks, error);
  return k && launch_kernel(k, config.checks, grid, block, dynamic_shared, arguments, error);
}

}  // namespace emu

// For libraries that launch kernels of their own: 0, or an error whose text is emu_last_error().
extern "C" int emu_launch_kernel(const EmuKernel* kernel, int checked, const unsigned grid[3],
                                 const unsigned block[3], unsigned dynamic_shared,
                                 void** arguments) {
  std::string error;
  if (emu::launch_kernel(kernel, checked && emu::config.checks, grid, block, dynamic_shared,
                         arguments, &error))
    return 0;
  emu::set_last_error(error);
  return 719;  // cudaErrorLaunchFailure
}

extern "C" void emu_set_build_function(emu::BuildFunction f) { emu::build = f; }
extern "C" void emu_set_build_error(const char* text) { emu::error_text = text; }
extern "C" const char* emu_last_error() { return emu::last_error(); }
