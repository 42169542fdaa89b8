// One 16-bit float type for fp16 and bf16: every operation is done in fp32 and rounded once. That
// equals the device's result for + - * / and sqrt (fp32 has more than twice the digits), and is
// within one rounding for the rest.
#pragma once
#include "emu.h"
#include "emu_half_format.h"

template <class Format>
struct EmuHalf {
  uint16_t bits;

  EmuHalf() = default;
  // From and to volatile memory. As templates these are no copy operations, so that the type stays
  // trivial to copy, and a half2 or half4 is one access of 4 or 8 bytes as on the device.
  template <class V, class = std::enable_if_t<std::is_volatile_v<V> &&
                                              std::is_same_v<std::remove_cv_t<V>, EmuHalf>>>
  EmuHalf(V& o) : bits(o.bits) {}
  template <class H, class = std::enable_if_t<std::is_same_v<H, EmuHalf>>>
  volatile EmuHalf& operator=(const H& o) volatile {
    bits = o.bits;
    return *this;
  }
  EmuHalf(float f) : bits(Format::store(f)) {}
  EmuHalf(double f) : bits(Format::store(f)) {}
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  EmuHalf(T i) : bits(Format::store((double)i)) {}
  template <class Other>
  explicit EmuHalf(const EmuHalf<Other>& o) : bits(Format::store(Other::load(o.bits))) {}

  inline __attribute__((always_inline)) float value() const { return Format::load(bits); }
  inline __attribute__((always_inline)) operator float() const { return value(); }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> && !std::is_same_v<T, float>>>
  explicit operator T() const {
    return (T)value();
  }
  static inline EmuHalf from_bits(uint16_t b) {
    EmuHalf h;
    h.bits = b;
    return h;
  }
};

#define EMU_HALF_OPERATOR(op)                                                           \
  template <class F>                                                                    \
  static inline EmuHalf<F> operator op(EmuHalf<F> a, EmuHalf<F> b) {                    \
    return EmuHalf<F>(a.value() op b.value());                                          \
  }                                                                                     \
  template <class F>                                                                    \
  static inline EmuHalf<F>& operator op##=(EmuHalf<F>& a, EmuHalf<F> b) {               \
    return a = a op b;                                                                  \
  }                                                                                     \
  template <class F, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>        \
  static inline EmuHalf<F> operator op(EmuHalf<F> a, T b) {                             \
    return a op EmuHalf<F>(b);                                                          \
  }                                                                                     \
  template <class F, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>        \
  static inline EmuHalf<F> operator op(T a, EmuHalf<F> b) {                             \
    return EmuHalf<F>(a) op b;                                                          \
  }
EMU_HALF_OPERATOR(+)
EMU_HALF_OPERATOR(-)
EMU_HALF_OPERATOR(*)
EMU_HALF_OPERATOR(/)
template <class F>
static inline EmuHalf<F> operator-(EmuHalf<F> a) {
  return EmuHalf<F>::from_bits(a.bits ^ 0x8000);
}
#define EMU_HALF_COMPARE(op, name)                                                         \
  template <class F>                                                                       \
  static inline bool operator op(EmuHalf<F> a, EmuHalf<F> b) {                             \
    return a.value() op b.value();                                                         \
  }                                                                                        \
  template <class F, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>           \
  static inline bool operator op(EmuHalf<F> a, T b) {                                      \
    return a.value() op (float)b;                                                          \
  }                                                                                        \
  template <class F, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>           \
  static inline bool operator op(T a, EmuHalf<F> b) {                                      \
    return (float)a op b.value();                                                          \
  }                                                                                        \
  template <class F>                                                                       \
  static inline bool name(EmuHalf<F> a, EmuHalf<F> b) {                                    \
    return a.value() op b.value();                                                         \
  }
EMU_HALF_COMPARE(<, __hlt)
EMU_HALF_COMPARE(>, __hgt)
EMU_HALF_COMPARE(<=, __hle)
EMU_HALF_COMPARE(>=, __hge)
EMU_HALF_COMPARE(==, __heq)
EMU_HALF_COMPARE(!=, __hne)

#define EMU_HALF_BINARY(name, expression)                          \
  template <class F>                                               \
  static inline EmuHalf<F> name(EmuHalf<F> x, EmuHalf<F> y) {      \
    float a = x.value(), b = y.value();                            \
    return EmuHalf<F>((float)(expression));                        \
  }
EMU_HALF_BINARY(__hadd, a + b)
EMU_HALF_BINARY(__hsub, a - b)
EMU_HALF_BINARY(__hmul, a * b)
EMU_HALF_BINARY(__hdiv, a / b)
EMU_HALF_BINARY(__hmax, std::fmax(a, b))
EMU_HALF_BINARY(__hmin, std::fmin(a, b))

template <class F>
static inline EmuHalf<F> __hfma(EmuHalf<F> a, EmuHalf<F> b, EmuHalf<F> c) {
  return EmuHalf<F>((double)a.value() * b.value() + c.value());
}
template <class F>
static inline bool __hisnan(EmuHalf<F> a) {
  return std::isnan(a.value());
}
template <class F>
static inline int __hisinf(EmuHalf<F> a) {
  return std::isinf(a.value()) ? (a.value() > 0 ? 1 : -1) : 0;
}
#define EMU_HALF_UNARY(name, expression)            \
  template <class F>                                \
  static inline EmuHalf<F> name(EmuHalf<F> x) {     \
    float a = x.value();                            \
    return EmuHalf<F>((float)(expression));         \
  }
EMU_HALF_UNARY(hexp, expf(a))
EMU_HALF_UNARY(hexp2, exp2f(a))
EMU_HALF_UNARY(hexp10, powf(10.0f, a))
EMU_HALF_UNARY(hlog, logf(a))
EMU_HALF_UNARY(hlog2, log2f(a))
EMU_HALF_UNARY(hlog10, log10f(a))
EMU_HALF_UNARY(hsqrt, sqrtf(a))
EMU_HALF_UNARY(hrsqrt, 1.0f / sqrtf(a))
EMU_HALF_UNARY(hrcp, 1.0f / a)
EMU_HALF_UNARY(hrint, rintf(a))
EMU_HALF_UNARY(hfloor, floorf(a))
EMU_HALF_UNARY(hceil, ceilf(a))
EMU_HALF_UNARY(htrunc, truncf(a))
EMU_HALF_UNARY(hcos, cosf(a))
EMU_HALF_UNARY(hsin, sinf(a))
EMU_HALF_UNARY(htanh, tanhf(a))
EMU_HALF_UNARY(__habs, fabsf(a))
EMU_HALF_UNARY(__hneg, -a)

// Two of them in a register.
template <class F>
struct alignas(4) EmuHalf2 {
  EmuHalf<F> x, y;
  EmuHalf2() = default;
  EmuHalf2(EmuHalf<F> x, EmuHalf<F> y) : x(x), y(y) {}
};
#define EMU_HALF2_OPERATOR(op, name)                                     \
  template <class F>                                                     \
  static inline EmuHalf2<F> operator op(EmuHalf2<F> a, EmuHalf2<F> b) {  \
    return {a.x op b.x, a.y op b.y};                                     \
  }                                                                      \
  template <class F>                                                     \
  static inline EmuHalf2<F> name(EmuHalf2<F> a, EmuHalf2<F> b) {         \
    return a op b;                                                       \
  }
EMU_HALF2_OPERATOR(+, __hadd2)
EMU_HALF2_OPERATOR(-, __hsub2)
EMU_HALF2_OPERATOR(*, __hmul2)
EMU_HALF2_OPERATOR(/, __h2div)
template <class F>
static inline EmuHalf2<F> operator-(EmuHalf2<F> a) {
  return {-a.x, -a.y};
}
template <class F>
static inline EmuHalf2<F> __hneg2(EmuHalf2<F> a) {
  return -a;
}
template <class F>
static inline EmuHalf2<F> __habs2(EmuHalf2<F> a) {
  return {__habs(a.x), __habs(a.y)};
}
template <class F>
static inline EmuHalf2<F> __hfma2(EmuHalf2<F> a, EmuHalf2<F> b, EmuHalf2<F> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class F>
static inline EmuHalf2<F> __hmax2(EmuHalf2<F> a, EmuHalf2<F> b) {
  return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
template <class F>
static inline EmuHalf2<F> __hmin2(EmuHalf2<F> a, EmuHalf2<F> b) {
  return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}
#define EMU_HALF2_UNARY(name2, name)                  \
  template <class F>                                  \
  static inline EmuHalf2<F> name2(EmuHalf2<F> a) {    \
    return {name(a.x), name(a.y)};                    \
  }
EMU_HALF2_UNARY(h2exp, hexp)
EMU_HALF2_UNARY(h2exp2, hexp2)
EMU_HALF2_UNARY(h2log, hlog)
EMU_HALF2_UNARY(h2log2, hlog2)
EMU_HALF2_UNARY(h2sqrt, hsqrt)
EMU_HALF2_UNARY(h2rsqrt, hrsqrt)
EMU_HALF2_UNARY(h2rcp, hrcp)
