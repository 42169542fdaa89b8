// The interface to Python: configuration, findings and counters as JSON.
#include <cstdio>

#include "runtime.h"

namespace emu {

Config config;
static uint64_t random_state = 1;

uint64_t random_bits() {  // xorshift64
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

std::string findings_json();
void clear_findings();

static std::string launches_json() {
  std::string s = "[";
  char b[1600];
  for (const LaunchStats& l : launches) {
    snprintf(b, sizeof b,
             "%s{\"kernel\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],"
             "\"static_shared\":%zu,\"dynamic_shared\":%zu,\"barriers\":%llu,"
             "\"warp_operations\":%llu,\"milliseconds\":%.4f,\"checked\":%s,"
             "\"global_read\":%llu,\"global_written\":%llu,\"global_read_unique\":%llu,"
             "\"global_written_unique\":%llu,\"global_read_sectors\":%llu,"
             "\"global_write_sectors\":%llu,\"shared_read\":%llu,\"shared_written\":%llu,"
             "\"shared_accesses\":%llu,\"bank_conflicts\":%llu,\"warp_accesses\":%llu,"
             "\"lane_accesses\":%llu,\"atomics\":%llu,\"balance\":%.6f}",
             s.size() > 1 ? "," : "", l.kernel.c_str(), l.grid.x, l.grid.y, l.grid.z, l.block.x,
             l.block.y, l.block.z, l.static_shared, l.dynamic_shared,
             (unsigned long long)l.barriers, (unsigned long long)l.warp_operations, l.milliseconds,
             l.checked ? "true" : "false", (unsigned long long)l.global_read,
             (unsigned long long)l.global_written, (unsigned long long)l.global_read_unique,
             (unsigned long long)l.global_written_unique, (unsigned long long)l.global_read_sectors,
             (unsigned long long)l.global_write_sectors, (unsigned long long)l.shared_read,
             (unsigned long long)l.shared_written, (unsigned long long)l.shared_accesses,
             (unsigned long long)l.bank_conflicts, (unsigned long long)l.warp_accesses,
             (unsigned long long)l.lane_accesses, (unsigned long long)l.atomics,
             l.balance_max > 0 ? l.balance_mean / l.balance_max : 0.0);
    s += b;
  }
  return s + "]";
}

}  // namespace emu

using namespace emu;

extern "C" {
// `switches` are bits in the order of Config's fields from `checks` to `lockstep`.
void emu_configure(int order, uint64_t seed, unsigned switches, unsigned max_shared_bytes) {
  config.order = order;
  config.seed = seed;
  bool* fields[] = {&config.checks,        &config.bounds, &config.races,
                    &config.uninitialised, &config.access_groups, &config.poison,
                    &config.divergence,    &config.lockstep};
  for (bool* f : fields) {
    *f = switches & 1;
    switches >>= 1;
  }
  config.max_shared_bytes = max_shared_bytes;
  random_state = seed * 0x9E3779B97F4A7C15ull + 1;
}

const char* emu_take_findings() {
  static std::string s;
  s = findings_json();
  clear_findings();
  return s.c_str();
}

const char* emu_take_launches() {
  static std::string s;
  s = launches_json();
  launches.clear();
  return s.c_str();
}
}
