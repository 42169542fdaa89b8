// GEMMs through cuBLASLt, as one function that compiled modules link statically.
//
// The library itself is opened at the first call: the path in RELAX_LLM_CUBLASLT, the path that
// was baked in when the object was compiled, then the usual names. So a module can be compiled
// and exported where cuBLAS is not installed.
//
// Row-major tensors are column-major tensors of the transposed matrices, so out = lhs * rhs is
// computed as out^T = rhs^T * lhs^T: cuBLASLt's A is `rhs`, its B is `lhs`, m = N, n = M.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cublaslt_abi.h"

#ifndef RELAX_LLM_CUBLASLT_PATH
#define RELAX_LLM_CUBLASLT_PATH ""
#endif

namespace relax_llm {
namespace {

using tvm::ffi::TensorView;

// Bits of the `flags` argument; kernels/cublaslt.py has the same list.
enum Flags : int64_t {
  kLhsTransposed = 1,  // lhs is (..., K, M)
  kRhsTransposed = 2,  // rhs is (..., N, K)
  kBias = 4,
  kResidual = 8,
  kRelu = 16,
  kGelu = 32,
  kTF32 = 64,
};

struct Library {
  lt::Create create;
  lt::MatmulDescCreate desc_create;
  lt::MatmulDescDestroy desc_destroy;
  lt::MatmulDescSetAttribute desc_set;
  lt::LayoutCreate layout_create;
  lt::LayoutDestroy layout_destroy;
  lt::LayoutSetAttribute layout_set;
  lt::PreferenceCreate preference_create;
  lt::PreferenceDestroy preference_destroy;
  lt::PreferenceSetAttribute preference_set;
  lt::AlgoGetHeuristic heuristic;
  lt::Matmul matmul;
  lt::GetStatusString status_string;
};

template <typename F>
void Load(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  if (*function == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "cuBLASLt has no function " << name
                                << "; expected version 12 or newer";
  }
}

Library Open() {
  std::vector<std::string> names;
  const char* chosen = std::getenv("RELAX_LLM_CUBLASLT");
  if (chosen != nullptr && *chosen != 0) {
    names = {chosen};
  } else {
    if (*RELAX_LLM_CUBLASLT_PATH != 0) names.push_back(RELAX_LLM_CUBLASLT_PATH);
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
      names.push_back(name);
    }
  }
  void* library = nullptr;
  std::string tried;
  for (const std::string& name : names) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    tried += (tried.empty() ? "" : ", ") + name;
  }
  if (library == nullptr) {
    TVM_FFI_THROW(RuntimeError)
        << "this module was compiled for cuBLASLt and the library was not found (tried " << tried
        << "); install it with `pip install nvidia-cublas`, set RELAX_LLM_CUBLASLT to its path, "
           "or compile the module without cublas";
  }
  Library api;
  Load(library, "cublasLtCreate", &api.create);
  Load(library, "cublasLtMatmulDescCreate", &api.desc_create);
  Load(library, "cublasLtMatmulDescDestroy", &api.desc_destroy);
  Load(library, "cublasLtMatmulDescSetAttribute", &api.desc_set);
  Load(library, "cublasLtMatrixLayoutCreate", &api.layout_create);
  Load(library, "cublasLtMatrixLayoutDestroy", &api.layout_destroy);
  Load(library, "cublasLtMatrixLayoutSetAttribute", &api.layout_set);
  Load(library, "cublasLtMatmulPreferenceCreate", &api.preference_create);
  Load(library, "cublasLtMatmulPreferenceDestroy", &api.preference_destroy);
  Load(library, "cublasLtMatmulPreferenceSetAttribute", &api.preference_set);
  Load(library, "cublasLtMatmulAlgoGetHeuristic", &api.heuristic);
  Load(library, "cublasLtMatmul", &api.matmul);
  Load(library, "cublasLtGetStatusString", &api.status_string);
  return api;
}

const Library& Api() {
  static Library api = Open();
  return api;
}

void Check(lt::Status status, const char* what) {
  if (status != lt::kSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << " failed: " << Api().status_string(status) << " ("
                                << status << ")";
  }
}

// Frees a descriptor when the call ends, whichever way it ends.
template <typename Destroy>
struct Owned {
  void* value = nullptr;
  Destroy destroy;
  explicit Owned(Destroy d) : destroy(d) {}
  Owned(const Owned&) = delete;
  ~Owned() {
    if (value != nullptr) destroy(value);
  }
};

lt::DataType TypeOf(const TensorView& t) {
  DLDataType type = t.dtype();
  if (type.lanes == 1) {
    switch (type.code) {
      case kDLFloat:
        if (type.bits == 16) return lt::kR16F;
        if (type.bits == 32) return lt::kR32F;
        if (type.bits == 64) return lt::kR64F;
        break;
      case kDLBfloat:
        if (type.bits == 16) return lt::kR16BF;
        break;
      case kDLInt:
        if (type.bits == 8) return lt::kR8I;
        if (type.bits == 32) return lt::kR32I;
        break;
      case kDLFloat8_e4m3fn:
        return lt::kR8F_E4M3;
      case kDLFloat8_e5m2:
        return lt::kR8F_E5M2;
      default:
        break;
    }
  }
  TVM_FFI_THROW(TypeError) << "cuBLASLt GEMM: no such element type (code "
                           << static_cast<int>(type.code) << ", " << static_cast<int>(type.bits)
                           << " bits)";
  return lt::kR32F;
}

char* Data(const TensorView& t) {
  return static_cast<char*>(t.data_ptr()) + t.byte_offset();
}

int64_t Product(const TensorView& t, int from, int to) {
  int64_t product = 1;
  for (int i = from; i < to; ++i) product *= t.size(i);
  return product;
}

// Largest power of two up to 16 that divides the address. No instruction of the kernels wants more
// than 16 bytes, and an algorithm chosen for less than the actual alignment stays valid, so that
// the allocator's choices do not make one shape look like several.
uint32_t Alignment(const void* pointer) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  uint32_t alignment = 16;
  while (alignment > 1 && address % alignment != 0) alignment /= 2;
  return alignment;
}

struct Problem {
  int64_t m, n, k, batch;  // rows and columns of the row-major result, not cuBLASLt's m and n
  int64_t lhs_stride, rhs_stride;
  lt::DataType lhs_type, rhs_type, out_type;
  int64_t flags;
};

Problem Describe(const TensorView& lhs, const TensorView& rhs, const TensorView& out,
                 int64_t flags) {
  const int ln = lhs.ndim(), rn = rhs.ndim();
  if (ln < 1 || rn < 2) {
    TVM_FFI_THROW(ValueError) << "cuBLASLt GEMM: operands of " << ln << " and " << rn << " axes";
  }
  Problem p;
  p.flags = flags;
  p.lhs_type = TypeOf(lhs);
  p.rhs_type = TypeOf(rhs);
  p.out_type = TypeOf(out);
  const bool lt_ = flags & kLhsTransposed, rt = flags & kRhsTransposed;
  p.k = lt_ ? lhs.size(ln - 2) : lhs.size(ln - 1);
  p.n = rt ? rhs.size(rn - 2) : rhs.size(rn - 1);
  const int64_t rhs_k = rt ? rhs.size(rn - 1) : rhs.size(rn - 2);
  const int64_t rhs_batch = Product(rhs, 0, rn - 2);
  if (rhs_batch == 1 && !lt_) {
    p.m = Product(lhs, 0, ln - 1);  // every leading axis counts rows
    p.batch = 1;
    p.lhs_stride = p.rhs_stride = 0;
  } else {
    p.m = lt_ ? lhs.size(ln - 1) : lhs.size(ln - 2);
    const int64_t lhs_batch = Product(lhs, 0, ln - 2);
    p.batch = lhs_batch > rhs_batch ? lhs_batch : rhs_batch;
    p.lhs_stride = lhs_batch == 1 ? 0 : p.m * p.k;
    p.rhs_stride = rhs_batch == 1 ? 0 : p.n * p.k;
    if ((lhs_batch != 1 && lhs_batch != p.batch) || (rhs_batch != 1 && rhs_batch != p.batch)) {
      TVM_FFI_THROW(ValueError) << "cuBLASLt GEMM: batches of " << lhs_batch << " and "
                                << rhs_batch << " matrices";
    }
  }
  if (p.k != rhs_k || Product(out, 0, out.ndim()) != p.batch * p.m * p.n) {
    TVM_FFI_THROW(ValueError) << "cuBLASLt GEMM: (" << p.m << ", " << p.k << ") times (" << rhs_k
                              << ", " << p.n << ") into " << Product(out, 0, out.ndim())
                              << " elements";
  }
  return p;
}

using Key = std::array<int64_t, 16>;

// One a device: the library's handle and the algorithm chosen for every shape seen.
struct Device {
  lt::Handle handle = nullptr;
  std::map<Key, lt::HeuristicResult> chosen;
};

std::mutex g_mutex;
std::map<int64_t, Device> g_devices;

void SetBatch(lt::Layout layout, int64_t batch, int64_t stride) {
  const int32_t count = static_cast<int32_t>(batch);
  Check(Api().layout_set(layout, lt::kLayoutBatchCount, &count, sizeof(count)), "batch count");
  Check(Api().layout_set(layout, lt::kLayoutBatchStride, &stride, sizeof(stride)), "batch stride");
}

void Matmul(TensorView lhs, TensorView rhs, TensorView bias, TensorView residual, int64_t flags,
            double scale, TensorView out, TensorView workspace) {
  const Library& api = Api();
  const Problem p = Describe(lhs, rhs, out, flags);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  if (p.k == 0) TVM_FFI_THROW(ValueError) << "cuBLASLt GEMM: a product over an axis of length 0";
  if (flags & kBias) {
    if (Product(bias, 0, bias.ndim()) != p.n || TypeOf(bias) != p.out_type) {
      TVM_FFI_THROW(ValueError) << "cuBLASLt GEMM: a bias of " << Product(bias, 0, bias.ndim())
                                << " elements for " << p.n << " columns, or of another dtype";
    }
  }
  if (flags & kResidual) {
    if (Product(residual, 0, residual.ndim()) != p.batch * p.m * p.n ||
        TypeOf(residual) != p.out_type) {
      TVM_FFI_THROW(ValueError) << "cuBLASLt GEMM: the residual has not the result's size or dtype";
    }
  }
  const bool whole = p.out_type == lt::kR32I, wide = p.out_type == lt::kR64F;
  const lt::DataType scale_type = whole ? lt::kR32I : wide ? lt::kR64F : lt::kR32F;
  const lt::ComputeType compute = whole                ? lt::kCompute32I
                                  : wide               ? lt::kCompute64F
                                  : (flags & kTF32) != 0 ? lt::kCompute32FFastTF32
                                                       : lt::kCompute32F;
  Owned desc(api.desc_destroy), a(api.layout_destroy), b(api.layout_destroy),
      d(api.layout_destroy);
  Check(api.desc_create(&desc.value, compute, scale_type), "cublasLtMatmulDescCreate");
  const int32_t op_a = (flags & kRhsTransposed) ? lt::kOpT : lt::kOpN;
  const int32_t op_b = (flags & kLhsTransposed) ? lt::kOpT : lt::kOpN;
  Check(api.desc_set(desc.value, lt::kDescTransA, &op_a, sizeof(op_a)), "TRANSA");
  Check(api.desc_set(desc.value, lt::kDescTransB, &op_b, sizeof(op_b)), "TRANSB");
  int32_t epilogue = 0;
  if (flags & kRelu) epilogue |= lt::kEpilogueRelu;
  if (flags & kGelu) epilogue |= lt::kEpilogueGelu;
  if (flags & kBias) epilogue |= lt::kEpilogueBias;
  if (epilogue == 0) epilogue = lt::kEpilogueDefault;
  Check(api.desc_set(desc.value, lt::kDescEpilogue, &epilogue, sizeof(epilogue)), "EPILOGUE");
  const void* bias_data = nullptr;
  if (flags & kBias) {
    bias_data = Data(bias);
    const int32_t type = p.out_type;
    Check(api.desc_set(desc.value, lt::kDescBiasPointer, &bias_data, sizeof(bias_data)), "BIAS");
    Check(api.desc_set(desc.value, lt::kDescBiasDataType, &type, sizeof(type)), "BIAS type");
  }
  const bool rt = flags & kRhsTransposed, lt_ = flags & kLhsTransposed;
  Check(api.layout_create(&a.value, p.rhs_type, rt ? p.k : p.n, rt ? p.n : p.k, rt ? p.k : p.n),
        "layout of the right operand");
  Check(api.layout_create(&b.value, p.lhs_type, lt_ ? p.m : p.k, lt_ ? p.k : p.m,
                          lt_ ? p.m : p.k),
        "layout of the left operand");
  Check(api.layout_create(&d.value, p.out_type, p.n, p.m, p.n), "layout of the result");
  if (p.batch > 1) {
    SetBatch(a.value, p.batch, p.rhs_stride);
    SetBatch(b.value, p.batch, p.lhs_stride);
    SetBatch(d.value, p.batch, p.m * p.n);
  }
  const char *A = Data(rhs), *B = Data(lhs);
  char* D = Data(out);
  const char* C = (flags & kResidual) ? Data(residual) : D;
  char* space = Data(workspace);
  const uint64_t space_bytes = Product(workspace, 0, workspace.ndim());
  const DLDevice device = out.device();

  lt::HeuristicResult choice;
  lt::Handle handle;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    Device& state = g_devices[(static_cast<int64_t>(device.device_type) << 32) | device.device_id];
    if (state.handle == nullptr) Check(api.create(&state.handle), "cublasLtCreate");
    handle = state.handle;
    const uint32_t align[4] = {Alignment(A), Alignment(B), Alignment(C), Alignment(D)};
    const Key key = {p.m,        p.n,        p.k,        p.batch,    p.lhs_stride,
                     p.rhs_stride, p.lhs_type, p.rhs_type, p.out_type, flags,
                     align[0],   align[1],   align[2],   align[3],   Alignment(bias_data),
                     static_cast<int64_t>(space_bytes)};
    auto found = state.chosen.find(key);
    if (found == state.chosen.end()) {
      Owned preference(api.preference_destroy);
      Check(api.preference_create(&preference.value), "cublasLtMatmulPreferenceCreate");
      Check(api.preference_set(preference.value, lt::kPrefMaxWorkspaceBytes, &space_bytes,
                               sizeof(space_bytes)),
            "workspace size");
      const int names[4] = {lt::kPrefMinAlignmentA, lt::kPrefMinAlignmentB, lt::kPrefMinAlignmentC,
                            lt::kPrefMinAlignmentD};
      for (int i = 0; i < 4; ++i) {
        Check(api.preference_set(preference.value, names[i], &align[i], sizeof(align[i])),
              "alignment");
      }
      lt::HeuristicResult result;
      int count = 0;
      const lt::Status status =
          api.heuristic(handle, desc.value, a.value, b.value, d.value, d.value, preference.value, 1,
                        &result, &count);
      if (status != lt::kSuccess || count == 0) {
        TVM_FFI_THROW(RuntimeError)
            << "cuBLASLt has no algorithm for (" << p.m << ", " << p.k << ") times (" << p.k << ", "
            << p.n << ") with batch " << p.batch << ", types " << p.lhs_type << ", " << p.rhs_type
            << " -> " << p.out_type << ", flags " << flags << ": " << api.status_string(status);
      }
      // A served model sees few shapes; one that sees many starts over instead of growing.
      if (state.chosen.size() >= 4096) state.chosen.clear();
      found = state.chosen.emplace(key, result).first;
    }
    choice = found->second;
  }
  const double alpha64 = scale, beta64 = (flags & kResidual) ? 1.0 : 0.0;
  const float alpha32 = static_cast<float>(alpha64), beta32 = static_cast<float>(beta64);
  const int32_t alpha_int = static_cast<int32_t>(alpha64), beta_int = static_cast<int32_t>(beta64);
  const void* alpha = whole  ? static_cast<const void*>(&alpha_int)
                      : wide ? static_cast<const void*>(&alpha64)
                             : static_cast<const void*>(&alpha32);
  const void* beta = whole  ? static_cast<const void*>(&beta_int)
                     : wide ? static_cast<const void*>(&beta64)
                            : static_cast<const void*>(&beta32);
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  Check(api.matmul(handle, desc.value, alpha, A, a.value, B, b.value, beta, C, d.value, D, d.value,
                   &choice.algo, space, space_bytes, stream),
        "cublasLtMatmul");
}

// How many shapes have an algorithm: for tests and for people who wonder.
int64_t CachedShapes() {
  std::lock_guard<std::mutex> lock(g_mutex);
  int64_t count = 0;
  for (const auto& entry : g_devices) count += static_cast<int64_t>(entry.second.chosen.size());
  return count;
}

}  // namespace
}  // namespace relax_llm

TVM_FFI_DLL_EXPORT_TYPED_FUNC(relax_llm_cublaslt_matmul, relax_llm::Matmul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(relax_llm_cublaslt_cached_shapes, relax_llm::CachedShapes);
