// cp.async: a copy from global to shared memory takes place when its group is waited for. Doing it as
// late as that makes a forgotten wait visible: the kernel reads what was there before.
#include <cstring>
#include <deque>
#include <vector>

#include "runtime.h"

namespace emu {

struct Copy {
  char* shared;
  const char* global;
  size_t size, source_size;
  EmuSite site;
};
struct ThreadCopies {
  std::vector<Copy> open;                 // since the last commit
  std::deque<std::vector<Copy>> groups;   // committed, oldest first
};
static std::vector<ThreadCopies> copies;

void start_async_copies(size_t threads) {
  if (copies.size() < threads) copies.resize(threads);
}

static void perform(const std::vector<Copy>& group) {
  for (const Copy& c : group) {
    if (c.source_size) emu_checked_read(c.global, c.source_size, c.site);
    emu_checked_write(c.shared, c.size, c.site);
    memcpy(c.shared, c.global, c.source_size);
    memset(c.shared + c.source_size, 0, c.size - c.source_size);
  }
}

void async_thread_exits(Fiber* f) {
  ThreadCopies& t = copies[f->linear];
  bool forgotten = !t.open.empty();
  for (auto& g : t.groups) forgotten |= !g.empty();
  if (forgotten)
    finding("async-copy", thread_name(f->linear) + " exits before it waited for its cp.async copies",
            t.open.empty() ? t.groups.front().front().site : t.open.front().site);
  t.open.clear();
  t.groups.clear();
}

}  // namespace emu

using namespace emu;

extern "C" void emu_async_copy(void* shared, const void* global, size_t size, size_t source_size,
                               EmuSite site) {
  if (size != 4 && size != 8 && size != 16)
    emu_fail("async-copy", "cp.async copies 4, 8 or 16 bytes", site);
  if ((uintptr_t)shared % size || (uintptr_t)global % size)
    finding("misaligned", "cp.async at an address that is not a multiple of its size", site);
  copies[running()->linear].open.push_back(
      {(char*)shared, (const char*)global, size, source_size, site});
}

extern "C" void emu_async_commit() {
  ThreadCopies& t = copies[running()->linear];
  t.groups.push_back(std::move(t.open));
  t.open.clear();
}

extern "C" void emu_async_wait(unsigned groups_left) {
  ThreadCopies& t = copies[running()->linear];
  while (t.groups.size() > groups_left) {
    std::vector<Copy> group = std::move(t.groups.front());
    t.groups.pop_front();
    perform(group);
  }
}
