"""InplaceKVCache on prefill functions: a prompt written to the caches, then decoded from there."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from relax_llm_passes import corpus, default_pipeline, report
from relax_llm_passes.fusion.inplace_kv_cache import InplaceKVCache
from relax_llm_passes.merging import merge_modules
from relax_llm_passes.targets import parse_target

TARGET = parse_target("native")


def convert(mod: tvm.IRModule, max_length: int):
    with report.collect() as found:
        result = InplaceKVCache(max_length=max_length)(mod)
    relax.analysis.well_formed(result)
    return result, found


def machine(mod: tvm.IRModule, names: tuple[str, ...]) -> relax.VirtualMachine:
    kept = {g: f for g, f in mod.functions.items() if g.name_hint not in names}
    built = tvm.compile(
        tvm.IRModule(kept, attrs=mod.attrs), TARGET, relax_pipeline=default_pipeline(TARGET)
    )
    return relax.VirtualMachine(built, tvm.cpu())


def both(name: str, prefill: str) -> tvm.IRModule:
    return merge_modules({"decode": corpus.load(name).mod, "prefill": corpus.load(prefill).mod})


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ("llama_decode_gqa_llama3", "llama_prefill_gqa_llama3"),
        pytest.param("mpt_hf_decode", "mpt_hf_prefill_cache", marks=pytest.mark.slow),
        pytest.param("mpt_hf_decode_fp16", "mpt_hf_prefill_cache_fp16", marks=pytest.mark.slow),
    ],
)
def test_a_prompt_then_tokens(decode: str, prefill: str) -> None:
    graph, first = corpus.load(decode), corpus.load(prefill)
    mod, found = convert(both(decode, prefill), 24)
    assert found.matched()["inplace_kv_cache"] == 8
    vm = machine(mod, ("decode", "prefill"))
    plain = tvm.compile(first.mod, "llvm", relax_pipeline="default_build")
    whole = relax.VirtualMachine(plain, tvm.cpu())
    weights = {s.key: a for s, a in zip(graph.input_specs, graph.inputs(), strict=True) if s.weight}
    rest = [tvm.runtime.tensor(weights[s.key]) for s in graph.input_specs if s.weight]
    theirs = [tvm.runtime.tensor(weights[s.key]) for s in first.input_specs if s.weight]
    text = np.random.default_rng(1).integers(0, 97, (1, 13)).astype("int64")
    caches = list(vm["decode_create_cache"]())
    caches_ptr = [np.from_dlpack(c).ctypes.data for c in caches]
    prompt = tvm.runtime.tensor(text[:, :9])
    zero = tvm.runtime.ShapeTuple([0])
    logits, *returned = vm["prefill_inplace"](prompt, *caches, zero, *theirs)
    assert [np.from_dlpack(c).ctypes.data for c in returned] == caches_ptr
    want, *rows = whole["main"](prompt, *theirs)
    assert first.compare([logits.numpy()], [want.numpy()])
    for cache, row in zip(caches, rows, strict=True):
        held, expected = cache.numpy(), row.numpy()
        assert not held[:, :, 9:].any()
        assert first.compare([held[:, :, :9]], [expected])
    # Decoding goes on behind the prompt, as if all had been computed at once.
    want = whole["main"](tvm.runtime.tensor(text), *theirs)[0].numpy()
    for i in range(9, 13):
        token = tvm.runtime.tensor(text[:, i : i + 1])
        length = tvm.runtime.ShapeTuple([i])
        logits, *_ = vm["decode_inplace"](token, *caches, length, *rest)
        assert graph.compare([logits.numpy()[:, 0]], [want[:, i]])
    before = [c.numpy() for c in caches]
    with pytest.raises(ValueError, match="its length must be 0"):
        vm["prefill_inplace"](prompt, *caches, tvm.runtime.ShapeTuple([4]), *theirs)
    long = tvm.runtime.tensor(np.zeros((1, 25), "int64"))
    with pytest.raises(ValueError, match="cache is full"):
        vm["prefill_inplace"](long, *caches, zero, *theirs)
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache.numpy(), old)


def test_running_twice_and_signatures() -> None:
    mod = both("mpt_hf_decode", "mpt_hf_prefill_cache")
    once, _ = convert(mod, 70)
    twice, found = convert(once, 70)
    assert tvm_ffi.structural_equal(once, twice)
    assert not found.matched()
    for name in ("decode", "prefill"):
        assert tvm_ffi.structural_equal(once[name], mod[name])
    func = once["prefill_inplace"]
    assert int(func.attrs["num_input"]) == 1 + 4 + 1
    assert isinstance(func.params[5].ty, relax.ShapeType)
    assert [list(map(int, p.ty.shape.values)) for p in func.params[1:5]] == [[1, 4, 70, 16]] * 4


def extend(new: bool, dtype: str = "float16", width: int = 8, results: int = 2) -> tvm.IRModule:
    """A step on one cache (B, D, T), of a symbolic number of rows, and a function that only makes
    rows."""
    p, n, b = (tvm.tirx.Var(v, "int64") for v in "pnb")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([b, 8, n], "float16"))
    past = relax.Var("past", relax.TensorType([b, 8, p], "float16"))
    with bb.function("step", [x, past]):
        with bb.dataflow():
            y = bb.emit(relax.op.add(x, relax.const(0.5, "float16")))
            rows = bb.emit(relax.op.concat([past, y], 2))
            gv = bb.emit_output(relax.Tuple([bb.emit(relax.op.max(rows, 2)), rows]))
        bb.emit_func_output(gv)
    if new:
        n, b = (tvm.tirx.Var(v, "int64") for v in "nb")
        x = relax.Var("x", relax.TensorType([b, width, n], dtype))
        with bb.function("begin", [x]):
            with bb.dataflow():
                y = bb.emit(relax.op.add(x, relax.const(0.5, dtype)))
                made = [bb.emit(relax.op.max(y, 2)), y][2 - results :]
                gv = bb.emit_output(relax.Tuple(made) if results > 1 else made[0])
            bb.emit_func_output(gv)
    return bb.get()


def test_any_number_of_rows_at_any_length() -> None:
    mod, _ = convert(extend(True), 12)
    vm = machine(mod, ("step", "begin"))
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((3, 8, 12)) - 3).astype("float16")
    expected = x + np.float16(0.5)
    (cache,) = vm["step_create_cache"](tvm.runtime.ShapeTuple([3]))
    top, _ = vm["begin_inplace"](
        tvm.runtime.tensor(x[:, :, :5].copy()), cache, tvm.runtime.ShapeTuple([0])
    )
    np.testing.assert_array_equal(top.numpy(), expected[:, :, :5].max(2))
    for start, end in ((5, 9), (9, 10), (10, 12)):
        part = tvm.runtime.tensor(x[:, :, start:end].copy())
        top, _ = vm["step_inplace"](part, cache, tvm.runtime.ShapeTuple([start]))
        np.testing.assert_array_equal(top.numpy(), expected[:, :, :end].max(2))
    np.testing.assert_array_equal(cache.numpy(), expected)
    part = tvm.runtime.tensor(x[:, :, :2].copy())
    with pytest.raises(ValueError, match="cache is full"):
        vm["step_inplace"](part, cache, tvm.runtime.ShapeTuple([11]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "is float32"),
        ({"width": 6}, "expected float16 (b, 8, rows)"),
    ],
)
def test_functions_that_are_no_prefill_are_refused(change: dict, reason: str) -> None:
    mod, found = convert(extend(True, **change), 12)
    assert "begin_inplace" not in [g.name_hint for g in mod.functions]
    (refusal,) = [r for p in found.passes for r in p.refusals]
    assert reason in refusal.reason and refusal.function == "begin"


def test_a_single_result_is_the_cache() -> None:
    mod, _ = convert(extend(True, results=1), 12)
    vm = machine(mod, ("step", "begin"))
    (cache,) = vm["step_create_cache"](tvm.runtime.ShapeTuple([1]))
    x = np.ones((1, 8, 4), "float16")
    returned = vm["begin_inplace"](tvm.runtime.tensor(x), cache, tvm.runtime.ShapeTuple([0]))
    assert np.from_dlpack(returned).ctypes.data == np.from_dlpack(cache).ctypes.data
    np.testing.assert_array_equal(cache.numpy()[:, :, :4], x + 0.5)


def test_keys_and_values_of_different_layouts() -> None:
    graph = corpus.load("mpt_foundry_rope_decode")
    mod, found = convert(graph.mod, 20)
    assert found.matched()["inplace_kv_cache"] == 4
    vm = machine(mod, ("main",))
    ids, *pasts = graph.inputs(seed=1, past=7)[:5]
    weights = [tvm.runtime.tensor(a) for a in graph.inputs()[5:]]
    caches = list(vm["main_create_cache"]())
    for cache, past in zip(caches, pasts, strict=True):
        held = cache.numpy()
        held[tuple(slice(n) for n in past.shape)] = past
        cache.copyfrom(held)
    plain = tvm.compile(graph.mod, "llvm", relax_pipeline="default_build")
    old = relax.VirtualMachine(plain, tvm.cpu())
    want = old["main"](*[tvm.runtime.tensor(a) for a in (ids, *pasts)], *weights)
    token, length = tvm.runtime.tensor(ids), tvm.runtime.ShapeTuple([7])
    got = vm["main_inplace"](token, *caches, length, *weights)
    assert graph.compare([got[0].numpy()], [want[0].numpy()])
    for cache, longer in zip(got[1:], want[1:], strict=True):
        held = cache.numpy()[tuple(slice(n) for n in longer.shape)]
        assert graph.compare([held], [longer.numpy()])


def test_merged_modules_keep_what_they_call() -> None:
    graph = corpus.load("llama_mlc_decode")
    mod = merge_modules({"one": graph.mod, "two": graph.mod})
    relax.analysis.well_formed(mod)
    assert {"one", "two", "fused_rope", "fused_rope_1"} <= {g.name_hint for g in mod.functions}
