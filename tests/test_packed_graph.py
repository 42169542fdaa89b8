"""The benchmarks' graphs with quantised weights compute what the dequantised weights do."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from benchmarks.packed_graph import GROUP, pack, with_packed_weights
from relax_llm_passes import corpus, default_pipeline
from relax_llm_passes.sampling import to_numpy


def _unpacked(words: np.ndarray, scales: np.ndarray, bits: int, axis: int) -> np.ndarray:
    words, scales = (words.T, scales.T) if axis == 0 else (words, scales)
    per, top = 32 // bits, (1 << (bits - 1)) - 1
    fields = [(words >> np.uint32(bits * j)) & np.uint32((1 << bits) - 1) for j in range(per)]
    numbers = np.stack(fields, 2).reshape(words.shape[0], -1).astype("float32") - top
    value = numbers * np.repeat(scales.astype("float32"), GROUP, 1)
    return value.T if axis == 0 else value


@pytest.mark.parametrize("bits, step", [(4, 1 / 7), (8, 1 / 127)])
@pytest.mark.parametrize("axis", [0, 1])
def test_pack_is_within_half_a_step(bits: int, step: float, axis: int) -> None:
    weight = np.random.default_rng(0).standard_normal((96, 64)).astype("float32")
    weight[:, 3] = weight[5] = 0
    value = _unpacked(*pack(weight, bits, axis), bits, axis)
    # Half a step of the largest value, and the scale's rounding to fp16.
    assert np.abs(value - weight).max() <= (step / 2 + 2.0**-10) * np.abs(weight).max()


@pytest.mark.parametrize("name, products", [("mpt_hf_decode", 9), ("rwkv6_package_decode", 15)])
def test_graphs_with_packed_weights_run_on_packed_kernels(name: str, products: int) -> None:
    graph = corpus.load(name)
    mod, arguments = with_packed_weights(graph, 8, smallest=64)
    relax.analysis.well_formed(mod)
    pipeline = default_pipeline("native")
    machine = relax.VirtualMachine(
        tvm.compile(mod, pipeline.target, relax_pipeline=pipeline), tvm.cpu()
    )
    result = machine[graph.function](
        *(tvm.runtime.tensor(np.array(a, order="C")) for a in arguments)
    )
    lowered = next(r for r in pipeline.report.passes if r.name == "LowerComposites")
    assert lowered.matched["gemm:cpu.gemm"] >= products
    # 8 bits keep two digits of these logits.
    for found, wanted in zip(to_numpy(result), graph.golden(), strict=True):
        assert np.abs(found - wanted).max() <= 0.03 * np.abs(wanted).max()
