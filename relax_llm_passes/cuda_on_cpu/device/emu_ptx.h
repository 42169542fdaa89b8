// PTX instructions that generated code reaches through inline assembly, with the register layouts of
// the PTX ISA ("Matrix Fragments for mma.m16n8k..", "ldmatrix").
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emu.h"

// Shared addresses are 32-bit numbers on the device: here the distance from the context, which the
// static and the dynamic region both are within 2 GB of only by luck. So they are kept as an index
// into a small table of bases: bit 31 tells the dynamic buffer from static variables.
struct EmuRegisters {
  void* at[16];
};
struct EmuWords {
  uint32_t at[16];
};
template <class T>
static inline uint32_t emu_word(T x) {
  static_assert(sizeof(T) == 4, "a matrix register has 32 bits");
  return emu_bits<uint32_t>(x);
}
