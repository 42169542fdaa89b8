// Warp operations: lanes meet at one place in the source, the last one to arrive does the work.
// __activemask() is answered when no lane of the warp can run any more, so it names every lane that
// got there.
#include <cstring>

#include "runtime.h"

namespace emu {

struct Warp {
  unsigned lanes;    // that exist
  unsigned exited;
  int waiting;       // lanes at a warp operation
};
static Warp warps[32];

void start_warps(int threads) {
  for (int w = 0; w * 32 < threads; w++) {
    int n = threads - w * 32;
    warps[w] = {n >= 32 ? ~0u : (1u << n) - 1, 0, 0};
  }
}

static Fiber* lane_of(int warp, int lane) { return &fibers[warp * 32 + lane]; }

static std::string lanes_text(unsigned mask) {
  std::string s;
  for (int i = 0; i < 32;) {
    if (!(mask >> i & 1)) {
      i++;
      continue;
    }
    int j = i;
    while (j < 31 && mask >> (j + 1) & 1) j++;
    s += (s.empty() ? "" : ",") + std::to_string(i) + (j > i ? "-" + std::to_string(j) : "");
    i = j + 1;
  }
  return s.empty() ? "none" : s;
}

static void complete(int w, unsigned mask, Fiber* last) {
  void* arguments[32] = {};
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) arguments[i] = lane_of(w, i)->argument;
  const char* error = nullptr;
  if (last->function) last->function(arguments, mask, &error);
  if (error) finding("warp", std::string(last->operation) + " " + error, last->site);
  if (last->kind == EMU_WARP_SYNC) order_warp(w, mask);
  current.warp_operations++;
  warps[w].waiting -= __builtin_popcount(mask);
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) make_ready(lane_of(w, i));
}

// The lanes that `f` waits for and that are there already.
static bool try_complete(int w, Fiber* f) {
  unsigned need = f->mask & warps[w].lanes & ~warps[w].exited;
  if (warps[w].waiting < __builtin_popcount(need)) return false;
  for (int i = 0; i < 32; i++) {
    if (!(need >> i & 1)) continue;
    Fiber* o = lane_of(w, i);
    if (o->state != AT_WARP_OPERATION || o->site != f->site) return false;
    if (o->mask != f->mask && config.divergence) {
      finding("warp",
              std::string(f->operation) + ": lane " + std::to_string(f->lane) + " names lanes " +
                  lanes_text(f->mask) + ", lane " + std::to_string(i) + " names " +
                  lanes_text(o->mask),
              f->site);
    }
  }
  unsigned gone = f->mask & warps[w].exited;
  if (gone && config.divergence)
    finding("warp", std::string(f->operation) + " names lanes that have exited: " +
            lanes_text(gone), f->site);
  complete(w, need, f);
  return true;
}

void lane_exited(Fiber* f) {
  int w = warp_of(f);
  warps[w].exited |= 1u << f->lane;
  for (int i = 0; i < 32 && warps[w].waiting; i++) {
    if (!(warps[w].lanes >> i & 1)) continue;
    Fiber* o = lane_of(w, i);
    if (o->state == AT_WARP_OPERATION) try_complete(w, o);
  }
}

bool resolve_active_masks() {
  bool any = false;
  for (size_t w = 0; w * 32 < fibers.size(); w++) {
    Fiber* first = nullptr;
    unsigned mask = 0;
    for (int i = 0; i < 32; i++) {
      if (!(warps[w].lanes >> i & 1)) continue;
      Fiber* f = lane_of((int)w, i);
      if (f->state != AT_ACTIVE_MASK) continue;
      if (!first) first = f;
      if (f->site == first->site) mask |= 1u << i;
    }
    for (int i = 0; first && i < 32; i++) {
      if (!(mask >> i & 1)) continue;
      lane_of((int)w, i)->result_mask = mask;
      make_ready(lane_of((int)w, i));
      any = true;
    }
    // In lockstep mode the lanes that meet at a volatile access are ordered by it.
    if (first && config.lockstep && first->operation) order_warp((int)w, mask);
  }
  return any;
}

void report_stuck_warp_operations() {
  for (Fiber& f : fibers) {
    if (f.state != AT_WARP_OPERATION) continue;
    int w = warp_of(&f);
    unsigned here = 0, barrier = 0;
    for (int i = 0; i < 32; i++) {
      if (!(warps[w].lanes >> i & 1)) continue;
      Fiber* o = lane_of(w, i);
      if (o->state == AT_WARP_OPERATION && o->site == f.site) here |= 1u << i;
      if (o->state == AT_BARRIER) barrier |= 1u << i;
    }
    finding("divergent-warp-operation",
            std::string(f.operation) + " in warp " + std::to_string(w) + " waits for lanes " +
                lanes_text(f.mask & warps[w].lanes & ~here) + " that never arrive (lanes " +
                lanes_text(barrier) + " are at __syncthreads)",
            f.site);
    return;
  }
}

}  // namespace emu

using emu::Fiber;

extern "C" void emu_warp_operation(EmuSyncKind kind, const char* name, unsigned mask, EmuSite site,
                                   void* lane, EmuWarpFunction function) {
  Fiber* f = emu::running();
  emu::finish_pending_write();
  if (!(mask >> f->lane & 1)) {
    if (emu::config.divergence) emu::finding("warp", std::string(name) + ": lane " + std::to_string(f->lane) +
                 " is not in the mask it passes", site);
    mask |= 1u << f->lane;
  }
  f->state = emu::AT_WARP_OPERATION;
  f->site = site;
  f->kind = kind;
  f->operation = name;
  f->mask = mask;
  f->argument = lane;
  f->function = function;
  int w = emu::warp_of(f);
  emu::warps[w].waiting++;
  emu::try_complete(w, f);
  emu::yield_to_scheduler();
}

extern "C" unsigned emu_active_mask(EmuSite site) {
  Fiber* f = emu::running();
  f->state = emu::AT_ACTIVE_MASK;
  f->site = site;
  f->operation = nullptr;
  emu::yield_to_scheduler();
  return f->result_mask;
}
