// fp16 and bf16 as bits: to and from fp32 and fp64, rounded to nearest, ties to even.
#pragma once
#include "emu.h"

struct EmuFp16Format {
  EMU_INLINE float load(uint16_t v) { return (float)emu_bits<_Float16>(v); }
  EMU_INLINE uint16_t store(float f) { return emu_bits<uint16_t>((_Float16)f); }
  EMU_INLINE uint16_t store(double f) { return emu_bits<uint16_t>((_Float16)f); }
};
struct EmuBf16Format {
  EMU_INLINE float load(uint16_t v) { return emu_bits<float>((uint32_t)v << 16); }
  EMU_INLINE uint16_t store(float f) {  // round to nearest, ties to even
    uint32_t u = emu_bits<uint32_t>(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  EMU_INLINE uint16_t store(double f) {
    // To odd in fp32 first, so that the second rounding cannot err.
    float r = (float)f;
    uint32_t u = emu_bits<uint32_t>(r);
    if (std::isfinite(r) && (double)r != f) {
      if (std::fabs((double)r) > std::fabs(f)) u -= 1;
      u |= 1;
    }
    return store(emu_bits<float>(u));
  }
};
