"""TVM's own CUDA kernels on the CPU: equal to float64 in five thread orders, checks silent."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import relax_llm_passes
from relax_llm_passes.cuda_on_cpu import (
    CheckError,
    configure,
    cuda_target,
    findings,
    install,
    launches,
    run_module,
)
from tests.cuda.paged_attention import (
    DECODING,
    DIM,
    HEADS,
    KV_HEADS,
    MERGING,
    TOKENS,
    PagedAttention,
    attention_reference,
)
from tests.cuda.tvm_kernels import CASES, DTYPES, UNIT, array, changed_source, gemv_module, module

ORDERS = [("ascending", 1), ("descending", 1), ("random", 1), ("random", 2), ("random", 3)]
RUNS = [(c, d) for c in CASES.values() for d in c.roundings]


@pytest.mark.parametrize("case, dtype", RUNS, ids=[f"{c}-{d}" for c, d in RUNS])
def test_kernel(case, dtype, request):
    if case.name == "matmul_tensor_core":
        request.getfixturevalue("tensor_intrinsics")
    inputs = case.inputs(dtype)
    # Strict: a finding, or a bit that depends on the thread order, raises. Kernels that race (see
    # Case.racing) run with their warps in lockstep, where the same checks must be silent too.
    r = run_module(case.module(dtype), inputs, function="forward", orders=len(ORDERS),
                   lockstep=dtype in case.racing)  # fmt: skip
    assert r.report == [] and len(r.stats) == 1
    assert case.worst(dtype, inputs, r.outputs[0]) <= 1
    stats = r.stats[0]
    if case.name == "matmul_tensor_core":
        assert stats.dynamic_shared > 0 and stats.warp_operations > 0
    if case.name == "group_norm":  # a block per token, the groups one after the other
        assert stats.blocks == 3 and stats.barriers_per_block > 4


@pytest.mark.parametrize(
    "case, dtype",
    [(c, d) for c in CASES.values() for d in c.racing],
    ids=lambda x: str(x),
)
def test_the_race_of_bf16_trees_is_found(case, dtype):
    # TVM lowers a bf16 reduction to steps over volatile shared memory with no __syncwarp between
    # them. Volta and newer need not run a warp in lockstep, so the steps race.
    inputs = case.inputs(dtype)
    r = run_module(case.module(dtype), inputs, function="forward", strict=False)
    kinds = {f.kind for f in r.report}
    assert kinds == {"shared-race", "order"}
    races = [f for f in r.report if f.kind == "shared-race"]
    assert all("red_buf0" in f.source for f in races if f.source)
    assert case.worst(dtype, inputs, r.outputs[0]) > 1
    with pytest.raises(CheckError, match="shared-race"):
        run_module(case.module(dtype), inputs, function="forward", orders=1)
    with pytest.raises(CheckError, match="differs in thread order"):
        run_module(case.module(dtype), inputs, function="forward", checks=False)


@pytest.mark.parametrize(
    "case, dtype",
    [(c, d) for c in CASES.values() for d in c.refused],
    ids=lambda x: str(x),
)
def test_dtypes_that_tvm_refuses(case, dtype):
    target = cuda_target()
    error, text = case.refused[dtype]
    with pytest.raises(error, match=text):
        tvm.compile(case.module(dtype), target, relax_pipeline=relax.get_default_pipeline(target))


def test_gemv_of_a_width_that_is_no_multiple_of_16_writes_beyond_its_result():
    # TVM drops the bound of the last rows where it lowers the reduction across threads.
    x, w = array((1, 256), "float32"), array((90, 256), "float32")
    r = run_module(gemv_module("float32", 90), [x, w], function="forward", strict=False, orders=1)
    assert {f.kind for f in r.report} == {"out-of-bounds"}
    assert "write of 4 bytes outside every allocation" in r.report[0].text
    assert r.report[0].count == 6 and "NT_matmul_ptr[" in r.report[0].source


@pytest.mark.parametrize("by", ["TVM", "this package"])
def test_int8_matmul(by):
    # TVM's rule for larger ones makes tensor-core code that TVM cannot lower.
    n, k, m = (50, 64, 96) if by == "TVM" else (128, 128, 128)
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-128, 128, s).astype("int8") for s in ((n, k), (k, m)))
    mod = module(
        lambda x, w: nn.op.matmul(x, w, out_dtype="int32"), x=((n, k), "int8"), w=((k, m), "int8")
    )
    target = cuda_target()
    pipeline = {"TVM": relax.get_default_pipeline,
                "this package": relax_llm_passes.default_pipeline}[by](target)  # fmt: skip
    r = run_module(mod, [x, w], target, function="forward", orders=len(ORDERS),
                   relax_pipeline=pipeline)  # fmt: skip
    assert r.report == []
    assert np.array_equal(r.outputs[0], x.astype("i4") @ w.astype("i4"))


def in_every_order(attention, qkv, pieces):
    """(output, kernels that ran, findings) of the first order; the others give the same bits."""
    results = []
    for order, seed in ORDERS:
        configure(order=order, seed=seed, checks=order == "ascending")
        findings(), launches()
        results.append(attention(qkv, pieces))
        if order == "ascending":
            found, kernels = findings(), {s.kernel for s in launches()}
    configure()
    same = all(np.array_equal(results[0], r) for r in results[1:])
    return results[0], kernels, found, same


def close_to_float64(output, qkv, dtype):
    # Scores and sums are fp32: what is left are roundings of probabilities and of the result.
    roundings = {"float32": 16, "float16": 4, "bfloat16": 4}[dtype]
    want, scale = attention_reference(qkv)
    return bool((np.abs(output.astype("f8") - want) <= roundings * UNIT[dtype] * scale).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention(dtype):
    install()
    attention = PagedAttention(dtype, cuda_target())
    qkv = array((1, TOKENS, HEADS + 2 * KV_HEADS, DIM), dtype)
    output, kernels, found, same = in_every_order(attention, qkv, DECODING)
    assert found == [] and same
    assert kernels >= {"batch_prefill_ragged_kv_kernel", "batch_decode_paged_kv_kernel",
                       "tir_kv_cache_transpose_append_kernel"}  # fmt: skip
    assert close_to_float64(output, qkv, dtype)

    # A piece of several tokens after others. TVM's kernel that merges the two results reads and
    # writes the sums of a row in place, in several threads, with no barrier between.
    merge = "tir_attention_merge_state_kernel"
    output, kernels, found, _ = in_every_order(attention, qkv, MERGING)
    assert kernels >= {"batch_prefill_paged_kv_kernel", merge}
    assert {(f.kind, f.kernel) for f in found} == {("global-race", merge)}
    assert all("S_ptr[" in f.source for f in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_with_a_barrier_where_tvm_has_a_race(dtype):
    def add_barrier(source):
        kernel = source.rindex("tir_attention_merge_state_kernel(")
        store = source.index("  S_ptr[((((int)blockIdx.x) * H) + ((int)threadIdx.y))] =", kernel)
        return source[:store] + "  __syncthreads();\n" + source[store:]

    install()
    qkv = array((1, TOKENS, HEADS + 2 * KV_HEADS, DIM), dtype)
    with changed_source(add_barrier):
        attention = PagedAttention(dtype, cuda_target())
    output, kernels, found, same = in_every_order(attention, qkv, MERGING)
    assert found == [] and same
    assert "tir_attention_merge_state_kernel" in kernels
    assert close_to_float64(output, qkv, dtype)
