// PTX instructions that generated code reaches through inline assembly. Register layouts are those of
// the PTX ISA, "Matrix multiply-accumulate operation using mma instruction" and "ldmatrix".
#pragma once
#include "emu.h"
#include "emu_half_format.h"

// ---- shared addresses: 32-bit numbers on the device. Bit 31 set: offset in the dynamic buffer.
// Clear: offset from this library's anchor, biased so that it is positive.
static char emu_shared_anchor;
EMU_UNCHECKED static inline uint32_t emu_shared_address(const void* pointer) {
  const char* p = (const char*)pointer;
  const char* dynamic = emu_context.dynamic_shared;
  if (p >= dynamic && p <= dynamic + emu_context.dynamic_shared_size)
    return 0x80000000u | (uint32_t)(p - dynamic);
  return (uint32_t)((p - &emu_shared_anchor) + 0x40000000) & 0x7fffffffu;
}
EMU_UNCHECKED static inline char* emu_shared_pointer(uint64_t address) {
  if (address >> 32) return (char*)address;  // a generic address
  if (address & 0x80000000u) return emu_context.dynamic_shared + (address & 0x7fffffffu);
  return &emu_shared_anchor + ((int64_t)address - 0x40000000);
}
#ifndef EMU_CUDA_HEADERS
#define __cvta_generic_to_shared(p) ((size_t)emu_shared_address((const void*)(p)))
#define __cvta_shared_to_generic(a) ((void*)emu_shared_pointer(a))
#endif

// ---- ld, st, mov
template <int width, class... Register>
EMU_UNCHECKED static inline void emu_ptx_load(EmuSite site, const char* p, Register*... registers) {
  static_assert(((sizeof(Register) == width) && ...), "registers as wide as the elements");
  emu_checked_read(p, width * sizeof...(Register), site);
  ((memcpy((void*)registers, p, width), p += width), ...);
}
template <int width, class... Value>
EMU_UNCHECKED static inline void emu_ptx_store(EmuSite site, char* p, Value... values) {
  static_assert(((sizeof(Value) == width) && ...), "registers as wide as the elements");
  emu_checked_write(p, width * sizeof...(Value), site);
  ((memcpy(p, (const void*)&values, width), p += width), ...);
}
template <class To, class Value>
EMU_UNCHECKED static inline void emu_ptx_move(To* to, Value value) {
  *to = emu_bits<To>(value);
}

// ---- cp.async under a predicate: zeros, at once, when it is false
EMU_UNCHECKED static inline void emu_predicated_copy(char* shared, const void* global, size_t size,
                                                     int predicate, EmuSite site) {
  if (predicate) {
    emu_async_copy(shared, global, size, size, site);
  } else {
    emu_checked_write(shared, size, site);
    memset(shared, 0, size);
  }
}

// ---- ldmatrix: lane 8*m+r names row r of matrix m (8x8 of 16 bits); lane l receives elements
// 2*(l%4) and 2*(l%4)+1 of row l/4 of each matrix, of each column with .trans.
struct EmuLdmatrix {
  uint16_t row[8];
  uint32_t result[4];
  int matrices;
  bool transposed;
};
EMU_UNCHECKED static void emu_ldmatrix_exchange(void* const* lanes, unsigned, const char**) {
  for (int l = 0; l < 32; l++) {
    EmuLdmatrix* me = (EmuLdmatrix*)lanes[l];
    if (!me) continue;
    for (int m = 0; m < me->matrices; m++) {
      uint16_t pair[2];
      for (int j = 0; j < 2; j++) {
        int row = l / 4, column = l % 4 * 2 + j;
        if (me->transposed) std::swap(row, column);
        EmuLdmatrix* owner = (EmuLdmatrix*)lanes[8 * m + row];
        pair[j] = owner ? owner->row[column] : 0xffff;
      }
      me->result[m] = pair[0] | (uint32_t)pair[1] << 16;
    }
  }
}
template <int matrices, bool transposed, class... Result>
EMU_UNCHECKED static inline void emu_ldmatrix(EmuSite site, uint64_t address, Result*... result) {
  static_assert(sizeof...(Result) == matrices);
  EmuLdmatrix me{};
  me.matrices = matrices;
  me.transposed = transposed;
  if (emu_context.thread->lane < 8 * matrices) {
    const char* p = emu_shared_pointer(address);
    emu_checked_read(p, 16, site);
    memcpy(me.row, p, 16);
  }
  emu_warp_operation(EMU_WARP_EXCHANGE, "ldmatrix", 0xffffffffu, site, &me, emu_ldmatrix_exchange);
  int i = 0;
  ((*result = me.result[i++]), ...);
}

// ---- mma.sync m16n8k8, k16, k32
struct Emu_f16 {
  static constexpr int per_register = 2;
  typedef float sum;
  EMU_INLINE float get(uint32_t r, int i) { return EmuFp16Format::load((uint16_t)(r >> 16 * i)); }
  EMU_INLINE void set(uint32_t& r, int i, float v) {
    r = (r & ~(0xffffu << 16 * i)) | (uint32_t)EmuFp16Format::store(v) << 16 * i;
  }
};
struct Emu_bf16 {
  static constexpr int per_register = 2;
  typedef float sum;
  EMU_INLINE float get(uint32_t r, int i) { return EmuBf16Format::load((uint16_t)(r >> 16 * i)); }
};
// Operands of tf32 are read as fp32 without the last 13 bits.
struct Emu_tf32 {
  static constexpr int per_register = 1;
  typedef float sum;
  EMU_INLINE float get(uint32_t r, int) { return emu_bits<float>(r & 0xffffe000u); }
};
struct Emu_s8 {
  static constexpr int per_register = 4;
  typedef int sum;
  EMU_INLINE int get(uint32_t r, int i) { return (int8_t)(r >> 8 * i); }
};
struct Emu_f32 {
  static constexpr int per_register = 1;
  EMU_INLINE float get(uint32_t r, int) { return emu_bits<float>(r); }
  EMU_INLINE void set(uint32_t& r, int, float v) { r = emu_bits<uint32_t>(v); }
};
struct Emu_s32 {
  static constexpr int per_register = 1;
  EMU_INLINE int get(uint32_t r, int) { return (int)r; }
  EMU_INLINE void set(uint32_t& r, int, int v) { r = (uint32_t)v; }
};

struct EmuWords {
  uint32_t at[4];
};
struct EmuRegisters {
  void* at[4];
};
template <class T>
static inline uint32_t emu_word(T x) {
  static_assert(sizeof(T) == 4, "a matrix register has 32 bits");
  return emu_bits<uint32_t>(x);
}
struct EmuMma {
  EmuWords a, b, c, d;
};

// With g = lane / 4, t = lane % 4 and E elements in a register: register r of A holds row g + 8*(r%2),
// columns t*E + (r/2)*4E ..; of B rows t*E + r*4E .. of column g; of C and D rows g and g + 8, columns
// 2t and 2t+1.
template <int K, class In, class Out>
EMU_UNCHECKED static void emu_mma_exchange(void* const* lanes, unsigned mask, const char** error) {
  if (mask != 0xffffffffu) *error = "needs all 32 lanes";
  constexpr int E = In::per_register, P = Out::per_register;
  typedef typename In::sum Sum;
  Sum a[16][K] = {}, b[K][8] = {};
  for (int l = 0; l < 32; l++) {
    EmuMma* me = (EmuMma*)lanes[l];
    if (!me) continue;
    int g = l / 4, t = l % 4;
    for (int r = 0; r < K / (2 * E); r++)
      for (int e = 0; e < E; e++)
        a[g + 8 * (r % 2)][t * E + e + r / 2 * 4 * E] = In::get(me->a.at[r], e);
    for (int r = 0; r < K / (4 * E); r++)
      for (int e = 0; e < E; e++) b[t * E + e + r * 4 * E][g] = In::get(me->b.at[r], e);
  }
  for (int l = 0; l < 32; l++) {
    EmuMma* me = (EmuMma*)lanes[l];
    if (!me) continue;
    for (int i = 0; i < 4; i++) {
      int row = l / 4 + 8 * (i / 2), column = l % 4 * 2 + i % 2;
      Sum sum = Out::get(me->c.at[i / P], i % P);
      for (int k = 0; k < K; k++) sum += a[row][k] * b[k][column];
      Out::set(me->d.at[i / P], i % P, sum);
    }
  }
}
template <int K, class In, class Out>
EMU_UNCHECKED static inline void emu_mma(EmuSite site, EmuRegisters d, EmuWords a, EmuWords b,
                                         EmuWords c) {
  EmuMma me{a, b, c, {}};
  emu_warp_operation(EMU_WARP_EXCHANGE, "mma.sync", 0xffffffffu, site, &me,
                     emu_mma_exchange<K, In, Out>);
  for (int r = 0; r < 4 / Out::per_register; r++) memcpy(d.at[r], &me.d.at[r], 4);
}
