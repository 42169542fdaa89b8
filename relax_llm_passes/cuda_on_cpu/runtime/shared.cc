// Shared memory of the kernel that runs: one static section per kernel with a red zone after each
// variable, and one dynamic buffer.
#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime.h"
#include "shadow.h"

namespace emu {

SharedRegion static_shared, dynamic_shared;

struct Object {
  const char* name;
  const char *begin, *end;
};
static std::vector<Object> objects;
static std::vector<char> dynamic_buffer;

static void resize_shadow(SharedRegion& r) {
  size_t size = r.end - r.begin;
  if (r.shadow && r.shadow->bytes >= size) return;
  delete r.shadow;
  r.shadow = new Shadow(size);
}

void start_shared(char* begin, char* end, size_t dynamic_size) {
  objects.clear();
  static_shared.begin = begin;
  static_shared.end = end;
  dynamic_buffer.resize(dynamic_size + 1024);
  char* p = (char*)(((uintptr_t)dynamic_buffer.data() + 1023) & ~(uintptr_t)1023);
  dynamic_shared.begin = p;
  dynamic_shared.end = p + dynamic_size;
  emu_context.dynamic_shared = p;
  emu_context.dynamic_shared_size = dynamic_size;
  if (config.checks) {
    resize_shadow(static_shared);
    resize_shadow(dynamic_shared);
  }
}

void poison_shared() {
  poison(static_shared.begin, static_shared.end - static_shared.begin);
  poison(dynamic_shared.begin, dynamic_shared.end - dynamic_shared.begin);
}

size_t shared_object_bytes() {
  size_t n = 0;
  for (const Object& o : objects) n += o.end - o.begin;
  return n;
}

const char* shared_object_at(const void* address, size_t n) {
  const char* p = (const char*)address;
  for (const Object& o : objects)
    if (p >= o.begin && p + n <= o.end) return o.name;
  return nullptr;
}

}  // namespace emu

extern "C" void emu_shared_object(const char* name, void* begin, size_t size) {
  const char* p = (const char*)begin;
  for (const emu::Object& o : emu::objects)
    if (o.begin == p) return;
  emu::objects.push_back({name, p, p + size});
}
