// What a launch costs, in figures that do not depend on the machine that executes it.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "runtime.h"

namespace emu {

LaunchStats current;
std::vector<LaunchStats> launches;

// The k-th execution of one instruction by the lanes of one warp is taken for one warp access, as it
// is on the device unless lanes that diverged run it at different times.
struct Group {
  uint64_t address[32];
  unsigned mask;
};
struct Instruction {
  uint32_t size;
  bool write, shared;
  uint32_t count[32];  // per lane, since the segment began
  std::vector<Group> groups;
};
struct WarpAccesses {
  std::unordered_map<void*, Instruction> instructions;
  void* last_key = nullptr;
  Instruction* last = nullptr;
};
static WarpAccesses warp_accesses[32];

void count_access(Fiber* f, void* p, size_t n, bool write, bool shared, void* key) {
  f->accesses++;
  (shared ? (write ? current.shared_written : current.shared_read)
          : (write ? current.global_written : current.global_read)) += n;
  if (!config.access_groups) return;
  WarpAccesses& w = warp_accesses[warp_of(f)];
  // One instruction of memcpy reads and writes: keep them apart.
  void* id = (char*)key + (write ? 1 : 0);
  if (w.last_key != id) {
    w.last_key = id;
    w.last = &w.instructions[id];
  }
  Instruction& i = *w.last;
  i.size = (uint32_t)n;
  i.write = write;
  i.shared = shared;
  uint32_t k = i.count[f->lane]++;
  if (k >= i.groups.size()) i.groups.resize(k + 1);
  i.groups[k].mask |= 1u << f->lane;
  i.groups[k].address[f->lane] = (uint64_t)p;
}

// Distinct sectors of 32 bytes that one warp access touches.
static uint64_t sectors(const Group& g, uint32_t size) {
  uint64_t list[128];
  int n = 0;
  for (int l = 0; l < 32; l++) {
    if (!(g.mask >> l & 1)) continue;
    for (uint64_t s = g.address[l] / 32; s <= (g.address[l] + size - 1) / 32 && n < 128; s++)
      list[n++] = s;
  }
  std::sort(list, list + n);
  return std::unique(list, list + n) - list;
}

// Cycles beyond the first that shared memory needs: 32 banks of 4 bytes serve one word each per
// cycle; 8-byte accesses go in two halves of the warp, 16-byte ones in four quarters.
static uint64_t conflicts(const Group& g, uint32_t size) {
  int lanes = size <= 4 ? 32 : size <= 8 ? 16 : 8;
  uint64_t extra = 0;
  for (int first = 0; first < 32; first += lanes) {
    uint64_t words[128];
    int n = 0;
    for (int l = first; l < first + lanes; l++) {
      if (!(g.mask >> l & 1)) continue;
      for (uint64_t w = g.address[l] / 4; w <= (g.address[l] + size - 1) / 4 && n < 128; w++)
        words[n++] = w;
    }
    std::sort(words, words + n);
    n = (int)(std::unique(words, words + n) - words);
    int per_bank[32] = {}, most = 0;
    for (int i = 0; i < n; i++) most = std::max(most, ++per_bank[words[i] % 32]);
    if (most > 1) extra += most - 1;
  }
  return extra;
}

void finish_groups() {
  if (!config.access_groups) return;
  for (size_t w = 0; w * 32 < fibers.size(); w++) {
    for (auto& [key, i] : warp_accesses[w].instructions) {
      for (const Group& g : i.groups) {
        if (!g.mask) continue;
        current.warp_accesses++;
        current.lane_accesses += __builtin_popcount(g.mask);
        if (i.shared) {
          current.shared_accesses++;
          current.bank_conflicts += conflicts(g, i.size);
        } else {
          (i.write ? current.global_write_sectors : current.global_read_sectors) +=
              sectors(g, i.size);
        }
      }
      i.groups.clear();
      memset(i.count, 0, sizeof i.count);
    }
  }
}

void finish_segment() {
  uint64_t most = 0, sum = 0;
  for (Fiber& f : fibers) {
    most = std::max(most, f.accesses);
    sum += f.accesses;
    f.accesses = 0;
  }
  current.balance_mean += (double)sum;
  current.balance_max += (double)most * (double)fibers.size();
  if (config.checks) finish_groups();
}

void forget_instructions() {
  for (WarpAccesses& w : warp_accesses) w = WarpAccesses();
}

}  // namespace emu
