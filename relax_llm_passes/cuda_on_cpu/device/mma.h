// nvcuda::wmma as plain loops. CUDA leaves open which lane holds which element of a fragment; here lane
// l holds eight elements that are neighbours in memory. Code that relies on one layout is wrong on the
// device as well.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emu.h"

namespace nvcuda {
namespace wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

// Fragments that "WMMA / Element Types and Matrix Sizes" lists and that are emulated.
template <int m, int n, int k, class T>
constexpr bool emu_supported() {
  bool shape = k == 16 && ((m == 16 && n == 16) || (m == 32 && n == 8) || (m == 8 && n == 32));
  bool type = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16> ||
              std::is_same_v<T, float> || std::is_same_v<T, int> || std::is_same_v<T, signed char> ||
              std::is_same_v<T, unsigned char>;
  return shape && type;
}

template <class Use, int m, int n, int k, class T, class Layout = void>
struct fragment {
  static_assert(emu_supported<m, n, k, T>(), "this wmma fragment is not emulated");
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? k : m;
  static constexpr int columns = std::is_same_v<Use, matrix_a> ? k : n;
  static constexpr int num_elements = rows * columns / 32;
  // Row-major unless the type says otherwise: accumulators have no layout of their own.
  static constexpr bool by_column = std::is_same_v<Layout, col_major>;
  T x[num_elements];

  // Where in the matrix element i of a lane lies.
  EMU_INLINE void place(int lane, int i, int& row, int& column) {
    int flat = lane * num_elements + i;
    row = by_column ? flat % rows : flat / columns;
    column = by_column ? flat / rows : flat % columns;
  }
};

template <class Use, int m, int n, int k, class T, class L, class V>
EMU_UNCHECKED static inline void fill_fragment(fragment<Use, m, n, k, T, L>& f, const V& value) {
  for (T& x : f.x) x = (T)value;
}

template <class T>
EMU_UNCHECKED static inline void emu_check_matrix(EmuSite site, const void* p, unsigned stride) {
  if ((uintptr_t)p % 32)
    emu_fail("misaligned", "a wmma matrix must lie at a multiple of 32 bytes", site);
  if (stride * sizeof(T) % 16)
    emu_fail("misaligned", "the leading dimension of a wmma matrix must be a multiple of 16 bytes",
             site);
}

// Reports a lane's accesses in the widest pieces that are contiguous, as the device would make them.
template <class F, class T>
EMU_UNCHECKED static inline void emu_touch(EmuSite site, T* p, unsigned stride, bool by_column,
                                           bool write) {
  int lane = emu_context.thread->lane;
  constexpr int step = (int)(16 / sizeof(T));
  for (int i = 0; i < F::num_elements;) {
    int row, column, last_row, last_column;
    int run = std::min(step, F::num_elements - i);
    F::place(lane, i, row, column);
    F::place(lane, i + run - 1, last_row, last_column);
    T* first = p + (by_column ? column * stride + row : row * stride + column);
    T* last = p + (by_column ? last_column * stride + last_row : last_row * stride + last_column);
    if (last - first != run - 1) run = 1;
    if (write) emu_checked_write(first, run * sizeof(T), site);
    else emu_checked_read(first, run * sizeof(T), site);
    i += run;
  }
}

template <class F, class T>
EMU_UNCHECKED static inline void emu_load(EmuSite site, F& f, const T* p, unsigned stride,
                                          bool by_column) {
  emu_check_matrix<T>(site, p, stride);
  emu_touch<F>(site, const_cast<T*>(p), stride, by_column, false);
  for (int i = 0; i < F::num_elements; i++) {
    int row, column;
    F::place(emu_context.thread->lane, i, row, column);
    f.x[i] = p[by_column ? column * stride + row : row * stride + column];
  }
  emu_warp_operation(EMU_WARP_EXCHANGE, "wmma::load_matrix_sync", 0xffffffffu, site, nullptr,
                     nullptr);
}
template <class Use, int m, int n, int k, class T, class L>
EMU_UNCHECKED static inline void emu_load_matrix(EmuSite site, fragment<Use, m, n, k, T, L>& f,
                                                 const T* p, unsigned stride) {
  emu_load(site, f, p, stride, f.by_column);
}
template <int m, int n, int k, class T>
EMU_UNCHECKED static inline void emu_load_matrix(EmuSite site,
                                                 fragment<accumulator, m, n, k, T>& f, const T* p,
                                                 unsigned stride, layout_t layout) {
  emu_load(site, f, p, stride, layout == mem_col_major);
}
template <int m, int n, int k, class T>
EMU_UNCHECKED static inline void emu_store_matrix(EmuSite site, T* p,
                                                  const fragment<accumulator, m, n, k, T>& f,
                                                  unsigned stride, layout_t layout) {
  typedef fragment<accumulator, m, n, k, T> F;
  emu_check_matrix<T>(site, p, stride);
  bool by_column = layout == mem_col_major;
  emu_touch<F>(site, p, stride, by_column, true);
  for (int i = 0; i < F::num_elements; i++) {
    int row, column;
    F::place(emu_context.thread->lane, i, row, column);
    p[by_column ? column * stride + row : row * stride + column] = f.x[i];
  }
  emu_warp_operation(EMU_WARP_EXCHANGE, "wmma::store_matrix_sync", 0xffffffffu, site, nullptr,
                     nullptr);
}

template <class D, class A, class B, class C>
struct EmuMultiply {
  D* d;
  const A* a;
  const B* b;
  const C* c;
};
template <class D, class A, class B, class C>
EMU_UNCHECKED static void emu_multiply(void* const* lanes, unsigned mask, const char** error) {
  if (mask != 0xffffffffu) {
    *error = "needs all 32 lanes";
    return;
  }
  typedef EmuMultiply<D, A, B, C> Args;
  // The sum is fp32 (or int32) also for an fp16 accumulator, rounded once at the end.
  typedef std::conditional_t<std::is_same_v<std::decay_t<decltype(D::x[0])>, int>, int, float> Sum;
  static Sum a[A::rows][A::columns], b[B::rows][B::columns];
  int row, column;
  for (int l = 0; l < 32; l++) {
    const Args* me = (const Args*)lanes[l];
    for (int i = 0; i < A::num_elements; i++) {
      A::place(l, i, row, column);
      a[row][column] = (Sum)me->a->x[i];
    }
    for (int i = 0; i < B::num_elements; i++) {
      B::place(l, i, row, column);
      b[row][column] = (Sum)me->b->x[i];
    }
  }
  for (int l = 0; l < 32; l++) {
    const Args* me = (const Args*)lanes[l];
    for (int i = 0; i < D::num_elements; i++) {
      D::place(l, i, row, column);
      Sum sum = (Sum)me->c->x[i];
      for (int k = 0; k < A::columns; k++) sum += a[row][k] * b[k][column];
      me->d->x[i] = sum;
    }
  }
}
template <int m, int n, int k, class TD, class TA, class LA, class TB, class LB, class TC>
EMU_UNCHECKED static inline void emu_mma(EmuSite site, fragment<accumulator, m, n, k, TD>& d,
                                         const fragment<matrix_a, m, n, k, TA, LA>& a,
                                         const fragment<matrix_b, m, n, k, TB, LB>& b,
                                         const fragment<accumulator, m, n, k, TC>& c) {
  typedef fragment<accumulator, m, n, k, TD> D;
  typedef fragment<matrix_a, m, n, k, TA, LA> A;
  typedef fragment<matrix_b, m, n, k, TB, LB> B;
  typedef fragment<accumulator, m, n, k, TC> C;
  EmuMultiply<D, A, B, C> me{&d, &a, &b, &c};
  emu_warp_operation(EMU_WARP_EXCHANGE, "wmma::mma_sync", 0xffffffffu, site, &me,
                     emu_multiply<D, A, B, C>);
}
}  // namespace wmma
}  // namespace nvcuda

// Macros, so that a report names the line of the call.
#define load_matrix_sync(...) emu_load_matrix(EMU_SITE, __VA_ARGS__)
#define store_matrix_sync(...) emu_store_matrix(EMU_SITE, __VA_ARGS__)
#define mma_sync(...) emu_mma(EMU_SITE, __VA_ARGS__)
