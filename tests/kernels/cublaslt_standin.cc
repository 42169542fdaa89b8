// A stand-in for libcublasLt on the CPU: the entry points that the executor uses, computing what
// the descriptors say (operations, leading dimensions, batch strides, epilogue, alpha and beta) and
// refusing what the library documents as unsupported. Sums are made in double.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cublaslt_abi.h"

using namespace relax_llm;

namespace {

struct Desc {
  int compute, scale;
  int32_t op[2] = {lt::kOpN, lt::kOpN};
  int32_t epilogue = lt::kEpilogueDefault;
  const void* bias = nullptr;
  int32_t bias_type = -1;
};

struct Matrix {
  int type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;
};

struct Limits {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

int64_t g_heuristics = 0, g_matmuls = 0, g_last_batch = 0, g_last_epilogue = 0, g_last_compute = 0;
void* g_last_stream = nullptr;

int Bytes(int type) {
  switch (type) {
    case lt::kR64F:
      return 8;
    case lt::kR32F:
    case lt::kR32I:
      return 4;
    case lt::kR16F:
    case lt::kR16BF:
      return 2;
    default:
      return 1;
  }
}

// Value of a small binary float with `e` exponent and `m` mantissa bits.
double Small(uint32_t bits, int e, int m, bool has_infinity) {
  const double sign = (bits >> (e + m)) & 1 ? -1.0 : 1.0;
  const int exponent = (bits >> m) & ((1 << e) - 1), bias = (1 << (e - 1)) - 1;
  const double fraction = (bits & ((1u << m) - 1)) / static_cast<double>(1u << m);
  if (exponent == (1 << e) - 1) {
    if (has_infinity) return fraction == 0 ? sign * INFINITY : NAN;
    if ((bits & ((1u << m) - 1)) == (1u << m) - 1) return NAN;
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1.0 + fraction, exponent - bias);
}

double Get(const void* base, int type, int64_t i) {
  const char* p = static_cast<const char*>(base) + i * Bytes(type);
  uint16_t half;
  float single;
  double twice;
  int32_t whole;
  switch (type) {
    case lt::kR64F:
      std::memcpy(&twice, p, 8);
      return twice;
    case lt::kR32F:
      std::memcpy(&single, p, 4);
      return single;
    case lt::kR32I:
      std::memcpy(&whole, p, 4);
      return whole;
    case lt::kR16F:
      std::memcpy(&half, p, 2);
      return Small(half, 5, 10, true);
    case lt::kR16BF:
      std::memcpy(&half, p, 2);
      return Small(half, 8, 7, true);
    case lt::kR8F_E4M3:
      return Small(static_cast<uint8_t>(*p), 4, 3, false);
    case lt::kR8F_E5M2:
      return Small(static_cast<uint8_t>(*p), 5, 2, true);
    default:
      return *reinterpret_cast<const int8_t*>(p);
  }
}

void Put(void* base, int type, int64_t i, double value) {
  char* p = static_cast<char*>(base) + i * Bytes(type);
  if (type == lt::kR64F) {
    std::memcpy(p, &value, 8);
  } else if (type == lt::kR32F) {
    const float single = static_cast<float>(value);
    std::memcpy(p, &single, 4);
  } else if (type == lt::kR32I) {
    const int32_t whole = static_cast<int32_t>(value);
    std::memcpy(p, &whole, 4);
  } else if (type == lt::kR16F) {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(p, &half, 2);
  } else {  // bfloat16: round to nearest even
    const float single = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    bits += 0x7FFF + ((bits >> 16) & 1);
    const uint16_t upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(p, &upper, 2);
  }
}

bool Fp8(int type) { return type == lt::kR8F_E4M3 || type == lt::kR8F_E5M2; }

uint64_t Hash(const Desc& desc, const Matrix* const layouts[4]) {
  uint64_t h = 1469598103934665603ull;
  auto mix = [&h](uint64_t v) { h = (h ^ v) * 1099511628211ull; };
  mix(desc.compute), mix(desc.op[0]), mix(desc.op[1]), mix(desc.epilogue);
  for (int i = 0; i < 4; ++i) {
    const Matrix& m = *layouts[i];
    mix(m.type), mix(m.rows), mix(m.cols), mix(m.ld), mix(m.batch), mix(m.stride);
  }
  return h;
}

// What the library's documentation says about types, layouts and alignment.
lt::Status Supported(const Desc& desc, const Matrix& a, const Matrix& b, const Matrix& c,
                     const Matrix& d) {
  const uint64_t m = desc.op[0] == lt::kOpN ? a.rows : a.cols;
  const uint64_t k = desc.op[0] == lt::kOpN ? a.cols : a.rows;
  const uint64_t kb = desc.op[1] == lt::kOpN ? b.rows : b.cols;
  const uint64_t n = desc.op[1] == lt::kOpN ? b.cols : b.rows;
  if (k != kb || d.rows != m || d.cols != n || c.rows != m || c.cols != n) return lt::kInvalidValue;
  for (const Matrix* x : {&a, &b, &c, &d}) {
    if (x->ld < static_cast<int64_t>(x->rows) || x->batch != d.batch) return lt::kInvalidValue;
  }
  if (d.batch > 1 && d.stride < static_cast<int64_t>(m * n)) return lt::kInvalidValue;
  if (c.type != d.type) return lt::kNotSupported;
  const bool bias = desc.epilogue & lt::kEpilogueBias;
  if (bias && (desc.bias == nullptr || desc.bias_type != d.type)) return lt::kInvalidValue;
  if (Fp8(a.type) || Fp8(b.type)) {
    if (!Fp8(a.type) || !Fp8(b.type)) return lt::kNotSupported;
    if (a.type == lt::kR8F_E5M2 && b.type == lt::kR8F_E5M2) return lt::kNotSupported;
    if (desc.op[0] != lt::kOpT || desc.op[1] != lt::kOpN) return lt::kNotSupported;
    if (m % 16 || k % 16) return lt::kNotSupported;
    if (d.type != lt::kR16F && d.type != lt::kR16BF && d.type != lt::kR32F) return lt::kNotSupported;
    return desc.compute == lt::kCompute32F ? lt::kSuccess : lt::kNotSupported;
  }
  if (a.type != b.type) return lt::kNotSupported;
  switch (a.type) {
    case lt::kR16F:
    case lt::kR16BF:
      if (d.type != a.type && d.type != lt::kR32F) return lt::kNotSupported;
      return desc.compute == lt::kCompute32F ? lt::kSuccess : lt::kNotSupported;
    case lt::kR32F:
      if (d.type != lt::kR32F) return lt::kNotSupported;
      return desc.compute == lt::kCompute32F || desc.compute == lt::kCompute32FFastTF32
                 ? lt::kSuccess
                 : lt::kNotSupported;
    case lt::kR64F:
      if (d.type != lt::kR64F || desc.epilogue != lt::kEpilogueDefault) return lt::kNotSupported;
      return desc.compute == lt::kCompute64F ? lt::kSuccess : lt::kNotSupported;
    case lt::kR8I:
      if (d.type != lt::kR32I || desc.epilogue != lt::kEpilogueDefault) return lt::kNotSupported;
      if (desc.compute != lt::kCompute32I || k % 4 || a.ld % 4 || b.ld % 4) return lt::kNotSupported;
      return lt::kSuccess;
    default:
      return lt::kNotSupported;
  }
}

double Scalar(const void* p, int type) { return Get(p, type, 0); }

}  // namespace

extern "C" {

lt::Status cublasLtCreate(lt::Handle* handle) {
  *handle = new int(42);
  return lt::kSuccess;
}

const char* cublasLtGetStatusString(lt::Status status) {
  return status == lt::kNotSupported   ? "not supported"
         : status == lt::kInvalidValue ? "invalid value"
         : status == lt::kSuccess      ? "success"
                                       : "error";
}

lt::Status cublasLtMatmulDescCreate(lt::MatmulDesc* desc, int compute, int scale) {
  *desc = new Desc{compute, scale};
  return lt::kSuccess;
}

lt::Status cublasLtMatmulDescDestroy(lt::MatmulDesc desc) {
  delete static_cast<Desc*>(desc);
  return lt::kSuccess;
}

lt::Status cublasLtMatmulDescSetAttribute(lt::MatmulDesc handle, int name, const void* value,
                                          size_t size) {
  Desc* desc = static_cast<Desc*>(handle);
  void* field = name == lt::kDescTransA          ? static_cast<void*>(&desc->op[0])
                : name == lt::kDescTransB        ? static_cast<void*>(&desc->op[1])
                : name == lt::kDescEpilogue      ? static_cast<void*>(&desc->epilogue)
                : name == lt::kDescBiasPointer   ? static_cast<void*>(&desc->bias)
                : name == lt::kDescBiasDataType ? static_cast<void*>(&desc->bias_type)
                                                 : nullptr;
  const size_t expected = name == lt::kDescBiasPointer ? sizeof(void*) : 4;
  if (field == nullptr || size != expected) return lt::kInvalidValue;
  std::memcpy(field, value, size);
  return lt::kSuccess;
}

lt::Status cublasLtMatrixLayoutCreate(lt::Layout* layout, int type, uint64_t rows, uint64_t cols,
                                      int64_t ld) {
  *layout = new Matrix{type, rows, cols, ld};
  return lt::kSuccess;
}

lt::Status cublasLtMatrixLayoutDestroy(lt::Layout layout) {
  delete static_cast<Matrix*>(layout);
  return lt::kSuccess;
}

lt::Status cublasLtMatrixLayoutSetAttribute(lt::Layout handle, int name, const void* value,
                                            size_t size) {
  Matrix* matrix = static_cast<Matrix*>(handle);
  if (name == lt::kLayoutBatchCount && size == 4) {
    std::memcpy(&matrix->batch, value, size);
  } else if (name == lt::kLayoutBatchStride && size == 8) {
    std::memcpy(&matrix->stride, value, size);
  } else {
    return lt::kInvalidValue;
  }
  return lt::kSuccess;
}

lt::Status cublasLtMatmulPreferenceCreate(lt::Preference* preference) {
  *preference = new Limits;
  return lt::kSuccess;
}

lt::Status cublasLtMatmulPreferenceDestroy(lt::Preference preference) {
  delete static_cast<Limits*>(preference);
  return lt::kSuccess;
}

lt::Status cublasLtMatmulPreferenceSetAttribute(lt::Preference handle, int name, const void* value,
                                                size_t size) {
  Limits* limits = static_cast<Limits*>(handle);
  if (name == lt::kPrefMaxWorkspaceBytes && size == 8) {
    std::memcpy(&limits->workspace, value, size);
  } else if (name >= lt::kPrefMinAlignmentA && name <= lt::kPrefMinAlignmentD && size == 4) {
    std::memcpy(&limits->alignment[name - lt::kPrefMinAlignmentA], value, size);
  } else {
    return lt::kInvalidValue;
  }
  return lt::kSuccess;
}

lt::Status cublasLtMatmulAlgoGetHeuristic(lt::Handle, lt::MatmulDesc desc, lt::Layout a,
                                          lt::Layout b, lt::Layout c, lt::Layout d,
                                          lt::Preference preference, int requested,
                                          lt::HeuristicResult* results, int* found) {
  *found = 0;
  const Matrix* layouts[4] = {static_cast<Matrix*>(a), static_cast<Matrix*>(b),
                              static_cast<Matrix*>(c), static_cast<Matrix*>(d)};
  const Desc& spec = *static_cast<Desc*>(desc);
  const lt::Status status = Supported(spec, *layouts[0], *layouts[1], *layouts[2], *layouts[3]);
  if (status != lt::kSuccess) return status;
  if (requested < 1) return lt::kInvalidValue;
  ++g_heuristics;
  std::memset(results, 0, sizeof(*results));
  results->algo.data[0] = Hash(spec, layouts);
  results->workspace_size = static_cast<Limits*>(preference)->workspace;
  *found = 1;
  return lt::kSuccess;
}

lt::Status cublasLtMatmul(lt::Handle, lt::MatmulDesc desc, const void* alpha, const void* A,
                          lt::Layout a_layout, const void* B, lt::Layout b_layout, const void* beta,
                          const void* C, lt::Layout c_layout, void* D, lt::Layout d_layout,
                          const lt::Algo* algo, void* workspace, size_t workspace_bytes,
                          void* stream) {
  const Desc& spec = *static_cast<Desc*>(desc);
  const Matrix &a = *static_cast<Matrix*>(a_layout), &b = *static_cast<Matrix*>(b_layout),
               &c = *static_cast<Matrix*>(c_layout), &d = *static_cast<Matrix*>(d_layout);
  const lt::Status status = Supported(spec, a, b, c, d);
  if (status != lt::kSuccess) return status;
  const Matrix* layouts[4] = {&a, &b, &c, &d};
  // The algorithm must be one that the heuristic gave for this very problem.
  if (algo == nullptr || algo->data[0] != Hash(spec, layouts)) return lt::kInvalidValue;
  // The library may scribble over all of its workspace; a caller that lies about it should see it.
  if (workspace_bytes > 0) std::memset(workspace, 0xA5, workspace_bytes);
  ++g_matmuls;
  g_last_stream = stream;
  g_last_batch = d.batch;
  g_last_epilogue = spec.epilogue;
  g_last_compute = spec.compute;
  const double scale = Scalar(alpha, spec.scale), add = Scalar(beta, spec.scale);
  const bool ta = spec.op[0] == lt::kOpT, tb = spec.op[1] == lt::kOpT;
  const int64_t m = d.rows, n = d.cols, k = ta ? a.rows : a.cols;
  std::vector<double> result(m * n);
  for (int32_t i = 0; i < d.batch; ++i) {
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        double sum = 0;
        for (int64_t t = 0; t < k; ++t) {
          const int64_t ia = i * a.stride + (ta ? row * a.ld + t : t * a.ld + row);
          const int64_t ib = i * b.stride + (tb ? t * b.ld + col : col * b.ld + t);
          sum += Get(A, a.type, ia) * Get(B, b.type, ib);
        }
        sum *= scale;
        if (add != 0) sum += add * Get(C, c.type, i * c.stride + col * c.ld + row);
        if (spec.epilogue & lt::kEpilogueBias) sum += Get(spec.bias, spec.bias_type, row);
        if (spec.epilogue & lt::kEpilogueRelu) sum = sum > 0 ? sum : 0;
        if (spec.epilogue & lt::kEpilogueGelu) {
          sum = 0.5 * sum * (1 + std::tanh(0.7978845608028654 * (sum + 0.044715 * sum * sum * sum)));
        }
        result[col * m + row] = sum;
      }
    }
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        Put(D, d.type, i * d.stride + col * d.ld + row, result[col * m + row]);
      }
    }
  }
  return lt::kSuccess;
}

// For tests: what was called.
int64_t standin_heuristics() { return g_heuristics; }
int64_t standin_matmuls() { return g_matmuls; }
int64_t standin_last_batch() { return g_last_batch; }
int64_t standin_last_epilogue() { return g_last_epilogue; }
int64_t standin_last_compute() { return g_last_compute; }
void* standin_last_stream() { return g_last_stream; }
}
