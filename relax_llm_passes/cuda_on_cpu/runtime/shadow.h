// What the checks remember of memory: who wrote and who read each granule, and when.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime.h"

namespace emu {

// 35 bits of sequence number, 18 of the block, 10 of the thread, 1 for atomics. Blocks run one after
// the other, so the sequence number alone says whether a tag is of the running block; the block's
// number is for reports.
struct Tag {
  uint64_t bits;
  static Tag make(uint64_t when, uint32_t block, int thread, bool atomic) {
    return {when << 29 | (uint64_t)(block & 0x3ffff) << 11 | (uint64_t)thread << 1 | atomic};
  }
  uint64_t when() const { return bits >> 29; }
  uint32_t block() const { return bits >> 11 & 0x3ffff; }
  int thread() const { return bits >> 1 & 1023; }
  bool atomic() const { return bits & 1; }
  bool in_launch() const { return when() >= launch_start; }
  bool in_block() const { return when() >= block_start; }
};

// The last writer and two readers that are different threads: a later writer conflicts with at
// least one of them if it conflicts with any reader.
struct Cell {
  Tag written, read[2];
};

// One cell per granule of 2^shift bytes. It starts at 4 bytes and is made finer on the first
// smaller access. Pages that nothing touches cost nothing.
struct Shadow {
  size_t bytes;
  int shift;
  Cell* cells = nullptr;

  explicit Shadow(size_t bytes, int shift = 2) : bytes(bytes), shift(shift) { map(); }
  ~Shadow() { unmap(); }
  Shadow(const Shadow&) = delete;
  size_t mapped() const { return (((bytes >> shift) + 8) * sizeof(Cell) + 4095) & ~(size_t)4095; }
  void map() {
    cells = (Cell*)mmap(nullptr, mapped(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  void unmap() { munmap(cells, mapped()); }
  void refine(size_t access, size_t offset) {
    int want = shift;
    while (want > 0 && ((access | offset) & ((1u << want) - 1))) want--;
    if (want == shift) return;
    Shadow finer(bytes, want);
    size_t parts = (size_t)1 << (shift - want);
    for (size_t i = 0; i <= bytes >> shift; i++) {
      const Cell& c = cells[i];
      if (!(c.written.bits | c.read[0].bits | c.read[1].bits)) continue;
      for (size_t k = 0; k < parts; k++) finer.cells[i * parts + k] = c;
    }
    std::swap(cells, finer.cells);
    std::swap(shift, finer.shift);
  }
};

}  // namespace emu
