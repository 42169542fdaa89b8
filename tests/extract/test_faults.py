"""The detector of importer faults: a constant index outside the tensor, in any spelling, and
nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.extract.faults import find_importer_faults


def _take(index: relax.Expr, mode: str = "fast", extent: int | tvm.ir.Expr = 5) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    source = relax.Var("x", relax.TensorType((2, extent, 3), "float32"))
    with builder.function("main", [source]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.take(source, index, 1, mode=mode)))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("index", [-1, -5, 5, 7])
def test_constant_index_outside_is_found(index: int) -> None:
    (text,) = find_importer_faults(_take(relax.const(index, "int64")))
    assert f"index {index}" in text and "main" in text and "extent 5" in text


@pytest.mark.parametrize("index", [0, 3, 4])
def test_constant_index_inside_is_fine(index: int) -> None:
    assert find_importer_faults(_take(relax.const(index, "int64"))) == []


def test_one_bad_element_of_a_vector_is_found() -> None:
    assert find_importer_faults(_take(relax.const(np.array([0, 2, -3]), "int64")))
    assert not find_importer_faults(_take(relax.const(np.array([0, 2, 3]), "int64")))


@pytest.mark.parametrize("mode", ["wrap", "clip"])
def test_modes_that_define_every_index_are_fine(mode: str) -> None:
    assert find_importer_faults(_take(relax.const(-1, "int64"), mode)) == []


def test_negative_index_into_a_symbolic_extent_is_found() -> None:
    length = tvm.tirx.Var("n", "int64")
    assert find_importer_faults(_take(relax.const(-1, "int64"), extent=length))
    # A large index may be inside: only the caller knows.
    assert not find_importer_faults(_take(relax.const(7, "int64"), extent=length))


@pytest.mark.parametrize("private", [False, True])
def test_index_behind_bindings_and_conversions_is_found(private: bool) -> None:
    builder = relax.BlockBuilder()
    source = relax.Var("x", relax.TensorType((4, 3), "float32"))
    name = "helper" if private else "main"
    with builder.function(name, [source], private=private):
        with builder.dataflow():
            constant = builder.emit(relax.const(-2, "int64"))
            alias = builder.emit(constant)
            index = builder.emit(relax.op.astype(alias, "int32"))
            out = builder.emit_output(relax.op.take(source, index, 0, mode="fast"))
        builder.emit_func_output(out)
    (text,) = find_importer_faults(builder.get())
    assert name in text


def test_computed_index_is_not_judged() -> None:
    builder = relax.BlockBuilder()
    source = relax.Var("x", relax.TensorType((4, 3), "float32"))
    index = relax.Var("i", relax.TensorType((2,), "int64"))
    with builder.function("main", [source, index]):
        out = builder.emit(relax.op.take(source, index, 0, mode="fast"))
        builder.emit_func_output(out)
    assert find_importer_faults(builder.get()) == []
