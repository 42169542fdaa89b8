// fp16: __half, __half2 and the conversions that CUDA's header of this name declares.
#pragma once
#include "emu_half_type.h"
typedef EmuHalf<EmuFp16Format> __half;
typedef __half half;
typedef EmuHalf2<EmuFp16Format> __half2;
typedef __half2 half2;
static inline float __half2float(__half h) { return h.value(); }
static inline __half __float2half(float f) { return __half(f); }
static inline __half __float2half_rn(float f) { return __half(f); }
static inline __half __double2half(double f) { return __half(f); }
static inline __half __int2half_rn(int i) { return __half(i); }
static inline int __half2int_rn(__half h) { return (int)nearbyintf(h.value()); }
static inline int __half2int_rz(__half h) { return (int)h.value(); }
static inline __half __ushort_as_half(unsigned short u) { return __half::from_bits(u); }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
static inline __half __short_as_half(short u) { return __half::from_bits((uint16_t)u); }
static inline short __half_as_short(__half h) { return (short)h.bits; }
static inline __half2 make_half2(__half x, __half y) { return {x, y}; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
static inline float2 __half22float2(__half2 h) { return {h.x.value(), h.y.value()}; }
static inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
static inline __half __low2half(__half2 h) { return h.x; }
static inline __half __high2half(__half2 h) { return h.y; }
static inline float __low2float(__half2 h) { return h.x.value(); }
static inline float __high2float(__half2 h) { return h.y.value(); }
