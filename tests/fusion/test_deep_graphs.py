"""Whole models: graphs of the corpus with as many layers as the real ones have."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm import relax

from benchmarks.deep_graphs import deepen
from relax_llm_passes import get_pass, lower, report
from relax_llm_passes.dataflow import FunctionView, op_name, views
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.outline import inline


def _products(mod):
    return sum(op_name(b.value) == "relax.matmul" for v in views(mod) for b in v.bindings)


# The last one has the bindings `lv2260 = lv2259` that importers leave, in every layer.
@pytest.mark.parametrize(
    "name, layers",
    [("mpt_hf_decode", 32), ("rwkv5_package_decode", 24), ("rwkv5_mlc_decode_alias", 24)],
)
def test_every_product_is_outlined_and_inlined_back(name, layers):
    mod, function = deepen(name, layers)
    canonical = canonicalize(mod)
    view = FunctionView(canonical, function)
    assert not any(view.is_alias(b.var) for b in view.bindings)
    after = PartitionGemm()(canonical)
    relax.analysis.well_formed(after)
    found = lower.composites(after)
    assert {c.kind for c in found.values()} == {"gemm"}
    assert len(found) == _products(mod) > 6 * layers
    steps = {s["op"] for c in found.values() for s in c.attrs["epilogue"]}
    assert steps & {"residual", "gelu_erf", "gelu_tanh", "relu_squared", "silu", "sigmoid"}
    assert tvm_ffi.structural_equal(inline(after), canonical)


def test_attention_in_a_deep_model():
    mod, _ = deepen("llama_decode", 16)
    with report.collect() as seen:
        after = get_pass("FuseRotaryAttention")(canonicalize(mod))
    relax.analysis.well_formed(after)
    assert seen.matched("FuseRotaryAttention") == {"attention": 16, "rotary": 16, "append": 16}


def test_layers_share_their_kernels():
    import tvm

    from relax_llm_passes import default_pipeline

    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    counts = set()
    for layers in (4, 8):
        mod, _ = deepen("mpt_hf_decode", layers)
        with target:
            counts.add(len(default_pipeline(target)(mod).functions))
    assert len(counts) == 1
