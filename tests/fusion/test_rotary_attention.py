"""FuseRotaryAttention: what matches, what is refused, and that no number changes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax

from relax_llm_passes import report
from relax_llm_passes.dataflow import FunctionView, op_name
from relax_llm_passes.fusion.rotary_attention import FuseAttention, FuseRotaryAttention
from relax_llm_passes.fusion.split_rotary import FuseSplitRotary
from relax_llm_passes.lower import LowerComposites, composites
from relax_llm_passes.targets import parse_target

from .attention_graphs import Graph, run

TARGET = parse_target("native")
# Against float64, values up to about 4: a few units of float32. In float16 inputs are exact and
# x + 0.25, the new cache rows and the output are rounded once each.
TOLERANCE = {"float32": 3e-6, "float16": 4 * 2.0**-10}


def fuse(graph: Graph):
    with report.collect() as found, TARGET:
        fused = FuseRotaryAttention()(graph.mod)
    relax.analysis.well_formed(fused)
    return fused, found


def check_numbers(graph: Graph, past: int = 7) -> None:
    fused, _ = fuse(graph)
    with report.collect() as found, TARGET:
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    assert found.matched()["attention:cpu.attention"] == 1
    names = [op_name(b.value) for b in FunctionView(lowered, "main").bindings]
    # Masks and positions are computed in the kernel: nothing is left of them, not even unused.
    assert not {"relax.arange", "relax.where", "relax.nn.softmax"} & set(names)
    inputs = graph.inputs(past)
    for got, want in zip(run(lowered, inputs, TARGET), graph.reference(inputs), strict=True):
        assert got.shape == want.shape and str(got.dtype) == graph.dtype
        error = np.abs(got.astype("float64") - want.astype("float64")).max()
        assert error <= TOLERANCE[graph.dtype], f"error {error:.2e}"


MATCHES = {
    "split-half": (dict(), "half", 8),
    "slices-interleaved": (dict(split="slice", rotary="interleaved", mask="added"),
                           "interleaved", 8),
    "heads-partial": (dict(split="heads", rotary_dim=4), "half", 4),
    "partial-interleaved": (dict(rotary="interleaved", rotary_dim=4, alias=True),
                            "interleaved", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHES)
def test_decode_matches_rotary_split_append_and_attention(name: str) -> None:
    options, style, width = MATCHES[name]
    graph = Graph(**options)
    fused, found = fuse(graph)
    counts = found.matched()
    assert [counts[k] for k in ("attention", "rotary", "split", "append")] == [1, 1, 1, 1]
    assert not found.refused()
    (composite,) = composites(fused).values()
    assert composite.outputs == ["out", "key_cache", "value_cache"]
    assert composite.attrs["rotary"] == {"style": style, "rotary_dim": width, "head_dim": 8}
    assert composite.attrs["group"] == 2
    names = {p.ty.dtype for p in fused["main"].params if isinstance(p.ty, relax.TensorType)}
    assert names
    assert tvm_ffi.structural_equal(fused["main"].ret_ty, graph.mod["main"].ret_ty)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(new=3, split="slice", rotary="interleaved", rotary_dim=4, mask="added", alias=True),
        dict(dtype="float16", kv_heads=4, split="heads", batch=1),
        dict(past=False, new=19, kv_heads=1),
    ],
    ids=["decode", "three-new-partial", "float16", "prefill"],
)
def test_numbers_are_those_of_the_program(options: dict) -> None:
    check_numbers(Graph(**options))


def test_a_second_run_changes_nothing() -> None:
    graph = Graph()
    once, _ = fuse(graph)
    with TARGET:
        twice = FuseRotaryAttention()(once)
    assert tvm_ffi.structural_equal(once, twice)


def test_without_append_the_concat_stays_outside() -> None:
    with TARGET:
        fused = FuseAttention()(Graph().mod)
    (composite,) = composites(fused).values()
    assert composite.outputs == ["out"] and not composite.attrs["append"]


def test_a_causal_mask_lets_the_kernel_skip_keys() -> None:
    fused, _ = fuse(Graph(past=False, new=19))
    (composite,) = composites(fused).values()
    assert composite.attrs["skips_keys"]
    fused, _ = fuse(Graph(past=False, new=19, mask="none"))
    (composite,) = composites(fused).values()
    assert not composite.attrs["skips_keys"]


def test_probabilities_used_elsewhere_are_refused() -> None:
    fused, found = fuse(Graph(return_scores=True))
    assert not composites(fused)
    (refusal,) = found.refused()
    assert "probabilities are also used elsewhere" in refusal.reason
    assert refusal.binding and refusal.function == "main"


def test_a_softmax_over_another_axis_is_no_attention() -> None:
    fused, found = fuse(Graph(softmax_axis=1))
    assert not composites(fused) and not found.matched()


@pytest.mark.parametrize(
    "options",
    [
        dict(new=9, rotary="interleaved", rotary_dim=4, split="slice"),
        dict(past=False, new=11, kv_heads=1, split="heads"),
    ],
    ids=["append", "prefill"],
)
def test_what_attention_leaves_goes_to_split_rotary(options: dict) -> None:
    graph = Graph(**options)
    with report.collect() as found, TARGET:
        fused = FuseSplitRotary()(FuseRotaryAttention()(graph.mod))
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    counts = found.matched()
    assert counts["split_rotary:cpu.split_rotary"] == counts["attention:cpu.attention"] == 1
    inputs = graph.inputs()
    for got, want in zip(run(lowered, inputs, TARGET), graph.reference(inputs), strict=True):
        assert np.abs(got - want).max() <= TOLERANCE["float32"]


def test_split_rotary_alone_writes_q_k_and_v() -> None:
    graph = Graph()
    with report.collect() as found, TARGET:
        fused = FuseSplitRotary()(graph.mod)
        twice = FuseSplitRotary()(fused)
        lowered = LowerComposites()(fused)
    assert tvm_ffi.structural_equal(fused, twice)
    assert found.matched()["split_rotary:cpu.split_rotary"] == 1
    (composite,) = composites(fused).values()
    assert len(composite.outputs) == 3 and composite.attrs["append"]
    inputs = graph.inputs()
    for got, want in zip(run(lowered, inputs, TARGET), graph.reference(inputs), strict=True):
        assert np.abs(got - want).max() <= TOLERANCE["float32"]
