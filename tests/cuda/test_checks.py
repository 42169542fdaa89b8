"""Every check finds a planted bug, and is silent on the same kernel without it."""

import numpy as np
import pytest

from relax_llm_passes.cuda_on_cpu import run_cuda_source

# Whatever option or variable says.
pytestmark = pytest.mark.cuda_checks("all")
rng = np.random.default_rng(3)


def launch(code, *arguments, grid=1, block=64, **config):
    return run_cuda_source(code, "k", grid, block, list(arguments), **config)


def kinds(result):
    return {f.kind for f in result.report}


A = rng.standard_normal(64).astype("float32")
ZEROS = np.zeros(64, "float32")

REVERSE = """
extern "C" __global__ void __launch_bounds__(64) k(float* a, float* b, int n) {
  __shared__ float s[64];
  SETUP
  s[threadIdx.x] = a[threadIdx.x];
  SYNC
  b[threadIdx.x] = s[INDEX];
}
"""


def reverse(sync="__syncthreads();", index="63 - threadIdx.x", setup=""):
    return REVERSE.replace("SYNC", sync).replace("INDEX", index).replace("SETUP", setup)


def test_clean_kernel_is_silent():
    r = launch(reverse(), A, ZEROS, np.int32(64))
    assert r.report == []
    assert np.array_equal(r.outputs[1], A[::-1])


def test_missing_barrier_is_a_shared_race():
    r = launch(reverse(sync=""), A, ZEROS, np.int32(64), uninitialised=False)
    assert kinds(r) == {"shared-race"}
    assert {f.line for f in r.report} == {5, 7}
    assert any("s[63 - threadIdx.x]" in f.source for f in r.report)


def test_missing_barrier_changes_the_result_in_another_order():
    clean = launch(reverse(), A, ZEROS, np.int32(64), order="random", seed=5)
    racing = launch(reverse(sync=""), A, ZEROS, np.int32(64), order="random", seed=5)
    assert np.array_equal(clean.outputs[1], A[::-1])
    assert not np.array_equal(racing.outputs[1], A[::-1])
    assert np.isnan(racing.outputs[1]).any()  # shared memory is poisoned


def test_write_after_read():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float s[64];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  float x = s[63 - threadIdx.x];
  SYNC
  s[threadIdx.x] = x + 1.0f;
  __syncthreads();
  b[threadIdx.x] = s[threadIdx.x];
}
"""
    assert launch(code.replace("SYNC", "__syncthreads();"), A, ZEROS).report == []
    r = launch(code.replace("SYNC", ""), A, ZEROS)
    assert kinds(r) == {"shared-race"}
    assert any("write after read" in f.text for f in r.report)


@pytest.mark.parametrize("value, expected", [("threadIdx.x", {"shared-race"}), ("7", set())])
def test_write_after_write_of_different_values(value, expected):
    code = f"""
extern "C" __global__ void k(int* b) {{
  __shared__ int s[1];
  s[0] = {value};
  __syncthreads();
  b[threadIdx.x] = s[0];
}}
"""
    assert kinds(launch(code, np.zeros(64, "int32"))) == expected


def test_syncwarp_orders_its_warp_only():
    code = reverse(sync="__syncwarp();", index="threadIdx.x ^ 1")
    assert launch(code, A, ZEROS, np.int32(64)).report == []
    across = launch(reverse(sync="__syncwarp();"), A, ZEROS, np.int32(64), uninitialised=False)
    assert kinds(across) == {"shared-race"}


def test_shuffle_orders_nothing():
    code = reverse(
        sync="float unused = __shfl_xor_sync(0xffffffff, 1.0f, 1); b[threadIdx.x] = unused;",
        index="threadIdx.x ^ 1",
    )
    assert kinds(launch(code, A, ZEROS, np.int32(64))) >= {"shared-race"}


def test_global_race_between_blocks():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  b[INDEX] = a[i];
}
"""
    a = rng.standard_normal(128).astype("float32")
    assert launch(code.replace("INDEX", "i"), a, a * 0, grid=2).report == []
    r = launch(code.replace("INDEX", "threadIdx.x"), a, a * 0, grid=2)
    assert kinds(r) == {"global-race"} and "block 1" in r.report[0].text


def test_global_race_inside_a_block():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  b[threadIdx.x] = a[threadIdx.x];
  SYNC
  a[threadIdx.x] = b[63 - threadIdx.x];
}
"""
    assert launch(code.replace("SYNC", "__syncthreads();"), A, ZEROS).report == []
    assert "global-race" in kinds(launch(code.replace("SYNC", ""), A, ZEROS))


def test_atomics_do_not_race_with_each_other_and_do_with_plain_writes():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  atomicAdd(b, a[threadIdx.x]);
  if (threadIdx.x == 5) PLAIN
}
"""
    clean = launch(code.replace("PLAIN", ";"), A, np.zeros(1, "float32"), grid=2)
    assert clean.report == []
    # fp32 sum of 128 numbers
    assert abs(clean.outputs[1][0] - 2 * A.astype("f8").sum()) < 1e-4
    r = launch(code.replace("PLAIN", "b[0] = 1.0f;"), A, np.zeros(1, "float32"))
    assert "global-race" in kinds(r)


def test_out_of_bounds_of_global_memory():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  b[threadIdx.x] = a[threadIdx.x + OFFSET];
}
"""
    assert launch(code.replace("OFFSET", "0"), A, ZEROS).report == []
    r = launch(code.replace("OFFSET", "1"), A, ZEROS)
    assert kinds(r) == {"out-of-bounds"} and "thread (63,0,0)" in r.report[0].text
    assert np.isnan(r.outputs[1][63])  # what lies behind is poisoned
    far = launch(code.replace("OFFSET", "100000000"), A, ZEROS)
    assert kinds(far) == {"out-of-bounds"}  # and the launch stops instead of crashing the process


def test_out_of_bounds_of_shared_memory():
    r = launch(reverse(index="threadIdx.x + 1"), A, ZEROS, np.int32(64))
    assert kinds(r) == {"out-of-bounds"}
    code = """
extern "C" __global__ void k(float* a, float* b) {
  extern __shared__ float s[];
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = s[63 - threadIdx.x];
}
"""
    assert launch(code, A, ZEROS, dynamic_shared=256).report == []
    r = launch(code, A, ZEROS, dynamic_shared=252)
    assert "out-of-bounds" in kinds(r)


def test_one_shared_array_does_not_reach_into_the_next():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float s[64];
  __shared__ alignas(16) float t[64];
  s[threadIdx.x] = a[threadIdx.x];
  t[threadIdx.x] = 0.0f;
  __syncthreads();
  b[threadIdx.x] = s[threadIdx.x + OFFSET] + t[threadIdx.x];
}
"""
    assert launch(code.replace("OFFSET", "0"), A, ZEROS).report == []
    assert kinds(launch(code.replace("OFFSET", "1"), A, ZEROS)) == {"out-of-bounds"}


def test_misaligned_vector():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  if (threadIdx.x == 0) *(float4*)(b) = *(float4*)(a + OFFSET);
}
"""
    assert launch(code.replace("OFFSET", "4"), A, ZEROS).report == []
    assert kinds(launch(code.replace("OFFSET", "1"), A, ZEROS)) == {"misaligned"}


def test_uninitialised_shared_memory():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float s[64];
  if (threadIdx.x < LIMIT) s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = s[threadIdx.x];
}
"""
    assert launch(code.replace("LIMIT", "64"), A, ZEROS).report == []
    r = launch(code.replace("LIMIT", "63"), A, ZEROS)
    assert kinds(r) == {"uninitialised-read"}
    assert np.isnan(r.outputs[1][63])


def test_uninitialised_local_is_poisoned():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  volatile float sum[4];
  SET
  for (int i = 0; i < 4; i++) sum[i] = sum[i] + a[threadIdx.x];
  b[threadIdx.x] = sum[0];
}
"""
    clean = launch(code.replace("SET", "for (int i = 0; i < 4; i++) sum[i] = 0.0f;"), A, ZEROS)
    assert np.array_equal(clean.outputs[1], A)
    assert np.isnan(launch(code.replace("SET", ""), A, ZEROS).outputs[1]).all()


@pytest.mark.parametrize(
    "condition",
    ["if (threadIdx.x < 32) __syncthreads();",
     "if (threadIdx.x < 32) { __syncthreads(); } else { __syncthreads(); }"],
)  # fmt: skip
def test_divergent_barrier(condition):
    r = launch(reverse(sync=condition, index="threadIdx.x"), A, ZEROS, np.int32(64))
    assert kinds(r) == {"divergent-barrier"}


def test_divergent_warp_operation():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  float x = a[threadIdx.x];
  if (CONDITION) x += __shfl_xor_sync(MASK, x, 1);
  __syncthreads();
  b[threadIdx.x] = x;
}
"""

    def run(condition, mask):
        return launch(code.replace("CONDITION", condition).replace("MASK", mask), A, ZEROS)

    half = "(threadIdx.x & 31) < 16"
    assert run("true", "0xffffffff").report == []
    assert run(half, "0x0000ffff").report == []
    r = run(half, "0xffffffff")
    assert kinds(r) == {"divergent-warp-operation"} and "16-31" in r.report[0].text
    assert "warp" in kinds(run(half, "0x000000ff"))  # lanes 8-15 are not in the mask they pass


def test_shuffle_from_a_lane_that_does_not_take_part_is_poison():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  float x = a[threadIdx.x];
  if ((threadIdx.x & 31) < 16) x = __shfl_down_sync(0x0000ffff, x, OFFSET, WIDTH);
  b[threadIdx.x] = x;
}
"""
    ok = launch(code.replace("OFFSET", "1").replace("WIDTH", "16"), A, ZEROS)
    assert ok.report == [] and not np.isnan(ok.outputs[1]).any()
    r = launch(code.replace("OFFSET", "1").replace("WIDTH", "32"), A, ZEROS)
    # Undefined on the device; TVM's reductions do it and drop the value, so it is poison.
    value = r.outputs[1].reshape(2, 32)
    assert r.report == [] and np.isnan(value[:, 15]).all() and not np.isnan(value[:, :15]).any()


def test_warp_synchronous_code_needs_lockstep():
    # A reduction tree through volatile shared memory without __syncwarp: right before Volta only.
    code = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float memory[64];
  volatile float* s = memory;
  s[threadIdx.x] = a[threadIdx.x] + a[threadIdx.x + 32];
  for (int i = 16; i > 0; i >>= 1)
    if (threadIdx.x < i) s[threadIdx.x] = s[threadIdx.x] + s[threadIdx.x + i];
  if (threadIdx.x == 0) b[0] = s[0];
}
"""
    r = launch(code, A, ZEROS, block=32, order="descending")
    assert "shared-race" in kinds(r)
    r = launch(code, A, ZEROS, block=32, lockstep=True, races=False)
    assert abs(r.outputs[1][0] - A.astype("f8").sum()) < 1e-5


COPY = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ alignas(16) float s[256];
  unsigned address = __cvta_generic_to_shared(s + 4 * threadIdx.x);
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
    :: "r"(address), "l"(a + 4 * threadIdx.x), "n"(16));
  asm volatile("cp.async.commit_group;");
  WAIT
  SYNC
  *(float4*)(b + 4 * threadIdx.x) = *(float4*)(s + 4 * (63 - threadIdx.x));
}
"""


def test_async_copy():
    a = rng.standard_normal(256).astype("float32")
    wait = 'asm volatile("cp.async.wait_group 0;");'
    clean = launch(COPY.replace("WAIT", wait).replace("SYNC", "__syncthreads();"), a, a * 0)
    assert clean.report == []
    assert np.array_equal(clean.outputs[1].reshape(64, 4), a.reshape(64, 4)[::-1])
    forgotten = launch(COPY.replace("WAIT", "").replace("SYNC", "__syncthreads();"), a, a * 0)
    assert kinds(forgotten) == {"async-copy", "uninitialised-read"}
    unordered = launch(COPY.replace("WAIT", wait).replace("SYNC", ""), a, a * 0)
    assert "shared-race" in kinds(unordered)


def test_invalid_launches():
    for arguments, text in (
        ({"block": 128}, "launch_bounds"),
        ({"block": (32, 64, 1)}, "1 to 1024"),
        ({"dynamic_shared": 300000}, "shared memory"),
    ):
        r = launch(reverse(), A, ZEROS, np.int32(64), **arguments)
        assert kinds(r) == {"invalid-launch"} and text in r.report[0].text
