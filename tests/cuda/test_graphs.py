"""Whole decode graphs of the corpus, compiled for CUDA by this package and executed on the CPU."""

import pytest

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.cuda_on_cpu import cuda_target, run_module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rwkv5_package_decode", "mpt_foundry_rope_decode"])
def test_decode_graph(name):
    graph = corpus.load(name)
    target = cuda_target()
    result = run_module(
        graph.mod,
        graph.inputs(),
        target,
        function=graph.function,
        relax_pipeline=relax_llm_passes.default_pipeline(target),
        orders=2,
    )
    comparison = graph.compare(result.outputs)
    assert comparison, comparison
