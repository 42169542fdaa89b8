"""Small questions about shapes that recognisers ask: provable equality, one, broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.sym import Analyzer

__all__ = ["dims", "dtype_of", "is_one", "same_dim", "same_dims", "static"]


def dims(expr: relax.Expr) -> list[Any] | None:
    """Return the dimensions of a tensor expression, or None where they are not known."""
    ty = getattr(expr, "ty", None)
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        return None
    shape = ty.shape
    if isinstance(shape, relax.ShapeExpr):
        return list(shape.values[:])  # one call into C++ instead of one per item
    values = getattr(getattr(shape, "ty", None), "values", None)
    return None if values is None else list(values)


def dtype_of(expr: relax.Expr) -> str:
    """Return the dtype of a tensor expression, "" where it is not known."""
    ty = getattr(expr, "ty", None)
    dtype = str(getattr(ty, "dtype", "") or "")
    return "" if dtype in ("void", "None") else dtype


def static(dim: Any) -> int | None:
    """Return a dimension's value, or None when it is symbolic."""
    if isinstance(dim, int):
        return dim
    return int(dim.value) if isinstance(dim, tvm.tirx.IntImm) else None


def is_one(dim: Any) -> bool:
    """Tell whether a dimension is known to be 1."""
    return static(dim) == 1


def same_dim(a: Any, b: Any) -> bool:
    """Tell whether two dimensions are provably equal."""
    left, right = static(a), static(b)
    if left is not None and right is not None:
        return left == right
    if left is None and right is None and tvm_ffi.structural_equal(a, b):
        return True
    return bool(Analyzer().can_prove_equal(a, b))


def same_dims(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Tell whether two shapes are provably equal."""
    return len(a) == len(b) and all(same_dim(x, y) for x, y in zip(a, b, strict=True))
