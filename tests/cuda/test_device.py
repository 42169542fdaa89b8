"""Constructs of CUDA C++, executed and compared with NumPy."""

import ml_dtypes
import numpy as np
import pytest

from relax_llm_passes.cuda_on_cpu import run_cuda_source
from relax_llm_passes.errors import RelaxLLMError

rng = np.random.default_rng(7)
FULL = 0xFFFFFFFF


def launch(code, *arguments, grid=1, block=32, **config):
    r = run_cuda_source(code, "k", grid, block, list(arguments), **config)
    assert r.report == [], [str(f) for f in r.report]
    return r.outputs


@pytest.mark.parametrize("dtype, ctype", [("int32", "int"), ("float32", "float"),
                                          ("int64", "long long"), ("float16", "half"),
                                          ("float64", "double")])  # fmt: skip
def test_shuffles(dtype, ctype):
    code = f"""
#include <cuda_fp16.h>
extern "C" __global__ void k({ctype}* a, {ctype}* b) {{
  int i = threadIdx.x;
  {ctype} x = a[i];
  b[i] = __shfl_sync(0xffffffff, x, 5, 32);
  b[32 + i] = __shfl_up_sync(0xffffffff, x, 3, 8);
  b[64 + i] = __shfl_down_sync(0xffffffff, x, 2, 16);
  b[96 + i] = __shfl_xor_sync(0xffffffff, x, 9);
}}
"""
    a = (rng.standard_normal(32) * 50).astype(dtype)
    lane = np.arange(32)
    up = np.where(lane % 8 >= 3, lane - 3, lane)
    down = np.where(lane % 16 + 2 < 16, lane + 2, lane)
    want = np.concatenate([a[np.full(32, 5)], a[up], a[down], a[lane ^ 9]])
    (_, b) = launch(code, a, np.zeros(128, dtype))
    assert np.array_equal(b, want)


def test_votes_match_reduce_and_active_mask():
    code = """
extern "C" __global__ void k(int* a, unsigned* b) {
  int i = threadIdx.x;
  b[i] = __ballot_sync(0xffffffff, a[i] > 0);
  b[32 + i] = __any_sync(0xffffffff, i == 9) * 2 + __all_sync(0xffffffff, i < 31);
  b[64 + i] = __match_any_sync(0xffffffff, a[i] & 3);
  b[96 + i] = __reduce_add_sync(0xffffffff, a[i]);
  b[128 + i] = __reduce_max_sync(0xffffffff, a[i]);
  b[160 + i] = 0;
  if (i % 3 == 0) b[160 + i] = __activemask();
  b[192 + i] = __popc(a[i]) + __clz(a[i] | 1) + __ffs(a[i]) + __brev(i);
}
"""
    a = rng.integers(-100, 100, 32).astype("int32")
    b = launch(code, a, np.zeros(224, "uint32"))[1].reshape(7, 32)
    bits = np.uint32(sum(1 << i for i in range(32) if a[i] > 0))
    assert (b[0] == bits).all() and (b[1] == 2).all()
    for i in range(32):
        assert b[2][i] == sum(1 << j for j in range(32) if (a[j] & 3) == (a[i] & 3))
    assert (b[3].view("int32") == a.sum()).all() and (b[4].view("int32") == a.max()).all()
    third = sum(1 << i for i in range(0, 32, 3))
    assert all(b[5][i] == (third if i % 3 == 0 else 0) for i in range(32))
    for i in range(32):
        x = int(a[i]) & FULL
        low = (x & -x).bit_length()
        clz = 32 - ((x | 1).bit_length())
        rev = int(f"{i:032b}"[::-1], 2)
        assert b[6][i] == (bin(x).count("1") + clz + low + rev) & FULL


def test_partial_warp_and_two_dimensional_block():
    code = """
extern "C" __global__ void k(int* b) {
  int i = threadIdx.y * blockDim.x + threadIdx.x;
  int sum = i;
  for (int d = 1; d < 4; d <<= 1) sum += __shfl_xor_sync(__activemask(), sum, d, 4);
  b[i + 40 * blockIdx.z] = sum + 1000 * blockIdx.z + (i & 31) - (i % warpSize);
}
"""
    (b,) = launch(code, np.zeros(80, "int32"), block=(4, 10), grid=(1, 1, 2))
    group = np.arange(40).reshape(10, 4).sum(1).repeat(4)
    assert np.array_equal(b, np.concatenate([group, group + 1000]))


def test_atomics():
    code = """
extern "C" __global__ void k(int* a, int* b, float* f, unsigned long long* u) {
  int i = threadIdx.x;
  atomicAdd(&b[0], a[i]); atomicMax(&b[1], a[i]); atomicMin(&b[2], a[i]);
  atomicOr(&b[3], 1 << (i & 15)); atomicXor(&b[4], a[i]); atomicAnd(&b[5], a[i]);
  atomicSub(&b[6], 1); atomicInc((unsigned*)&b[7], 9u); atomicExch(&b[8], 77);
  int old = b[9 * 0 + 9], seen;
  do { seen = old; old = atomicCAS(&b[9], seen, seen + 2); } while (old != seen);
  atomicAdd(f, 0.5f);
  atomicAdd(u, 1ull << 33);
}
"""
    a = rng.integers(-1000, 1000, 32).astype("int32")
    start = np.array([0, -(2**31), 2**31 - 1, 0, 0, -1, 0, 0, 0, 0], "int32")
    r = run_cuda_source(code, "k", 1, 32, [a, start, np.zeros(1, "f4"), np.zeros(1, "u8")],
                        races=False)  # the loop reads b[9] without an atomic  # fmt: skip
    _, b, f, u = r.outputs
    want = [a.sum(), a.max(), a.min(), 0xFFFF, np.bitwise_xor.reduce(a),
            np.bitwise_and.reduce(a), -32, 32 % 10, 77, 64]  # fmt: skip
    assert b.tolist() == [int(x) for x in want]
    assert f[0] == 16 and u[0] == 32 << 33


@pytest.mark.parametrize("dtype, half, two, to_float, from_float, header", [
    ("float16", "half", "half2", "__half2float", "__float2half", "cuda_fp16.h"),
    (ml_dtypes.bfloat16, "nv_bfloat16", "nv_bfloat162", "__bfloat162float", "__float2bfloat16",
     "cuda_bf16.h"),
])  # fmt: skip
def test_half_arithmetic(dtype, half, two, to_float, from_float, header):
    code = f"""
#include <{header}>
extern "C" __global__ void k({half}* a, {half}* b, {half}* c, float* f) {{
  int i = threadIdx.x;
  c[i] = a[i] + b[i];
  c[32 + i] = a[i] * b[i];
  c[64 + i] = a[i] / b[i];
  c[96 + i] = hexp(a[i]) - {half}(0.5f);
  {two} x = __halves2{"half2" if half == "half" else "bfloat162"}(a[i], b[i]);
  x = __hfma2(x, x, x);
  c[128 + i] = x.x; c[160 + i] = x.y;
  c[192 + i] = __hmax(a[i], -b[i]);
  c[224 + i] = {from_float}({to_float}(a[i]) * 3.0f);
  f[i] = (float)a[i] + (a[i] > b[i] ? 1.0f : 0.0f) + (int)b[i];
}}
"""
    a, b = (rng.standard_normal((2, 32)) * 4).astype(dtype)
    _, _, c, f = launch(code, a, b, np.zeros(256, dtype), np.zeros(32, "f4"))
    A, B = a.astype("f8"), b.astype("f8")
    exact = lambda v: np.asarray(v).astype("f4").astype(dtype)  # noqa: E731
    c = c.reshape(8, 32)
    assert np.array_equal(c[0], exact(A + B)) and np.array_equal(c[1], exact(A * B))
    # a quotient and a fused multiply-add rounded once: within half a unit of the exact value
    unit = float(ml_dtypes.finfo(dtype).eps)
    for got, want in ((c[2], A / B), (c[4], A * A + A), (c[5], B * B + B)):
        assert (np.abs(got.astype("f8") - want) <= 0.51 * unit * np.abs(want) + 1e-7).all()
    assert (np.abs(c[3].astype("f8") - (np.exp(A) - 0.5)) <= 2 * unit * (np.exp(A) + 0.5)).all()
    assert np.array_equal(c[6], np.maximum(A, -B).astype(dtype))
    assert np.array_equal(c[7], exact(A * 3))
    assert np.allclose(f, A + (A > B) + np.trunc(B), rtol=1e-6)


def test_bf16_rounds_to_nearest_even():
    code = """
#include <cuda_bf16.h>
extern "C" __global__ void k(float* a, nv_bfloat16* b) {
  b[threadIdx.x] = __float2bfloat16(a[threadIdx.x]);
}
"""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001, 0x3F807FFF] * 6,
                    "uint32")[:32]  # fmt: skip
    a = bits.view("f4")
    _, b = launch(code, a, np.zeros(32, ml_dtypes.bfloat16))
    assert np.array_equal(b.view("u2"), a.astype(ml_dtypes.bfloat16).view("u2"))


def test_vectors_and_int8():
    code = """
extern "C" __global__ void k(signed char* a, int* b, float* f, long long* l) {
  int i = threadIdx.x;
  char4 c = ((char4*)a)[i];
  b[i] = __dp4a(*(int*)&c, *(int*)&c, i);
  float4 v = ((float4*)f)[i];
  ((float4*)f)[i] = make_float4(v.w, v.z, v.y, v.x);
  longlong2 p = ((longlong2*)l)[i];
  ((longlong2*)l)[i] = make_longlong2(p.y, p.x);
  int2 q = make_int2(i, i + 1); ushort4 s = make_ushort4(1, 2, 3, 4); uint3 t = make_uint3(5, 6, 7);
  b[32 + i] = q.y + s.w + t.z + (int)sizeof(double2) + (int)alignof(uchar4);
}
"""
    a = rng.integers(-128, 128, 128).astype("int8")
    f, ll = rng.standard_normal(128).astype("f4"), rng.integers(-(2**60), 2**60, 64)
    _, b, f2, l2 = launch(code, a, np.zeros(64, "int32"), f, ll)
    assert np.array_equal(b[:32], (a.astype("i4").reshape(32, 4) ** 2).sum(1) + np.arange(32))
    assert np.array_equal(f2.reshape(32, 4), f.reshape(32, 4)[:, ::-1])
    assert np.array_equal(l2.reshape(32, 2), ll.reshape(32, 2)[:, ::-1])
    assert np.array_equal(b[32:], np.arange(32) + 1 + 4 + 7 + 16 + 4)


def _mma_source(shape, d_type, in_type, a_registers, b_registers, d_registers):
    total = d_registers
    d = ", ".join(f"%{i}" for i in range(total))
    a = ", ".join(f"%{total + i}" for i in range(a_registers))
    b = ", ".join(f"%{total + a_registers + i}" for i in range(b_registers))
    c = ", ".join(f"%{total + a_registers + b_registers + i}" for i in range(d_registers))
    f = "f" if d_type == "f32" else "r"
    outs = ", ".join(f'"={f}"(d[{i}])' for i in range(d_registers))
    ins = ", ".join(
        [f'"r"(a[{i}])' for i in range(a_registers)] + [f'"r"(b[{i}])' for i in range(b_registers)]
        + [f'"{f}"(c[{i}])' for i in range(d_registers)])  # fmt: skip
    ctype = {"f32": "float", "s32": "int"}.get(d_type, "unsigned")
    return f"""
extern "C" __global__ void k(unsigned* ga, unsigned* gb, {ctype}* gc, {ctype}* gd) {{
  unsigned a[{a_registers}], b[{b_registers}]; {ctype} c[{d_registers}], d[{d_registers}];
  for (int i = 0; i < {a_registers}; i++) a[i] = ga[i * 32 + threadIdx.x];
  for (int i = 0; i < {b_registers}; i++) b[i] = gb[i * 32 + threadIdx.x];
  for (int i = 0; i < {d_registers}; i++) c[i] = gc[i * 32 + threadIdx.x];
  asm volatile("mma.sync.aligned.{shape}.row.col.{d_type}.{in_type}.{in_type}.{d_type} "
    "{{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};\\n" : {outs} : {ins});
  for (int i = 0; i < {d_registers}; i++) gd[i * 32 + threadIdx.x] = d[i];
}}
"""


@pytest.mark.parametrize("shape, in_type, d_type, dtype", [
    ("m16n8k16", "f16", "f32", "float16"), ("m16n8k16", "f16", "f16", "float16"),
    ("m16n8k8", "f16", "f32", "float16"), ("m16n8k16", "bf16", "f32", ml_dtypes.bfloat16),
    ("m16n8k32", "s8", "s32", "int8"),
])  # fmt: skip
def test_mma(shape, in_type, d_type, dtype):
    # Fragments as the PTX ISA gives them, element by element (row, column of each register).
    k = int(shape.split("k")[1])
    e = 4 if in_type == "s8" else 2
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    if in_type == "s8":
        A = rng.integers(-128, 128, (16, k)).astype(dtype)
        B = rng.integers(-128, 128, (k, 8)).astype(dtype)
        C = rng.integers(-1000, 1000, (16, 8)).astype("int32")
    else:
        A, B = (rng.standard_normal(s).astype(dtype) for s in ((16, k), (k, 8)))
        C = rng.standard_normal((16, 8)).astype("float32" if d_type == "f32" else "float16")
    col = [t * e + i for i in range(e)]
    a = [
        np.stack([A[g + 8 * (r % 2), c + r // 2 * 4 * e] for c in col], 1)
        for r in range(k // (2 * e))
    ]
    b = [np.stack([B[c + r * 4 * e, g] for c in col], 1) for r in range(k // (4 * e))]
    pairs = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
    c = np.stack([C[p] for p in pairs], 0)
    if d_type == "f16":
        c = np.stack([np.stack([C[pairs[2 * r]], C[pairs[2 * r + 1]]], 1).view("u4")[:, 0]
                      for r in range(2)])  # fmt: skip
    pack = lambda regs: np.stack([np.ascontiguousarray(x).view("u4")[:, 0] for x in regs])  # noqa: E731
    code = _mma_source(shape, d_type, in_type, len(a), len(b), len(c))
    out = launch(code, pack(a), pack(b), c, np.zeros_like(c))[3]
    D = np.zeros((16, 8), "f8")
    for i, p in enumerate(pairs):
        D[p] = out[i] if d_type != "f16" else out[i // 2].view("f2").reshape(32, 2)[:, i % 2]
    want = A.astype("f8") @ B.astype("f8") + C
    # products are exact; the fp16 result is rounded once
    tolerance = {"s32": 0, "f32": 1e-5, "f16": 1e-3}[d_type]
    assert np.abs(D - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    trans = ".trans" if transposed else ""
    code = f"""
__forceinline__ __device__ unsigned int cast_smem_ptr_to_int(const void* const smem_ptr) {{
  unsigned int smem_int;
  asm volatile ("{{ .reg .u64 smem_int; cvta.to.shared.u64 smem_int, %1; "
    "cvt.u32.u64 %0, smem_int; }}"
    : "=r"(smem_int) : "l"(smem_ptr));
  return smem_int;
}}
extern "C" __global__ void k(unsigned short* a, unsigned* b) {{
  extern __shared__ unsigned char buf[];
  unsigned short* s = (unsigned short*)buf;
  for (int i = 0; i < 8; i++) s[i * 32 + threadIdx.x] = a[i * 32 + threadIdx.x];
  __syncthreads();
  unsigned r[4];
  {{
    unsigned int addr = cast_smem_ptr_to_int(s + 8 * threadIdx.x);
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16"
      "{{%0, %1, %2, %3}}, [%4];\\n"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr));
  }}
  for (int i = 0; i < 4; i++) b[i * 32 + threadIdx.x] = r[i];
}}
"""
    a = rng.integers(0, 65536, 256).astype("u2")
    _, b = launch(code, a, np.zeros(128, "u4"), dynamic_shared=512)
    matrices = a.reshape(4, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    assert np.array_equal(b.view("u2").reshape(4, 8, 8), matrices)


@pytest.mark.parametrize("layout", ["row_major", "col_major"])
def test_wmma(layout):
    code = f"""
#include <mma.h>
extern "C" __global__ void k(half* a, half* b, float* c) {{
  using namespace nvcuda::wmma;
  __shared__ alignas(32) half sa[256];
  for (int i = 0; i < 8; i++) sa[i * 32 + threadIdx.x] = a[i * 32 + threadIdx.x];
  __syncthreads();
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::{layout}> fa;
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::col_major> fb;
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> fc;
  nvcuda::wmma::fill_fragment(fc, 1.0f);
  nvcuda::wmma::load_matrix_sync(fa, sa, 16);
  nvcuda::wmma::load_matrix_sync(fb, b, 16);
  nvcuda::wmma::mma_sync(fc, fa, fb, fc);
  for (int i = 0; i < fc.num_elements; i++) fc.x[i] *= 2.0f;
  nvcuda::wmma::store_matrix_sync(c, fc, 16, nvcuda::wmma::mem_row_major);
}}
"""
    a, b = rng.standard_normal((2, 16, 16)).astype("f2")
    c = launch(code, a, b, np.zeros((16, 16), "f4"))[2]
    left = a if layout == "row_major" else a.T
    want = 2 * (left.astype("f8") @ b.T.astype("f8") + 1)
    assert np.abs(c - want).max() < 1e-5 * np.abs(want).max()  # fp32 sums of 16 exact products


def test_predicated_async_copy():
    code = """
extern "C" __global__ void k(int* a, int* b) {
  __shared__ alignas(16) int s[128];
  unsigned int dst_addr = __cvta_generic_to_shared(s + 4 * threadIdx.x);
  int* src_p = a + 4 * threadIdx.x;
  int predicate = threadIdx.x % 2;
  __asm__ __volatile__(
    "{\\n"
    " .reg .pred p;\\n"
    " setp.eq.u32 p, %3, 1;\\n"
    " @p cp.async.cg.shared.global [%0], [%1], %2;\\n"
    " @!p st.shared.v4.u32 [%0], {%4, %4, %4, %4};\\n"
    "}\\n"
    :: "r"(dst_addr), "l"(src_p), "n"(16), "r"(predicate), "r"(0)
  );
  __asm__ __volatile__("cp.async.commit_group;");
  __asm__ __volatile__("cp.async.wait_group %0;" :: "n"(0));
  __syncthreads();
  for (int i = 0; i < 4; i++) b[4 * threadIdx.x + i] = s[4 * threadIdx.x + i];
}
"""
    a = rng.integers(1, 100, (32, 4)).astype("int32")
    _, b = launch(code, a, np.zeros((32, 4), "int32"))
    assert np.array_equal(b, np.where(np.arange(32)[:, None] % 2, a, 0))


@pytest.mark.parametrize("body, named", [
    ('asm volatile("wgmma.fence.sync.aligned;");', "wgmma.fence.sync.aligned"),
    ('asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 '
     '{%0}, {%0}, {%0}, {%0};" :: "r"(1));',
     "m8n8k4"),
    ('asm volatile("bar.sync 1, 64;");', "bar.sync 1"),
    ('asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0}, %1, %2, 1, 1, 1, 0, 0;"'
     ' :: "r"(1), "l"(b), "l"(b));',
     "wgmma.mma_async"),
    ('asm volatile("tcgen05.fence::before_thread_sync;");', "tcgen05.fence"),
    ('asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(1));', "mbarrier.init"),
    ('asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier'
     '::complete_tx::bytes [%0], [%1, {%2, %3}], [%0];"'
     ' :: "r"(1), "l"(b), "r"(0), "r"(0));',
     "cp.async.bulk.tensor.2d"),
    ('asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 '
     '{%0}, {%0}, {%0}, {%0};" :: "r"(1));',
     "e4m3"),
    ('asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%0};" :: "r"(1));',
     "stmatrix"),
    ("CUtensorMap* map; cuTensorMapEncodeTiled(map);", "TMA"),
    ("__nv_fp8_e4m3 x;", "fp8"),
    ("__cluster_dims__(2, 1, 1);", "thread block clusters"),
    ("__syncthreads_count(1);", "__syncthreads_count"),
    ("b[0] = __some_new_intrinsic(1);", "__some_new_intrinsic"),
])  # fmt: skip
def test_what_is_not_covered_is_named(body, named):
    code = f'extern "C" __global__ void k(int* b) {{ {body} }}'
    with pytest.raises(RelaxLLMError, match=named.replace(".", r"\.")):
        run_cuda_source(code, "k", 1, 32, [np.zeros(1, "int32")])
