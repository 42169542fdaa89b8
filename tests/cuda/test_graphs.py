"""Whole decode graphs of the corpus, compiled for CUDA by this package and executed on the CPU."""

import pytest

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.cuda_on_cpu import cuda_target, run_module, totals

# Global bytes touched over those of inputs and outputs. A copy of each weight makes it 3; what is
# above 1 are activations between kernels, and caches that are read, appended to and read again.
GRAPHS = {"rwkv5_package_decode": 1.1, "mpt_foundry_rope_decode": 1.3}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_decode_graph(name):
    graph = corpus.load(name)
    target = cuda_target()
    inputs = graph.inputs()
    result = run_module(
        graph.mod,
        inputs,
        target,
        function=graph.function,
        relax_pipeline=relax_llm_passes.default_pipeline(target),
        orders=5,
    )
    comparison = graph.compare(result.outputs)
    assert comparison, comparison
    least = sum(a.nbytes for a in [*inputs, *result.outputs])
    assert totals(result.stats, least)["bytes_over_minimum"] < GRAPHS[name]
