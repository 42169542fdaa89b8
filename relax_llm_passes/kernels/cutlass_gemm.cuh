// GEMMs of CUTLASS with an epilogue tree, as one function that compiled modules link statically.
//
// kernels/cutlass_source.py writes a file for each kind of product: element types, orders,
// alignments and the steps of the epilogue, as a tree of CUTLASS's epilogue visitors. Sizes are
// arguments, so that one instance serves every product of its kind in a model.
#pragma once

// The visitors do not include what they need, so they come last.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>

#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace relax_llm {

using cute::_0;
using cute::_1;
using cutlass::Array;
using cutlass::epilogue::threadblock::Sm80EVT;
using tvm::ffi::TensorView;

// Steps of an epilogue, on the fp32 sums.
#define RELAX_LLM_STEP(Name, value)                                                 \
  template <class T>                                                                \
  struct Name;                                                                      \
  template <int N>                                                                  \
  struct Name<Array<float, N>> {                                                    \
    CUTLASS_DEVICE Array<float, N> operator()(Array<float, N> const& input) const { \
      Array<float, N> output;                                                       \
      for (int i = 0; i < N; ++i) {                                                 \
        const float x = input[i];                                                   \
        output[i] = value;                                                          \
      }                                                                             \
      return output;                                                                \
    }                                                                               \
  };

RELAX_LLM_STEP(Relu, x > 0.0f ? x : 0.0f)
RELAX_LLM_STEP(ReluSquared, x > 0.0f ? x * x : 0.0f)
RELAX_LLM_STEP(GeluErf, 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)))
RELAX_LLM_STEP(GeluTanh,
               0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x))))
RELAX_LLM_STEP(Silu, x / (1.0f + expf(-x)))
RELAX_LLM_STEP(Sigmoid, 1.0f / (1.0f + expf(-x)))
RELAX_LLM_STEP(Tanh, tanhf(x))

template <template <class> class Step>
using Compute = cutlass::epilogue::threadblock::VisitorCompute<
    Step, float, float, cutlass::FloatRoundStyle::round_to_nearest>;

using Sums = cutlass::epilogue::threadblock::VisitorAccFetch;
using RowStride = cute::Stride<_0, _1, int32_t>;
using MatrixStride = cute::Stride<int64_t, _1, int64_t>;

template <class Map, class Element>
using Row = cutlass::epilogue::threadblock::VisitorRowBroadcast<Map, Element, RowStride>;
template <class Map, class Element>
using Matrix = cutlass::epilogue::threadblock::VisitorAuxLoad<Map, Element, MatrixStride>;
template <class Map, class Element>
using Store = cutlass::epilogue::threadblock::VisitorAuxStore<
    Map, Element, cutlass::FloatRoundStyle::round_to_nearest, MatrixStride>;

// A block of threads computes BM x BN of the result, BK of each sum at a time.
template <int BM, int BN, int BK, int WM, int WN, int S>
struct Tile {
  using Block = cutlass::gemm::GemmShape<BM, BN, BK>;
  using Warp = cutlass::gemm::GemmShape<WM, WN, BK>;
  static constexpr int kStages = S;
};

// What the call's tensors say; rows and columns are those of the row-major result.
struct Problem {
  int64_t m, n, k, batch;
  int64_t lhs_stride, rhs_stride;  // between the matrices of a batch, in elements
  const void *lhs, *rhs;
  void* out;
  cudaStream_t stream;
};

inline char* Data(const TensorView& t) {
  return static_cast<char*>(t.data_ptr()) + t.byte_offset();
}

inline int64_t Product(const TensorView& t, int from, int to) {
  int64_t product = 1;
  for (int i = from; i < to; ++i) product *= t.size(i);
  return product;
}

inline const void* Aligned(const TensorView& t, int64_t bytes, const char* name) {
  const char* data = Data(t);
  if (reinterpret_cast<uintptr_t>(data) % bytes != 0) {
    TVM_FFI_THROW(ValueError) << "CUTLASS GEMM: " << name << " is at an address that is no multiple"
                              << " of " << bytes << " bytes, which the kernel was compiled for";
  }
  return data;
}

inline Problem Describe(const TensorView& lhs, const TensorView& rhs, const TensorView& out,
                        bool lhs_transposed, bool rhs_transposed, int64_t n, int64_t k) {
  const int ln = lhs.ndim(), rn = rhs.ndim();
  if (ln < 1 || rn < 2) {
    TVM_FFI_THROW(ValueError) << "CUTLASS GEMM: operands of " << ln << " and " << rn << " axes";
  }
  Problem p;
  p.n = rhs_transposed ? rhs.size(rn - 2) : rhs.size(rn - 1);
  p.k = rhs_transposed ? rhs.size(rn - 1) : rhs.size(rn - 2);
  const int64_t lhs_k = lhs_transposed ? lhs.size(ln - 2) : lhs.size(ln - 1);
  const int64_t rhs_batch = Product(rhs, 0, rn - 2);
  if (rhs_batch == 1 && !lhs_transposed) {
    p.m = Product(lhs, 0, ln - 1);  // every leading axis counts rows
    p.batch = 1;
    p.lhs_stride = p.rhs_stride = 0;
  } else {
    p.m = lhs_transposed ? lhs.size(ln - 1) : lhs.size(ln - 2);
    const int64_t lhs_batch = Product(lhs, 0, ln - 2);
    p.batch = lhs_batch > rhs_batch ? lhs_batch : rhs_batch;
    p.lhs_stride = lhs_batch == 1 ? 0 : p.m * p.k;
    p.rhs_stride = rhs_batch == 1 ? 0 : p.n * p.k;
    if ((lhs_batch != 1 && lhs_batch != p.batch) || (rhs_batch != 1 && rhs_batch != p.batch)) {
      TVM_FFI_THROW(ValueError) << "CUTLASS GEMM: batches of " << lhs_batch << " and " << rhs_batch
                                << " matrices";
    }
  }
  if (lhs_k != p.k || p.n % n != 0 || p.k % k != 0 ||
      Product(out, 0, out.ndim()) != p.batch * p.m * p.n) {
    TVM_FFI_THROW(ValueError) << "CUTLASS GEMM: (" << p.m << ", " << lhs_k << ") times (" << p.k
                              << ", " << p.n << ") into " << Product(out, 0, out.ndim())
                              << " elements, compiled for multiples of N=" << n << " and K=" << k;
  }
  if (p.batch > 65535) {
    TVM_FFI_THROW(ValueError) << "CUTLASS GEMM: " << p.batch << " matrices; at most 65535";
  }
  const DLDevice device = out.device();
  p.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  return p;
}

inline void CheckSize(const TensorView& t, int64_t elements, const char* name) {
  if (Product(t, 0, t.ndim()) != elements) {
    TVM_FFI_THROW(ValueError) << "CUTLASS GEMM: " << name << " has "
                              << Product(t, 0, t.ndim()) << " elements; expected " << elements;
  }
}

// Multiprocessors of the current device; 0 when there is none.
inline int Multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline int64_t Blocks(const Problem& p, int64_t rows, int64_t columns) {
  return (p.m + rows - 1) / rows * ((p.n + columns - 1) / columns) * p.batch;
}

template <class A, class LayoutA, int kAlignA, class LayoutB, int kAlignB, class D, int kAlignD,
          class Instruction, class T, template <class> class Tree>
struct Gemm {
  using Map = cutlass::epilogue::threadblock::OutputTileThreadLayout<
      typename T::Block, typename T::Warp, D, kAlignD, 1>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      A, LayoutA, cutlass::ComplexTransform::kNone, kAlignA, A, LayoutB,
      cutlass::ComplexTransform::kNone, kAlignB, D, cutlass::layout::RowMajor, kAlignD, float,
      float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, typename T::Block,
      typename T::Warp, Instruction, typename Tree<Map>::Type,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, T::kStages,
      cutlass::arch::OpMultiplyAdd, 1>::GemmKernel;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  template <class... Operands>
  static void Run(const Problem& p, Operands... operands) {
    const bool by_rows = std::is_same_v<LayoutA, cutlass::layout::RowMajor>;
    const bool columns = std::is_same_v<LayoutB, cutlass::layout::ColumnMajor>;
    typename Device::Arguments arguments(
        p.batch > 1 ? cutlass::gemm::GemmUniversalMode::kBatched
                    : cutlass::gemm::GemmUniversalMode::kGemm,
        {static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k)},
        static_cast<int>(p.batch), Tree<Map>::Arguments(p, operands...), p.lhs, p.rhs, nullptr,
        nullptr, p.lhs_stride, p.rhs_stride, 0, 0, by_rows ? p.k : p.m, columns ? p.k : p.n, 0, 0);
    Device gemm;
    cutlass::Status status = gemm.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = gemm(arguments, nullptr, p.stream);
    if (status != cutlass::Status::kSuccess) {
      const cudaError_t error = cudaGetLastError();
      TVM_FFI_THROW(RuntimeError) << "CUTLASS GEMM (" << p.m << ", " << p.k << ") times (" << p.k
                                  << ", " << p.n << "): " << cutlassGetStatusString(status) << " ("
                                  << cudaGetErrorString(error) << ")";
    }
  }
};

}  // namespace relax_llm
