"""A vector of any type is one access of its whole width, for the checks and for the counters."""

import numpy as np
import pytest

from relax_llm_passes.cuda_on_cpu import run_cuda_source

PREAMBLE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef __nv_bfloat16 bf16;
template <class T> struct __align__(8) four {
  T x, y, z, w;
  four() = default;
  four(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
};
typedef four<half> half4;
typedef four<__nv_bfloat16> bf164;
typedef __nv_bfloat162 bf162;
"""
BODIES = {
    "copy": "*(V*)(b + N * i) = *(V*)(a + N * i);",
    "through registers": "alignas(16) T r[N]; *(V*)(r + 0) = *(V*)(a + N * i); "
                         "*(V*)(b + N * i) = *(V*)(r + 0);",
    "by its parts": "V v = *(V*)(a + N * i); V u = v; u.x = v.y; u.y = v.x; *(V*)(b + N * i) = u;",
    # As TVM writes it: the store of a call's result is the caller's.
    "from a function": "V v = *(V*)(a + N * i); *(V*)(b + N * i) = same(v);",
    "in shared memory": "__shared__ alignas(16) T s[32 * N]; *(V*)(s + N * i) = *(V*)(a + N * i); "
                        "__syncthreads(); *(V*)(b + N * i) = *(V*)(s + N * (31 - i));",
}  # fmt: skip
VECTORS = [("half2", "half", 2), ("half4", "half", 4), ("bf162", "bf16", 2), ("bf164", "bf16", 4),
           ("float2", "float", 2), ("float4", "float", 4), ("uint4", "float", 4)]  # fmt: skip


def launch(vector, element, width, body, shift=0):
    code = f"{PREAMBLE}\ntypedef {vector} V;\ntypedef {element} T;\nconstexpr int N = {width};\n"
    code += "__host__ __device__ V same(V v) { return v; }\n"
    code += 'extern "C" __global__ void k(T* a, T* b) { int i = threadIdx.x; ' + body + " }"
    dtype = "f4" if element == "float" else "u2"
    a = np.arange(32 * width + 8).astype(dtype)
    if shift:
        code = code.replace("(a + ", f"(a + {shift} + ")
    return a, run_cuda_source(code, "k", 1, 32, [a, a * 0])


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("vector, element, width", VECTORS)
def test_one_access(vector, element, width, body):
    a, r = launch(vector, element, width, BODIES[body])
    assert r.report == []
    stats = r.stats[0]
    shared = body == "in shared memory"
    size = width * a.itemsize
    assert stats.warp_accesses == (4 if shared else 2)
    assert stats.shared_accesses == (2 if shared else 0)
    # A whole warp's accesses lie side by side: as many sectors as 32 vectors fill.
    assert stats.global_read_sectors == stats.global_write_sectors == size
    assert stats.global_read == stats.global_written == 32 * size
    got, want = r.outputs[1][: 32 * width].reshape(32, width), a[: 32 * width].reshape(32, width)
    if body == "by its parts":
        want = want.copy()
        want[:, :2] = want[:, 1::-1]
    assert np.array_equal(got, want[::-1] if shared else want)


@pytest.mark.parametrize("vector, element, width", VECTORS)
def test_misaligned(vector, element, width):
    _, r = launch(vector, element, width, BODIES["by its parts"], shift=1)
    assert {f.kind for f in r.report} == {"misaligned"}
    assert f"{width * (4 if element == 'float' else 2)} bytes" in r.report[0].text
