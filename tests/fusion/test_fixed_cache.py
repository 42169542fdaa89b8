"""Attention on caches of fixed capacity: the update is found in every spelling, numbers stay."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from relax_llm_passes import report
from relax_llm_passes.fusion.rotary_attention import FuseRotaryAttention
from relax_llm_passes.fusion.split_rotary import FuseSplitRotary
from relax_llm_passes.lower import LowerComposites, composites
from relax_llm_passes.targets import parse_target

from .fixed_cache_graphs import SPELLINGS, FixedGraph

TARGET = parse_target("native")
# Values up to about 4 against float64: a few roundings of float32; in the half types the rows of
# the cache are rounded in the reference as well, so only the output's one rounding is left, and
# half a unit more where a rotated row falls the other way.
TOLERANCE = {"float32": 3e-6, "float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}


def fuse(graph: FixedGraph):
    with report.collect() as found, TARGET:
        fused = FuseRotaryAttention()(graph.mod)
    relax.analysis.well_formed(fused)
    return fused, found


def run(mod: tvm.IRModule, inputs: list) -> list[np.ndarray]:
    vm = relax.VirtualMachine(tvm.compile(mod, target=TARGET), tvm.cpu())
    arguments = [
        tvm.runtime.ShapeTuple([a]) if isinstance(a, int) else tvm.runtime.tensor(a) for a in inputs
    ]
    return [x.numpy() for x in vm["main"](*arguments)]


def check_numbers(graph: FixedGraph, bases: tuple[int, ...] = (5,)) -> None:
    fused, _ = fuse(graph)
    with report.collect() as found, TARGET:
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    assert found.matched()["attention:cpu.attention"] == 1
    for base in bases:
        inputs = graph.inputs(base)
        want = graph.reference(inputs, base)
        for got, expected in zip(run(lowered, inputs), want, strict=True):
            error = np.abs(got.astype("float64") - expected).max()
            assert error <= TOLERANCE[graph.dtype], f"at {base}: error {error:.2e}"


CASES = [(how, position) for how, positions in SPELLINGS.items() for position in positions]


@pytest.mark.parametrize(("how", "position"), CASES)
def test_every_spelling_is_one_update(how: str, position: str) -> None:
    graph = FixedGraph(how, position)
    fused, found = fuse(graph)
    counts = found.matched()
    assert counts["attention"] == counts["append"] == counts["rotary"] == 1
    assert not found.refused()
    (composite,) = composites(fused).values()
    assert composite.outputs == ["out", "key_cache", "value_cache"]
    assert composite.attrs["fixed_capacity"] and composite.attrs["skips_keys"]
    assert tvm_ffi.structural_equal(fused["main"].ret_ty, graph.mod["main"].ret_ty)
    with TARGET:
        assert tvm_ffi.structural_equal(FuseRotaryAttention()(fused), fused)


@pytest.mark.parametrize(
    ("how", "position", "options"),
    [
        ("pieces", "size", dict(new=3)),
        ("slice_scatter", "size", dict(capacity="room", finite=False)),
        ("scatter_elements", "rows", dict(new=2, dtype="float16", batch=3)),
        ("scatter_elements", "scalar", dict(dtype="bfloat16", index_dtype="int32")),
        ("scatter_nd", "rows", dict(new=3, sink=True, softcap=2.0)),
        ("index_put", "scalar", dict(batch=1, kv_heads=4, rotary=False)),
        ("where", "rows", dict(sink=True, finite=False)),
    ],
)
def test_numbers_are_those_of_the_program(how: str, position: str, options: dict) -> None:
    graph = FixedGraph(how, position, **options)
    check_numbers(graph, bases=(5, 9) if position == "scalar" else (5,))


def test_the_first_and_the_last_row_of_the_cache() -> None:
    check_numbers(FixedGraph("scatter_elements", "scalar"), bases=(0, 11))


@pytest.mark.parametrize(
    ("how", "position", "options"),
    [
        ("slice_scatter", "size", dict(step=2, new=2)),
        ("scatter_elements", "scalar", dict(step=2, new=2)),
        ("scatter_nd", "rows", dict(step=2, new=2)),
        ("index_put", "scalar", dict(step=3, new=2)),
    ],
)
def test_rows_with_gaps_between_them_stay_outside(how: str, position: str, options: dict) -> None:
    _, found = fuse(FixedGraph(how, position, **options))
    assert found.matched()["attention"] == 1 and not found.matched()["append"]


def test_rows_that_are_added_stay_outside() -> None:
    class Adding(FixedGraph):
        def _update(self, past, new, where):
            index = self.emit(
                relax.op.broadcast_to(
                    self.emit(relax.op.reshape(where, (1, 1, self.S, 1))),
                    (self.B, self.K, self.S, self.D),
                )
            )
            return self.emit(relax.op.scatter_elements(past, index, new, axis=2, reduction="add"))

    _, found = fuse(Adding("scatter_elements"))
    assert found.matched()["attention"] == 1 and not found.matched()["append"]


@pytest.mark.parametrize("how", ["scatter_elements", "slice_scatter"])
def test_many_new_rows_are_written_by_split_rotary(how: str) -> None:
    graph = FixedGraph(how, "size" if how == "slice_scatter" else "scalar", new=6)
    with report.collect() as found, TARGET:
        fused = FuseSplitRotary()(FuseRotaryAttention()(graph.mod))
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    counts = found.matched()
    assert counts["attention"] == 1 and counts["split_rotary:cpu.split_rotary"] == 1
    appended = [c for c in composites(fused).values() if c.kind == "split_rotary"]
    assert len(appended) == 1 and appended[0].attrs["append"]
    inputs = graph.inputs(4)
    for got, want in zip(run(lowered, inputs), graph.reference(inputs, 4), strict=True):
        assert np.abs(got - want).max() <= TOLERANCE["float32"]
