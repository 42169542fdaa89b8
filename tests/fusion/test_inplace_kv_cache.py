"""InplaceKVCache: generation on caches of fixed capacity equals the functional graph's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.tirx import IntImm

from relax_llm_passes import corpus, default_pipeline, report
from relax_llm_passes.dataflow import FunctionView, op_name
from relax_llm_passes.errors import InputError
from relax_llm_passes.fusion.inplace_kv_cache import InplaceKVCache
from relax_llm_passes.fusion.rotary_attention import FuseRotaryAttention
from relax_llm_passes.lower import LowerComposites
from relax_llm_passes.targets import parse_target

TARGET = parse_target("native")


def convert(mod: tvm.IRModule, max_length: int):
    with report.collect() as found:
        result = InplaceKVCache(max_length=max_length)(mod)
    relax.analysis.well_formed(result)
    return result, found


def machine(mod: tvm.IRModule, ours: bool = True) -> relax.VirtualMachine:
    if ours:
        built = tvm.compile(mod, TARGET, relax_pipeline=default_pipeline(TARGET))
    else:
        built = tvm.compile(mod, TARGET)
    return relax.VirtualMachine(built, tvm.cpu())


def only(mod: tvm.IRModule, *without: str) -> tvm.IRModule:
    kept = {g: f for g, f in mod.functions.items() if g.name_hint not in without}
    return tvm.IRModule(kept, attrs=mod.attrs)


def tensors(arrays) -> list:
    return [tvm.runtime.tensor(a) for a in arrays]


def next_token(logits) -> np.ndarray:
    return logits.numpy()[:, -1].argmax(-1)[:, None].astype("int64")


# GPT-J's prefill graph takes at most 60 tokens, its decode graph 61 rows.
@pytest.mark.parametrize(
    ("name", "tokens", "capacity"),
    [
        ("llama_decode", 64, 69),
        pytest.param("mpt_hf_decode", 64, 69, marks=pytest.mark.slow),
        pytest.param("gptj_decode", 60, 61, marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_the_functional_graph_and_recomputation(
    name: str, tokens: int, capacity: int
) -> None:
    graph, prefill = corpus.load(name), corpus.load(name.replace("_decode", "_prefill"))
    mod, found = convert(graph.mod, capacity)
    assert found.matched()["inplace_kv_cache"] == 4  # keys and values of two layers
    count = 1 + 4
    weights = {s.key: a for s, a in zip(graph.input_specs, graph.inputs(), strict=True) if s.weight}
    plain = machine(graph.mod, ours=False)
    whole = machine(prefill.mod, ours=False)
    fast = machine(only(mod, "main"))
    ours = tensors(graph.inputs()[count:])
    theirs = tensors(weights[s.key] for s in prefill.input_specs if s.weight)

    caches = list(fast["main_create_cache"]())
    given = list(caches)
    past = tensors(graph.inputs(past=0)[1:count])
    token = np.array([[11]], "int64")
    text = token
    steps = []
    for length in range(tokens):
        logits, *past = plain["main"](tvm.runtime.tensor(token), *past, *ours)
        sizes = tvm.runtime.ShapeTuple([length])
        got, *caches = fast["main_inplace"](tvm.runtime.tensor(token), *given, sizes, *ours)
        assert graph.compare([got.numpy()], [logits.numpy()]), f"token {length}"
        token = next_token(logits)
        np.testing.assert_array_equal(next_token(got), token)
        text = np.concatenate([text, token], axis=1)
        steps.append(got.numpy()[:, -1])
    for mine, returned, want in zip(given, caches, past, strict=True):
        # The argument itself came back: no cache was copied.
        assert np.from_dlpack(mine).ctypes.data == np.from_dlpack(returned).ctypes.data
        held = returned.numpy()
        # Keys of a deep layer carry rounding of the layers below, as the logits do.
        np.testing.assert_allclose(held[:, :, :tokens], want.numpy(), rtol=1e-5, atol=1e-5)
        assert not held[:, :, tokens:].any()
    # Recomputed from all tokens at once, by a graph without caches.
    inputs = [tvm.runtime.tensor(text[:, :tokens]), *theirs]
    answer = whole["main"](*inputs)
    again = (answer if hasattr(answer, "numpy") else answer[0]).numpy()
    assert prefill.compare([np.stack(steps, axis=1)], [again])
    np.testing.assert_array_equal(again.argmax(-1), text[:, 1:])


def test_attention_reads_the_cache_itself() -> None:
    graph = corpus.load("llama_decode")
    mod, _ = convert(graph.mod, 70)
    with report.collect() as found, TARGET:
        lowered = LowerComposites()(FuseRotaryAttention()(only(mod, "main")))
    assert found.matched()["attention:cpu.attention"] == 2
    view = FunctionView(lowered, "main_inplace")
    calls = [b.value for b in view.bindings]
    assert sum(op_name(c) == "relax.call_tir_inplace" for c in calls) == 4
    # Neither a concat of caches nor a slice of them is left: nothing has past + 1 rows.
    shapes = [view.shape(b.var) for b in view.bindings if view.users(b.var)]
    grown = [s for s in shapes if s and len(s) == 4 and not isinstance(s[2], int | IntImm)]
    assert not grown


def test_signatures_and_running_twice() -> None:
    graph = corpus.load("mpt_hf_decode")
    once, _ = convert(graph.mod, 70)
    twice, found = convert(once, 70)
    assert tvm_ffi.structural_equal(once, twice)
    assert not found.matched()
    assert tvm_ffi.structural_equal(once["main"], graph.mod["main"])
    func = once["main_inplace"]
    assert len(func.params) == len(graph.mod["main"].params) + 1
    assert isinstance(func.params[5].ty, relax.ShapeType)
    assert int(func.attrs["num_input"]) == int(graph.mod["main"].attrs["num_input"]) + 1
    assert [list(map(int, p.ty.shape.values)) for p in func.params[1:5]] == [[1, 4, 70, 16]] * 4


def small() -> tvm.IRModule:
    """Caches (T, B, D), three rows at a time, and a result that reads the longer cache."""
    p, b = tvm.tirx.Var("p", "int64"), tvm.tirx.Var("b", "int64")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([3, b, 8], "float16"))
    past = relax.Var("past", relax.TensorType([p, b, 8], "float16"))
    with bb.function("step", [x, past]):
        with bb.dataflow():
            y = bb.emit(relax.op.add(x, relax.const(0.5, "float16")))
            rows = bb.emit(relax.op.concat([past, y], 0))
            top = bb.emit(relax.op.max(rows, 0))
            gv = bb.emit_output(relax.Tuple([rows, top]))
        bb.emit_func_output(gv)
    return bb.get()


def test_any_layout_batch_and_number_of_rows() -> None:
    mod, _ = convert(small(), 9)
    vm = machine(mod)
    rng = np.random.default_rng(5)
    (cache,) = vm["step_create_cache"](tvm.runtime.ShapeTuple([2]))
    assert cache.shape == (9, 2, 8) and not cache.numpy().any()
    expected = np.zeros((0, 2, 8), "float16")
    for length in (0, 3, 6):
        x = (rng.standard_normal((3, 2, 8)) - 3).astype("float16")
        sizes = tvm.runtime.ShapeTuple([length])
        whole, top = vm["step_inplace"](tvm.runtime.tensor(x), cache, sizes)
        expected = np.concatenate([expected, x + np.float16(0.5)])
        np.testing.assert_array_equal(whole.numpy()[: length + 3], expected)
        # Rows that are not in use hold 0, above nearly all of these numbers: they do not count.
        np.testing.assert_array_equal(top.numpy(), expected.max(0))
    with pytest.raises(ValueError, match="cache is full"):
        vm["step_inplace"](tvm.runtime.tensor(x), cache, tvm.runtime.ShapeTuple([7]))
    np.testing.assert_array_equal(cache.numpy(), expected)


def _refused(case: str) -> tvm.IRModule:
    p, q = tvm.tirx.Var("p", "int64"), tvm.tirx.Var("q", "int64")
    bb = relax.BlockBuilder()
    past = relax.Var("past", relax.TensorType([1, p, 8], "float32"))
    more = relax.Var("more", relax.TensorType([1, q, 8], "float32"))
    new = relax.Var("new", relax.TensorType([1, 1, 8], "float32"))
    with bb.function("main", [past, more, new]):
        with bb.dataflow():
            result = []
            rows = bb.emit(relax.op.concat([new, past] if case == "order" else [past, new], 1))
            if case == "not returned":
                result.append(bb.emit(relax.op.max(rows, 1)))
            else:
                result.append(rows)
            if case == "read elsewhere":
                result.append(bb.emit(relax.op.max(past, 1)))
            if case == "lengths":
                result.append(bb.emit(relax.op.concat([more, new], 1)))
            gv = bb.emit_output(relax.Tuple(result))
        bb.emit_func_output(gv)
    return bb.get()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("order", "no parameter that a concat extends"),
        ("not returned", "is not returned"),
        ("read elsewhere", "read outside of its append"),
        ("lengths", "different lengths"),
    ],
)
def test_refusals(case: str, reason: str) -> None:
    mod = _refused(case)
    result, found = convert(mod, 16)
    assert [g.name_hint for g in result.functions] == ["main"]
    (refusal,) = [r for p in found.passes for r in p.refusals]
    assert reason in refusal.reason and refusal.function == "main"


def test_more_rows_than_the_graph_allows_are_refused() -> None:
    result, found = convert(corpus.load("llama_decode").mod, 5000)
    assert len(result.functions) == 1
    (refusal,) = [r for p in found.passes for r in p.refusals]
    assert "at most 241 rows" in refusal.reason


def test_wrong_options_and_taken_names() -> None:
    with pytest.raises(InputError, match="at least 1"):
        InplaceKVCache(max_length=0)(small())
    taken = tvm.IRModule({"step": small()["step"], "step_inplace": small()["step"]})
    with pytest.raises(InputError, match="already"):
        InplaceKVCache(max_length=9)(taken)
