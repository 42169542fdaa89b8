// Which accesses are ordered by synchronisation, for the race checks.
#include <cstring>

#include "runtime.h"

namespace emu {

uint64_t sequence, launch_start, block_start, last_barrier;
uint32_t block_number;

// For each pair of lanes of a warp, the sequence number of the last __syncwarp both took part in.
static uint64_t last_together[32][32][32];
static int warps_in_use;

void order_launch() { launch_start = ++sequence; }

void order_block(uint32_t number, int threads) {
  block_number = number;
  block_start = last_barrier = ++sequence;
  warps_in_use = (threads + 31) / 32;
  memset(last_together, 0, sizeof(last_together[0]) * warps_in_use);
}

void order_barrier() { last_barrier = ++sequence; }

void order_warp(int warp, unsigned mask) {
  ++sequence;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    for (int j = 0; j < 32; j++)
      if (mask >> j & 1) last_together[warp][i][j] = sequence;
  }
}

bool ordered(uint64_t when, int earlier, int later) {
  if (earlier == later || last_barrier > when) return true;
  if (earlier >> 5 != later >> 5) return false;
  return last_together[earlier >> 5][earlier & 31][later & 31] > when;
}

}  // namespace emu
