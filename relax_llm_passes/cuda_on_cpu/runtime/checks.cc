// Every load and store of an instrumented kernel comes here, through the hooks that g++ inserts for
// -fsanitize=thread: bounds, alignment, uninitialised shared memory, data races.
#include <link.h>

#include <cstring>

#include "runtime.h"
#include "shadow.h"

namespace emu {

// A write that conflicts with an earlier write is a finding only if it changes the value: many
// threads storing one same value is common and harmless. The hook runs before the store, so the
// verdict waits for the thread's next event.
struct PendingWrite {
  char* p = nullptr;
  size_t n = 0;
  char old[16];
  void* instruction;
  bool shared;
  Tag first, second;
};
static PendingWrite pending;

static std::string access_name(Tag t) {
  return std::string(t.atomic() ? "an atomic of " : "") + "block " + std::to_string(t.block()) +
         " " + thread_name(t.thread());
}

static void race(const char* what, bool shared, Tag first, Tag second, void* instruction) {
  finding_at(shared ? "shared-race" : "global-race",
             std::string(what) + ": " + access_name(first) + " and " + access_name(second) +
                 " with no synchronisation between them",
             instruction);
}

void finish_pending_write() {
  if (!pending.p) return;
  if (memcmp(pending.p, pending.old, pending.n) != 0)
    race("write after write", pending.shared, pending.first, pending.second, pending.instruction);
  pending.p = nullptr;
}

static bool conflicts(Tag earlier, Tag now, bool shared) {
  if (!earlier.in_launch() || (earlier.atomic() && now.atomic())) return false;
  if (!earlier.in_block()) return !shared;  // another block of this launch
  return !ordered(earlier.when(), earlier.thread(), now.thread());
}

static void remember_read(Cell& c, Tag now) {
  if (!c.read[0].in_launch() || (c.read[0].in_block() && c.read[0].thread() == now.thread())) {
    c.read[0] = now;
  } else if (c.read[0].in_block() && ordered(c.read[0].when(), c.read[0].thread(), now.thread())) {
    c.read[0] = now;  // whoever conflicts with the old reader from now on conflicts with this one
  } else {
    c.read[1] = now;
  }
}

struct Place {
  Shadow* shadow;
  size_t offset;
  bool shared;
  size_t size;  // of the region, to cap the last granule
};

// An access far from all memory always ends the launch: it would end the process.
static void outside_of_memory(const std::string& what, bool far, void* instruction) {
  if (config.bounds || far) finding_at("out-of-bounds", what, instruction);
  if (far) abandon_launch();
}

static void update(const Place& place, void* p, size_t n, bool write, bool atomic,
                   void* instruction) {
  Fiber* f = running();
  Tag now = Tag::make(sequence, block_number, f->linear, atomic);
  Shadow& s = *place.shadow;
  s.refine(n, place.offset);
  size_t first = place.offset >> s.shift, last = (place.offset + n - 1) >> s.shift;
  for (size_t i = first; i <= last; i++) {
    Cell& c = s.cells[i];
    if (!place.shared) {
      size_t granule = (size_t)1 << s.shift;
      bool known = write ? c.written.in_launch() : c.read[0].in_launch();
      if (!known) (write ? current.global_written_unique : current.global_read_unique) += granule;
      if (atomic && !c.read[0].in_launch()) current.global_read_unique += granule;
    }
    if (!write && place.shared && config.uninitialised && !c.written.in_block()) {
      finding_at("uninitialised-read",
                 std::to_string(n) + " bytes of shared memory that no thread of the block wrote",
                 instruction);
    }
    if (config.races) {
      if (!write) {
        if (conflicts(c.written, now, place.shared))
          race("read after write", place.shared, c.written, now, instruction);
      } else {
        for (Tag r : c.read)
          if (conflicts(r, now, place.shared))
            race("write after read", place.shared, r, now, instruction);
        if (conflicts(c.written, now, place.shared) && !pending.p && n <= sizeof pending.old) {
          pending = {(char*)p, n, {}, instruction, place.shared, c.written, now};
          memcpy(pending.old, p, n);
        }
      }
    }
    if (write) c.written = now;
    if (!write || atomic) remember_read(c, now);
  }
}

struct Lookup {
  uintptr_t data, code;
  bool same;
};

// Whether one loaded library has both addresses in its segments.
static int holds_both(dl_phdr_info* info, size_t, void* argument) {
  auto* l = (Lookup*)argument;
  bool data = false, code = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    uintptr_t end = begin + info->dlpi_phdr[i].p_memsz;
    data |= l->data >= begin && l->data < end;
    code |= l->code >= begin && l->code < end;
  }
  l->same |= data && code;
  return l->same;
}

// A constant or a static of the kernel's own library.
static bool known_elsewhere(const void* p, void* instruction) {
  Lookup l{(uintptr_t)p, (uintptr_t)instruction, false};
  dl_iterate_phdr(holds_both, &l);
  return l.same;
}

void check_access(void* address, size_t n, bool write, bool atomic, void* instruction) {
  Fiber* f = running();
  char* p = (char*)address;
  if (!f || (p >= stacks_begin && p < stacks_end)) return;
  if (p >= (char*)&emu_context && p < (char*)(&emu_context + 1)) return;
  if (p >= (char*)fibers.data() && p < (char*)(fibers.data() + fibers.size())) return;
  finish_pending_write();

  Place place{nullptr, 0, true, 0};
  bool outside = false;
  const char* direction = write ? "write" : "read";
  if (p >= static_shared.begin && p < static_shared.end) {
    place = {static_shared.shadow, (size_t)(p - static_shared.begin), true,
             (size_t)(static_shared.end - static_shared.begin)};
    if (!shared_object_at(p, n)) {
      outside_of_memory(std::string(direction) + " of " + std::to_string(n) +
                        " bytes beyond a __shared__ variable by " + thread_name(f->linear), false,
                        instruction);
      return;
    }
  } else if (p >= dynamic_shared.begin && p < dynamic_shared.end) {
    place = {dynamic_shared.shadow, (size_t)(p - dynamic_shared.begin), true,
             (size_t)(dynamic_shared.end - dynamic_shared.begin)};
    outside = p + n > dynamic_shared.end;
  } else if (Allocation* a = find_allocation(p)) {
    if (!a->shadow) a->shadow = new Shadow(a->size);
    place = {a->shadow, (size_t)(p - a->begin), false, a->size};
    outside = p + n > a->begin + a->size;
  } else if (!known_elsewhere(p, instruction)) {
    outside_of_memory(std::string(direction) + " of " + std::to_string(n) +
                      " bytes outside every allocation by block " + std::to_string(block_number) +
                      " " + thread_name(f->linear), !in_guard(p), instruction);
    return;
  } else {
    return;
  }
  if (outside) {
    outside_of_memory(std::string(direction) + " of " + std::to_string(n) +
                      " bytes across the end of " + (place.shared ? "shared memory" : "an allocation") +
                      " by " + thread_name(f->linear), false, instruction);
    return;
  }
  if (n <= 16 && (n & (n - 1)) == 0 && (uintptr_t)p % n) {
    finding_at("misaligned", std::string(direction) + " of " + std::to_string(n) +
               " bytes at an address that is not a multiple of it", instruction);
    abandon_launch();  // an error on the device too; and the CPU's vector moves would fault
  }
  count_access(f, p, n, write, place.shared, instruction);
  if (atomic) current.atomics++;
  update(place, p, n, write, atomic, instruction);
}

// Before Volta a warp ran in lockstep, and code that relies on it (volatile shared memory without
// __syncwarp) still exists. In lockstep mode lanes meet at every volatile access.
static void lockstep(void* instruction) {
  Fiber* f = running();
  if (!config.lockstep || !f) return;
  f->state = AT_ACTIVE_MASK;
  f->site = (EmuSite)(uintptr_t)instruction;
  f->operation = "volatile access";
  yield_to_scheduler();
}

}  // namespace emu

using emu::check_access;

extern "C" void emu_atomic_access(void* p, size_t n, EmuSite site) {
  if (!emu::config.checks) return;
  check_access(p, n, true, true, emu::site_as_instruction(site));
}
extern "C" void emu_checked_read(const void* p, size_t n, EmuSite site) {
  if (!emu::config.checks) return;
  check_access((void*)p, n, false, false, emu::site_as_instruction(site));
}
extern "C" void emu_checked_write(void* p, size_t n, EmuSite site) {
  if (!emu::config.checks) return;
  check_access(p, n, true, false, emu::site_as_instruction(site));
}

#define HOOKS(n)                                                                        \
  extern "C" void __tsan_read##n(void* p) {                                             \
    check_access(p, n, false, false, __builtin_return_address(0));                   \
  }                                                                                     \
  extern "C" void __tsan_write##n(void* p) {                                            \
    check_access(p, n, true, false, __builtin_return_address(0));                    \
  }                                                                                     \
  extern "C" void __tsan_unaligned_read##n(void* p) {                                   \
    check_access(p, n, false, false, __builtin_return_address(0));                   \
  }                                                                                     \
  extern "C" void __tsan_unaligned_write##n(void* p) {                                  \
    check_access(p, n, true, false, __builtin_return_address(0));                    \
  }                                                                                     \
  extern "C" void __tsan_volatile_read##n(void* p) {                                    \
    emu::lockstep(__builtin_return_address(0));                                         \
    check_access(p, n, false, false, __builtin_return_address(0));                   \
  }                                                                                     \
  extern "C" void __tsan_volatile_write##n(void* p) {                                   \
    emu::lockstep(__builtin_return_address(0));                                         \
    check_access(p, n, true, false, __builtin_return_address(0));                    \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, size_t n) {
  check_access(p, n, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t n) {
  check_access(p, n, true, false, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check_access((void*)from, n, false, false, __builtin_return_address(0));
  check_access(to, n, true, false, __builtin_return_address(0));
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  check_access((void*)from, n, false, false, __builtin_return_address(0));
  check_access(to, n, true, false, __builtin_return_address(0));
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  check_access(to, n, true, false, __builtin_return_address(0));
  return memset(to, value, n);
}
}
