// bf16: __nv_bfloat16, __nv_bfloat162 and the conversions that CUDA's header of this name declares.
#pragma once
#include "emu_half_type.h"
typedef EmuHalf<EmuBf16Format> __nv_bfloat16;
typedef __nv_bfloat16 nv_bfloat16;
typedef EmuHalf2<EmuBf16Format> __nv_bfloat162;
typedef __nv_bfloat162 nv_bfloat162;
static inline float __bfloat162float(__nv_bfloat16 h) { return h.value(); }
static inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __double2bfloat16(double f) { return __nv_bfloat16(f); }
static inline __nv_bfloat16 __int2bfloat16_rn(int i) { return __nv_bfloat16(i); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
  return __nv_bfloat16::from_bits(u);
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
static inline __nv_bfloat162 __float2bfloat162_rn(float x) {
  return {__nv_bfloat16(x), __nv_bfloat16(x)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {h.x.value(), h.y.value()}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 f) {
  return {__nv_bfloat16(f.x), __nv_bfloat16(f.y)};
}
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 h) { return h.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 h) { return h.y; }
static inline float __low2float(__nv_bfloat162 h) { return h.x.value(); }
static inline float __high2float(__nv_bfloat162 h) { return h.y.value(); }
