"""Random arguments for a Relax function: sizes for its symbolic shapes, values by dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.sym import Analyzer

from .errors import InputError

__all__ = [
    "numpy_dtype",
    "random_arguments",
    "random_array",
    "sample_sizes",
    "symbolic_names",
    "to_device",
    "to_numpy",
]

# Distinct odd sizes, so that a mistaken axis shows.
_SIZES = (5, 7, 3, 11, 9, 13)


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the numpy dtype of a TVM dtype name ("bfloat16" and "float8_*" by ml_dtypes)."""
    if hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


def _symbolic(func: relax.Function) -> list[tirx.Var]:
    found: dict[str, tirx.Var] = {}

    def remember(var: tirx.Var) -> None:
        found.setdefault(var.name, var)

    def visit(ty: Any) -> None:
        if isinstance(ty, relax.TupleType):
            for field in ty.fields:
                visit(field)
        for expr in _dims(ty):
            tvm_ffi.structural_walk(expr, (tirx.Var, remember))

    for param in func.params:
        visit(param.ty)
    return list(found.values())


def _dims(ty: Any) -> list[Any]:
    if isinstance(ty, relax.TensorType) and ty.shape is not None:
        return list(getattr(ty.shape, "values", []))
    if isinstance(ty, relax.ShapeType) and ty.values is not None:
        return list(ty.values)
    return []


def symbolic_names(func: relax.Function) -> list[str]:
    """Return the names of the symbolic sizes in the parameters, in order of appearance."""
    return [v.name for v in _symbolic(func)]


def sample_sizes(func: relax.Function, sample: int = 0) -> dict[str, int]:
    """Return a size for each symbolic variable: distinct primes first, then all ones, then more."""
    names = symbolic_names(func)
    if sample == 1:
        return {n: 1 for n in names}
    return {n: _SIZES[(i + sample) % len(_SIZES)] for i, n in enumerate(names)}


def _evaluate(expr: Any, sizes: Mapping[str, int], func: relax.Function) -> int:
    if isinstance(expr, int):
        return expr

    def size(var: tirx.Var) -> Any:
        return tirx.IntImm(var.ty.dtype, sizes[var.name]) if var.name in sizes else var

    value = Analyzer().simplify(tvm_ffi.structural_map(expr, (tirx.Var, size)))
    if not isinstance(value, tirx.IntImm):
        missing = [n for n in symbolic_names(func) if n not in sizes]
        raise InputError(f"size {expr} is not known: give a value for {', '.join(missing)}")
    return int(value)


def random_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Return random values: normal for floats, 0 or 1 for signed integers (they index), full
    range for unsigned ones (they are packed weights)."""
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith("uint"):
        return rng.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
    if dtype.startswith("int"):
        return rng.integers(0, 2, shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def random_arguments(func: relax.Function, sizes: Mapping[str, int], seed: int = 0) -> list[Any]:
    """Return arguments for `func`: numpy arrays, shapes and nested lists of them.

    Raises
    ------
    InputError
        For a parameter whose shape or type is unknown.
    """
    rng = np.random.default_rng(seed)

    def make(name: str, ty: Any) -> Any:
        if isinstance(ty, relax.TupleType):
            return [make(f"{name}[{i}]", t) for i, t in enumerate(ty.fields)]
        if isinstance(ty, relax.ShapeType):
            return tvm.runtime.ShapeTuple([_evaluate(v, sizes, func) for v in _dims(ty)])
        if isinstance(ty, relax.TensorType):
            if ty.shape is None or not hasattr(ty.shape, "values"):
                raise InputError(f"parameter {name}: {ty} has no shape to draw inputs for")
            shape = tuple(_evaluate(v, sizes, func) for v in _dims(ty))
            return random_array(shape, str(ty.dtype), rng)
        if isinstance(ty, tvm.ir.PrimType):
            return random_array((), str(ty.dtype), rng).item()
        raise InputError(f"parameter {name}: inputs of type {ty} cannot be drawn")

    return [make(p.name, p.ty) for p in func.params]


def to_device(arguments: Sequence[Any], device: Any) -> list[Any]:
    """Return the arguments with numpy arrays copied to a device, in nested lists too."""
    return [
        tvm.runtime.tensor(a, device)
        if isinstance(a, np.ndarray)
        else to_device(a, device)
        if isinstance(a, (list, tuple)) and not isinstance(a, tvm.runtime.ShapeTuple)
        else a
        for a in arguments
    ]


def to_numpy(result: Any) -> list[np.ndarray]:
    """Flatten a virtual machine's result into numpy arrays."""
    if isinstance(result, tvm.runtime.Tensor):
        return [result.numpy()]
    return [array for item in result for array in to_numpy(item)]
