// Device memory: every allocation is known, poisoned and has guards on both sides.
#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"
#include "shadow.h"

namespace emu {

static std::map<const char*, Allocation*> allocations;
static Allocation* last_found;
static size_t in_use;

void poison(void* p, size_t n) { memset(p, config.poison ? 0xFF : 0, n); }

size_t allocated_bytes() { return in_use; }

static Allocation* at_or_before(const char* p) {
  auto it = allocations.upper_bound(p);
  return it == allocations.begin() ? nullptr : std::prev(it)->second;
}

Allocation* find_allocation(const void* address) {
  const char* p = (const char*)address;
  if (last_found && p >= last_found->begin && p < last_found->begin + last_found->size)
    return last_found;
  Allocation* a = at_or_before(p);
  if (!a || p >= a->begin + a->size) return nullptr;
  return last_found = a;
}

// Near enough to an allocation that reading or writing there does no harm.
bool in_guard(const void* address) {
  const char* p = (const char*)address;
  Allocation* a = at_or_before(p);
  if (a && p < a->begin + a->size + GUARD_SIZE) return true;
  auto it = allocations.upper_bound(p);
  return it != allocations.end() && p >= it->second->begin - GUARD_SIZE;
}

}  // namespace emu

using namespace emu;

extern "C" void* emu_device_allocate(size_t size) {
  size_t total = GUARD_SIZE * 2 + ((size + 255) & ~(size_t)255);
  char* base = (char*)aligned_alloc(256, total);
  if (!base) return nullptr;
  poison(base, total);
  auto* a = new Allocation{base + GUARD_SIZE, size, base, nullptr};
  allocations[a->begin] = a;
  in_use += size;
  return a->begin;
}

extern "C" void* emu_host_allocate(size_t size) { return emu_device_allocate(size); }

extern "C" void emu_device_free(void* p) {
  if (!p) return;
  auto it = allocations.find((const char*)p);
  if (it == allocations.end()) {
    finding("memory", "freed an address that is not an allocation", 0);
    return;
  }
  Allocation* a = it->second;
  allocations.erase(it);
  last_found = nullptr;
  in_use -= a->size;
  delete a->shadow;
  free(a->base);
  delete a;
}

extern "C" size_t emu_device_in_use() { return in_use; }
