// CUDA's built-in vector types with the alignment of "Built-in Vector Types" in the CUDA C++
// programming guide.
#pragma once
#define EMU_VECTORS(element, name, align2, align4)                                              \
  struct name##1 { element x; };                                                               \
  struct alignas(align2) name##2 { element x, y; };                                            \
  struct name##3 { element x, y, z; };                                                         \
  struct alignas(align4) name##4 { element x, y, z, w; };                                      \
  static inline name##1 make_##name##1(element x) { return {x}; }                              \
  static inline name##2 make_##name##2(element x, element y) { return {x, y}; }                \
  static inline name##3 make_##name##3(element x, element y, element z) { return {x, y, z}; }  \
  static inline name##4 make_##name##4(element x, element y, element z, element w) {           \
    return {x, y, z, w};                                                                       \
  }
EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(long, long, 16, 16)
EMU_VECTORS(unsigned long, ulong, 16, 16)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(double, double, 16, 16)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
