// Device functions that the C library lacks or spells differently. The fast-math intrinsics are
// the exact functions here: their hardware error is not modelled.
#pragma once
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float rsqrt(float x) { return rsqrtf(x); }
static inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
// The C library declares functions of these names, so they are macros.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
// Kept apart on purpose: g++ may contract a plain x * y + z into a fused operation.
__attribute__((noinline)) static float __fmul_rn(float x, float y) { return x * y; }
__attribute__((noinline)) static float __fadd_rn(float x, float y) { return x + y; }
__attribute__((noinline)) static float __fsub_rn(float x, float y) { return x - y; }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
  return r;
}
static inline int __mulhi(int x, int y) { return (int)(((long long)x * y) >> 32); }
static inline unsigned __umulhi(unsigned x, unsigned y) {
  return (unsigned)(((unsigned long long)x * y) >> 32);
}
static inline int __mul24(int x, int y) { return x * y; }

static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline int __float2int_ru(float x) { return (int)ceilf(x); }
static inline float __int2float_rn(int x) { return (float)x; }

// __dp4a: four 8-bit products added to a 32-bit sum; each operand's signedness is its type's.
template <class A, class B>
static inline int emu_dp4a(uint32_t a, uint32_t b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(A)(a >> i) * (int)(B)(b >> i);
  return c;
}
static inline int __dp4a(int a, int b, int c) { return emu_dp4a<int8_t, int8_t>(a, b, c); }
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return (unsigned)emu_dp4a<uint8_t, uint8_t>(a, b, (int)c);
}
// The mixed ones come with the source that TVM generates.

// CUDA's min and max take mixed arithmetic types; on floats they prefer the number to a NaN.
template <class A, class B,
          class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
static inline std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmax((C)a, (C)b);
  else return (C)a > (C)b ? (C)a : (C)b;
}
template <class A, class B,
          class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
static inline std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmin((C)a, (C)b);
  else return (C)a < (C)b ? (C)a : (C)b;
}

// Read-only and cache-hinted loads are loads.
#define __ldg(p) (*(p))
#define __ldcg(p) (*(p))
#define __ldcs(p) (*(p))
#define __ldca(p) (*(p))
#define __stcg(p, v) (*(p) = (v))
#define __stcs(p, v) (*(p) = (v))
