"""Layers that are alike are recognised by comparison; the result is that of looking at each."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from benchmarks.deep_graphs import deepen
from relax_llm_passes import corpus, get_pass
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.lower import composites
from relax_llm_passes.patterns import attention
from relax_llm_passes.patterns.alike import alike, follow, path_between


def fused(mod: tvm.IRModule) -> tvm.IRModule:
    mod = get_pass("CanonicalizeBindings")(get_pass("ExpandAttention")(mod))
    return get_pass("FuseRotaryAttention")(mod)


def both_ways(mod: tvm.IRModule, monkeypatch: pytest.MonkeyPatch) -> tuple[tvm.IRModule, int]:
    """Return the fused module, the same with and without comparing; and how often that helped."""
    helped = 0
    real = attention._again

    def counting(*args):
        nonlocal helped
        found = real(*args)
        helped += found is not None
        return found

    monkeypatch.setattr(attention, "_again", counting)
    quick = fused(mod)
    monkeypatch.setattr(attention, "_again", lambda *_: None)
    slow = fused(mod)
    monkeypatch.undo()
    relax.analysis.well_formed(quick)
    assert tvm_ffi.structural_equal(quick, slow)
    return quick, helped


@pytest.mark.parametrize(
    "name", ["mpt_hf_decode", "llama_decode_gqa_llama3", "neox_decode", "gptj_decode"]
)
def test_deep_graphs(name, monkeypatch):
    mod, helped = both_ways(deepen(name, 6)[0], monkeypatch)
    assert len(composites(mod)) == 6
    assert helped >= 5


@pytest.mark.parametrize(
    "name",
    [
        "gemma2_decode",  # a window in every other layer
        "gptoss_decode",
        "llama_static_decode",
        "bloom_prefill",
        "mpt_foundry_dail_decode",
        "llama_decode_gqa_whole",
        "llama_mlc_decode_q4f16_1",
    ],
)
def test_graphs_of_the_corpus(name, monkeypatch):
    mod, _ = both_ways(corpus.load(name).mod, monkeypatch)
    assert len(composites(mod)) == 2


def test_a_layer_that_differs_is_looked_at(monkeypatch):
    mod = corpus.load("mpt_hf_decode").mod
    head, scale, tail = mod.script(show_meta=True).rpartition("R.const(0.25,")
    assert scale in head  # the scale of the layer before
    changed = tvm.script.from_source(head + "R.const(0.5," + tail)
    mod, helped = both_ways(changed, monkeypatch)
    assert len(composites(mod)) == 2 and helped == 0


@I.ir_module
class Chains:
    @R.function
    def main(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
        with R.dataflow():
            a1 = R.exp(x)
            b1 = R.multiply(a1, R.const(2.0, "float32"))
            c1 = R.add(b1, y)
            a2 = R.exp(c1)
            b2 = R.multiply(a2, R.const(2.0, "float32"))
            c2 = R.add(b2, y)
            a3 = R.exp(c2)
            b3 = R.multiply(a3, R.const(2.0, "float32"))
            c3 = R.add(b3, y)
            a4 = R.exp(c3)
            b4 = R.multiply(a4, R.const(3.0, "float32"))
            c4 = R.add(b4, y)
            a5 = R.exp(c4)
            b5 = R.multiply(a5, R.const(2.0, "float32"))
            c5 = R.add(b5, a5)
            R.output(c5)
        return c5


def test_what_alike_demands():
    view = FunctionView(Chains, "main")
    v = {b.var.name: b.var for b in view.bindings}
    region = [v["b2"], v["c2"]]
    path = path_between(view, v["b2"], v["c2"], region)
    assert [p.name for p in path] == ["b2", "c2"]
    assert follow(view, path, v["b3"]).name == "c3"
    mapped = alike(view, region, [v["c2"]], [v["c3"]])
    assert mapped is not None and mapped[v["b2"]].same_as(v["b3"])
    assert mapped[v["a2"]].same_as(v["a3"])
    assert alike(view, region, [v["c2"]], [v["c3"]], lambda _old, _new: False) is None
    assert alike(view, region, [v["c2"]], [v["c4"]]) is None  # another constant
    assert alike(view, region, [v["c2"]], [v["c5"]]) is None  # one value in the place of two
    # What a1 is made of is a parameter, what a2 is made of a result.
    assert alike(view, region, [v["c2"]], [v["c1"]]) is None
    assert alike(view, [v["a2"], *region], [v["c2"]], [v["c1"]]) is None
