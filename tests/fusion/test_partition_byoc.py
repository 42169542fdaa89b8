"""The drop-ins for TVM's cuBLAS and CUTLASS partitioning, beside TVM's own."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm import relax
from tvm.relax.backend.cuda import cublas as upstream_cublas
from tvm.relax.backend.cuda import cutlass as upstream_cutlass
from tvm.relax.backend.pattern_registry import get_pattern
from tvm.script import ir as I
from tvm.script import relax as R

from relax_llm_passes.fusion.partition_byoc import partition_for_cublas, partition_for_cutlass

from ..patterns.gemm_cases import ACCEPTED, NEAR_MISSES, PAIRS

CASES = {c.name: c for c in [*ACCEPTED, *NEAR_MISSES, *[p for p, _ in PAIRS]]}


def _local_functions(mod):
    found = []

    def visit(expr):
        if isinstance(expr, relax.Function) and expr.attrs and "Composite" in expr.attrs:
            found.append(expr)

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            visit(func)
            relax.analysis.post_order_visit(func, visit)
    return found


def _names(mod):
    return sorted(str(f.attrs["Composite"]) for f in _local_functions(mod))


# Where TVM's own lists are right, the drop-ins say the same.
AGREE = [
    "plain", "transposed", "transposed_default_axes", "rows_3d", "vector_expanded", "batched",
    "batched_transposed", "batch_axes_moved", "batch_of_low_rank", "symbolic_k", "bias",
    "bias_left", "bias_row", "bias_residual_relu", "gelu", "gelu_spelled", "diamond",
    "two_outputs", "both_broadcast", "ranks_differ", "softmax_after",
]  # fmt: skip


@pytest.mark.parametrize("name", AGREE)
def test_like_upstream_where_upstream_is_right(name):
    mod = CASES[name].module("float16")
    ours, theirs = partition_for_cublas(mod), upstream_cublas.partition_for_cublas(mod)
    assert _names(ours) == _names(theirs)
    assert _names(partition_for_cutlass(mod)) == _names(
        upstream_cutlass.partition_for_cutlass(CASES[name].module("float16"))
    )


# What TVM's lists take and the libraries cannot do, and what they miss.
DIFFER = {
    "identity_permute": ["matmul"],
    "two_transposes": ["matmul"],
    "vector": [],
    "square": [],
    "gram": [],
    "bias_is_lhs": [],
    "scalar_bias": ["matmul_transposed"],
    "bias_of_one": ["matmul_transposed"],
    "deeper_bias": ["matmul_transposed"],
    "unknown_shape": [],
    "vector_right": [],
    "int8_sums_in_int8": [],
    "half_to_double": [],
    "bias_without_shape": ["matmul_transposed"],
    "aliases": ["matmul_transposed_bias_relu"],
    "sum_of_products": ["matmul_transposed", "matmul_transposed"],
    "importer": [],  # the size 2*n would become a shape argument
}


@pytest.mark.parametrize("name", DIFFER)
@pytest.mark.parametrize("library", ["cublas", "cutlass"])
def test_what_upstream_gets_wrong(name, library):
    drop_in = partition_for_cublas if library == "cublas" else partition_for_cutlass
    new = drop_in(CASES[name].module("float16"))
    relax.analysis.well_formed(new)
    assert _names(new) == [f"{library}.{n}" for n in DIFFER[name]]


@pytest.mark.parametrize("name", sorted(CASES))
def test_bodies_are_what_the_patterns_of_these_names_match(name):
    """The code generators find operands by matching TVM's pattern of the composite's name."""
    mod = CASES[name].module("float16")
    for drop_in in (partition_for_cublas, partition_for_cutlass):
        new = drop_in(mod)
        relax.analysis.well_formed(new)
        for func in _local_functions(new):
            pattern = get_pattern(str(func.attrs["Composite"])).pattern
            block = func.body.blocks[0]
            values = {b.var: b.value for b in block.bindings}
            result = func.body.body
            assert pattern.match(values[result], values), name


def test_the_wrapper_that_codegen_reads():
    new = partition_for_cublas(CASES["bias"].module("float16"))
    (wrapper,) = [
        f for f in new.functions.values() if isinstance(f, relax.Function) and "Codegen" in f.attrs
    ]
    assert str(wrapper.attrs["Codegen"]) == "cublas"
    (local,) = _local_functions(new)
    assert len(local.params) == len(wrapper.params) == 3
    plain = partition_for_cutlass(CASES["bias"].module("float16"), annotate_codegen=False)
    assert all(
        "Codegen" not in (f.attrs or {})
        for f in plain.functions.values()
        if isinstance(f, relax.Function)
    )


def test_constants_stay_inside_when_asked():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4, 8), "float16")):
            with R.dataflow():
                m = R.matmul(x, R.const([[1.0] * 4] * 8, "float16"))
                R.output(m)
            return m

    (passed,) = _local_functions(partition_for_cublas(Mod))
    (bound,) = _local_functions(partition_for_cublas(Mod, bind_constants=True))
    assert len(passed.params) == 2 and len(bound.params) == 1


def test_partitioning_twice_changes_nothing():
    once = partition_for_cublas(CASES["gelu"].module("float16"))
    assert tvm_ffi.structural_equal(partition_for_cublas(once), once)
