// Lets g++ compile the CUDA C++ that TVM generates: keywords, built-in variables, barriers, warp
// operations, atomics. Included before every translated kernel.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emu_abi.h"

// With EMU_CUDA_HEADERS the keywords, vector types and mathematical functions are those of CUDA's own
// headers, included before this file.
#ifndef EMU_CUDA_HEADERS
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __global__
// Inlined, or g++ would not instrument `*p = f(...)`: the store belongs to the call.
#define __device__ __attribute__((always_inline))
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __constant__ static
// The standard alignas may not follow `static`; the attribute may.
#define alignas(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#endif

// The hooks of -fsanitize=thread must not fire inside the emulation itself.
#define EMU_UNCHECKED __attribute__((no_sanitize_thread))
#define EMU_INLINE static inline __attribute__((always_inline))
template <class To, class From>
EMU_INLINE To emu_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  memcpy((void*)&r, (const void*)&x, sizeof r);
  return r;
}
#define EMU_SITE ((EmuSite)(__LINE__ | (__COUNTER__ << 20)))
#define EMU_SHARED(kernel) static __attribute__((section("emush_" #kernel), used))

#define threadIdx (emu_context.thread->index)
#define blockIdx (emu_context.block_index)
#define blockDim (emu_context.block_size)
#define gridDim (emu_context.grid_size)
#define warpSize 32

// ---- barriers and fences. Blocks run one after the other and a fiber switches only at these
// calls, so fences have nothing to do.
#define __syncthreads() emu_barrier(EMU_SITE)
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)
#define __threadfence_system() ((void)0)

EMU_UNCHECKED static inline void emu_sync_warp(EmuSite site, unsigned mask = 0xffffffffu) {
  emu_warp_operation(EMU_WARP_SYNC, "__syncwarp", mask, site, nullptr, nullptr);
}
#define __syncwarp(...) emu_sync_warp(EMU_SITE, ##__VA_ARGS__)
#define __activemask() emu_active_mask(EMU_SITE)

// ---- shuffles
struct EmuShuffle {
  uint64_t value, result;
  int source;  // lane to read
};

// The value read from a lane that does not take part is undefined on the device. TVM's reductions read
// such lanes and drop the result, so it is poison here and no finding.
EMU_UNCHECKED static void emu_shuffle_exchange(void* const* lanes, unsigned, const char**) {
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    EmuShuffle* me = (EmuShuffle*)lanes[i];
    me->result = lanes[me->source] ? ((EmuShuffle*)lanes[me->source])->value : ~0ull;
  }
}

enum EmuShuffleKind { EMU_SHFL, EMU_SHFL_UP, EMU_SHFL_DOWN, EMU_SHFL_XOR };

template <class T>
EMU_UNCHECKED static inline T emu_shuffle(EmuShuffleKind kind, const char* name, EmuSite site,
                                          unsigned mask, T value, int operand, int width = 32) {
  static_assert(sizeof(T) <= 8, "shuffles exchange at most 8 bytes");
  if (width < 1 || width > 32 || (width & (width - 1)))
    emu_fail("warp", "the width of a shuffle must be a power of two up to 32", site);
  int lane = emu_context.thread->lane, first = lane & ~(width - 1), source = lane;
  switch (kind) {  // "Warp Shuffle Functions", CUDA C++ programming guide
    case EMU_SHFL: source = first + (operand & (width - 1)); break;
    case EMU_SHFL_UP: source = lane - operand >= first ? lane - operand : lane; break;
    case EMU_SHFL_DOWN: source = lane + operand < first + width ? lane + operand : lane; break;
    case EMU_SHFL_XOR: source = (lane ^ operand) < first + width ? lane ^ operand : lane; break;
  }
  EmuShuffle me{0, 0, source & 31};
  memcpy(&me.value, &value, sizeof(T));
  emu_warp_operation(EMU_WARP_EXCHANGE, name, mask, site, &me, emu_shuffle_exchange);
  memcpy((void*)&value, &me.result, sizeof(T));
  return value;
}
#define __shfl_sync(...) emu_shuffle(EMU_SHFL, "__shfl_sync", EMU_SITE, __VA_ARGS__)
#define __shfl_up_sync(...) emu_shuffle(EMU_SHFL_UP, "__shfl_up_sync", EMU_SITE, __VA_ARGS__)
#define __shfl_down_sync(...) emu_shuffle(EMU_SHFL_DOWN, "__shfl_down_sync", EMU_SITE, __VA_ARGS__)
#define __shfl_xor_sync(...) emu_shuffle(EMU_SHFL_XOR, "__shfl_xor_sync", EMU_SITE, __VA_ARGS__)

// ---- votes, match and reduce
struct EmuVote {
  uint64_t value;
  unsigned ballot;
  bool all_equal;
};

EMU_UNCHECKED static void emu_vote_exchange(void* const* lanes, unsigned, const char**) {
  unsigned ballot = 0;
  for (int i = 0; i < 32; i++)
    if (lanes[i] && ((EmuVote*)lanes[i])->value) ballot |= 1u << i;
  for (int i = 0; i < 32; i++)
    if (lanes[i]) ((EmuVote*)lanes[i])->ballot = ballot;
}
EMU_UNCHECKED static inline unsigned emu_ballot(const char* name, EmuSite site, unsigned mask,
                                                bool predicate) {
  EmuVote me{predicate, 0, false};
  emu_warp_operation(EMU_WARP_EXCHANGE, name, mask, site, &me, emu_vote_exchange);
  return me.ballot;
}
// A lane in the mask that has exited does not vote.
EMU_UNCHECKED static inline int emu_all(EmuSite site, unsigned mask, bool predicate) {
  return emu_ballot("__all_sync", site, mask, !predicate) == 0;
}
#define __ballot_sync(mask, p) emu_ballot("__ballot_sync", EMU_SITE, mask, (p) != 0)
#define __any_sync(mask, p) ((int)(emu_ballot("__any_sync", EMU_SITE, mask, (p) != 0) != 0))
#define __all_sync(mask, p) emu_all(EMU_SITE, mask, (p) != 0)

EMU_UNCHECKED static void emu_match_exchange(void* const* lanes, unsigned, const char**) {
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    EmuVote* me = (EmuVote*)lanes[i];
    me->ballot = 0;
    me->all_equal = true;
    for (int j = 0; j < 32; j++) {
      if (!lanes[j]) continue;
      if (((EmuVote*)lanes[j])->value == me->value) me->ballot |= 1u << j;
      else me->all_equal = false;
    }
  }
}
template <class T>
EMU_UNCHECKED static inline EmuVote emu_match(const char* name, EmuSite site, unsigned mask,
                                              T value) {
  static_assert(sizeof(T) <= 8, "matches compare at most 8 bytes");
  EmuVote me{0, 0, false};
  memcpy(&me.value, &value, sizeof(T));
  emu_warp_operation(EMU_WARP_EXCHANGE, name, mask, site, &me, emu_match_exchange);
  return me;
}
template <class T>
EMU_UNCHECKED static inline unsigned emu_match_all(EmuSite site, unsigned mask, T value, int* p) {
  EmuVote vote = emu_match("__match_all_sync", site, mask, value);
  *p = vote.all_equal;
  return vote.all_equal ? vote.ballot : 0;
}
#define __match_any_sync(mask, v) (emu_match("__match_any_sync", EMU_SITE, mask, v).ballot)
#define __match_all_sync(mask, v, p) emu_match_all(EMU_SITE, mask, v, p)

template <class T>
struct EmuReduce {
  T value;
  T (*combine)(T, T);
};
template <class T>
EMU_UNCHECKED static void emu_reduce_exchange(void* const* lanes, unsigned, const char**) {
  EmuReduce<T>* first = nullptr;
  T total{};
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    EmuReduce<T>* me = (EmuReduce<T>*)lanes[i];
    total = first ? me->combine(total, me->value) : me->value;
    if (!first) first = me;
  }
  for (int i = 0; i < 32; i++)
    if (lanes[i]) ((EmuReduce<T>*)lanes[i])->value = total;
}
template <class T>
EMU_UNCHECKED static inline T emu_reduce(const char* name, EmuSite site, T (*combine)(T, T),
                                         unsigned mask, T value) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "__reduce_*_sync takes 32-bit integers");
  EmuReduce<T> me{value, combine};
  emu_warp_operation(EMU_WARP_EXCHANGE, name, mask, site, &me, emu_reduce_exchange<T>);
  return me.value;
}
template <class T>
struct EmuCombine {
  static T add(T a, T b) { return a + b; }
  static T least(T a, T b) { return a < b ? a : b; }
  static T most(T a, T b) { return a > b ? a : b; }
  static T bits_and(T a, T b) { return a & b; }
  static T bits_or(T a, T b) { return a | b; }
  static T bits_xor(T a, T b) { return a ^ b; }
};
#define EMU_REDUCE(name, mask, v, how) \
  emu_reduce<std::decay_t<decltype(v)>>(name, EMU_SITE, EmuCombine<std::decay_t<decltype(v)>>::how, mask, v)
#define __reduce_add_sync(mask, v) EMU_REDUCE("__reduce_add_sync", mask, v, add)
#define __reduce_min_sync(mask, v) EMU_REDUCE("__reduce_min_sync", mask, v, least)
#define __reduce_max_sync(mask, v) EMU_REDUCE("__reduce_max_sync", mask, v, most)
#define __reduce_and_sync(mask, v) EMU_REDUCE("__reduce_and_sync", mask, v, bits_and)
#define __reduce_or_sync(mask, v) EMU_REDUCE("__reduce_or_sync", mask, v, bits_or)
#define __reduce_xor_sync(mask, v) EMU_REDUCE("__reduce_xor_sync", mask, v, bits_xor)

// ---- block-wide votes
#define __syncthreads_count(p) emu_unsupported_syncthreads_count(p)
#define __syncthreads_and(p) emu_unsupported_syncthreads_and(p)
#define __syncthreads_or(p) emu_unsupported_syncthreads_or(p)

// ---- atomics: a fiber does not lose the processor in the middle, so plain code is atomic.
template <class T>
struct EmuSame {
  typedef T type;
};
#define EMU_ATOMIC(name, expression)                                                       \
  template <class T>                                                                       \
  EMU_UNCHECKED static inline T emu_##name(EmuSite site, T* p, typename EmuSame<T>::type v) { \
    emu_atomic_access((void*)p, sizeof(T), site);                                          \
    T old = *p;                                                                            \
    *p = (T)(expression);                                                                  \
    return old;                                                                            \
  }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicMin, v < old ? v : old)
EMU_ATOMIC(atomicMax, v > old ? v : old)
EMU_ATOMIC(atomicAnd, old & v)
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
EMU_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T>
EMU_UNCHECKED static inline T emu_atomicCAS(EmuSite site, T* p, typename EmuSame<T>::type expected,
                                            typename EmuSame<T>::type v) {
  emu_atomic_access((void*)p, sizeof(T), site);
  T old = *p;
  if (old == expected) *p = v;
  return old;
}
#define atomicAdd(...) emu_atomicAdd(EMU_SITE, __VA_ARGS__)
#define atomicSub(...) emu_atomicSub(EMU_SITE, __VA_ARGS__)
#define atomicExch(...) emu_atomicExch(EMU_SITE, __VA_ARGS__)
#define atomicMin(...) emu_atomicMin(EMU_SITE, __VA_ARGS__)
#define atomicMax(...) emu_atomicMax(EMU_SITE, __VA_ARGS__)
#define atomicAnd(...) emu_atomicAnd(EMU_SITE, __VA_ARGS__)
#define atomicOr(...) emu_atomicOr(EMU_SITE, __VA_ARGS__)
#define atomicXor(...) emu_atomicXor(EMU_SITE, __VA_ARGS__)
#define atomicInc(...) emu_atomicInc(EMU_SITE, __VA_ARGS__)
#define atomicDec(...) emu_atomicDec(EMU_SITE, __VA_ARGS__)
#define atomicCAS(...) emu_atomicCAS(EMU_SITE, __VA_ARGS__)

// ---- from the launch's argument pointers to a C++ call
template <class... A, size_t... I>
EMU_UNCHECKED static void emu_apply(void (*kernel)(A...), void** arguments,
                                    std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<A>*)arguments[I]...);
}
template <class... A>
EMU_UNCHECKED static void emu_apply(void (*kernel)(A...), void** arguments) {
  emu_apply(kernel, arguments, std::index_sequence_for<A...>{});
}
#define EMU_KERNEL(k)                                                                        \
  extern "C" char __start_emush_##k[] __attribute__((weak, visibility("hidden")));           \
  extern "C" char __stop_emush_##k[] __attribute__((weak, visibility("hidden")));            \
  EMU_UNCHECKED static void emu_call_##k(void** arguments) { emu_apply(k, arguments); }
#define EMU_KERNEL_ROW(k, max_threads) \
  {#k, emu_call_##k, __start_emush_##k, __stop_emush_##k, max_threads},

// After each __shared__ declaration: tell the checks where it lies, once per launch.
#define EMU_SHARED_OBJECT(kernel, variable)                                          \
  emu_shared_object(#variable, (void*)&variable, sizeof variable);

#ifndef EMU_CUDA_HEADERS
#include "emu_math.h"
#include "emu_vector.h"
#endif
