// The part of cuBLASLt's binary interface that cublaslt.cc uses, written down here so that the
// executor compiles without NVIDIA's headers and finds the library when it runs. A test compares
// every value and size with cublasLt.h where that is installed.
#ifndef RELAX_LLM_PASSES_CUBLASLT_ABI_H_
#define RELAX_LLM_PASSES_CUBLASLT_ABI_H_

#include <cstddef>
#include <cstdint>

namespace relax_llm::lt {

using Handle = void*;
using MatmulDesc = void*;
using Layout = void*;
using Preference = void*;
using Status = int;

struct Algo {
  uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  size_t workspace_size;
  Status state;
  float waves_count;
  int reserved[4];
};

enum DataType : int {
  kR32F = 0,
  kR64F = 1,
  kR16F = 2,
  kR8I = 3,
  kR32I = 10,
  kR16BF = 14,
  kR8F_E4M3 = 28,
  kR8F_E5M2 = 29,
};

enum ComputeType : int {
  kCompute32F = 68,
  kCompute64F = 70,
  kCompute32I = 72,
  kCompute32FFastTF32 = 77,
};

enum DescAttribute : int {
  kDescTransA = 3,
  kDescTransB = 4,
  kDescEpilogue = 7,
  kDescBiasPointer = 8,
  kDescBiasDataType = 26,
};

enum LayoutAttribute : int {
  kLayoutBatchCount = 5,
  kLayoutBatchStride = 6,
};

enum PreferenceAttribute : int {
  kPrefMaxWorkspaceBytes = 1,
  kPrefMinAlignmentA = 5,
  kPrefMinAlignmentB = 6,
  kPrefMinAlignmentC = 7,
  kPrefMinAlignmentD = 8,
};

enum Epilogue : int {
  kEpilogueDefault = 1,
  kEpilogueRelu = 2,
  kEpilogueBias = 4,
  kEpilogueGelu = 32,  // the tanh form
};

enum Operation : int { kOpN = 0, kOpT = 1 };

constexpr Status kSuccess = 0;
constexpr Status kInvalidValue = 7;
constexpr Status kNotSupported = 15;

using Create = Status (*)(Handle*);
using MatmulDescCreate = Status (*)(MatmulDesc*, int compute_type, int scale_type);
using MatmulDescDestroy = Status (*)(MatmulDesc);
using MatmulDescSetAttribute = Status (*)(MatmulDesc, int, const void*, size_t);
using LayoutCreate = Status (*)(Layout*, int type, uint64_t rows, uint64_t cols, int64_t ld);
using LayoutDestroy = Status (*)(Layout);
using LayoutSetAttribute = Status (*)(Layout, int, const void*, size_t);
using PreferenceCreate = Status (*)(Preference*);
using PreferenceDestroy = Status (*)(Preference);
using PreferenceSetAttribute = Status (*)(Preference, int, const void*, size_t);
using AlgoGetHeuristic = Status (*)(Handle, MatmulDesc, Layout, Layout, Layout, Layout, Preference,
                                    int requested, HeuristicResult*, int* found);
using Matmul = Status (*)(Handle, MatmulDesc, const void* alpha, const void* a, Layout,
                          const void* b, Layout, const void* beta, const void* c, Layout, void* d,
                          Layout, const Algo*, void* workspace, size_t workspace_bytes,
                          void* stream);
using GetStatusString = const char* (*)(Status);

}  // namespace relax_llm::lt

#endif  // RELAX_LLM_PASSES_CUBLASLT_ABI_H_
