"""Find what a matmul really multiplies: operands seen through transposes and views.

`permute_dims`, `expand_dims`, `squeeze`, `broadcast_to` and `reshape` between a tensor and a matmul
do not compute anything. A GEMM reads its operands in either order of the last two axes, so these
bindings belong into its region, and no transpose runs. What counts is where each axis goes, not
which operators moved it: two transposes cancel, and a permutation that keeps the last two axes in
place is no transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from .shapes import dims, is_one, same_dim

__all__ = ["Operand", "trace_matrix", "trace_rows"]

_MAX_STEPS = 8
_UNIT = "unit"


@dataclass
class Operand:
    """A tensor, and the bindings between it and the matmul.

    Attributes
    ----------
    root : relax.Expr
        A variable or constant.
    swapped : bool
        Whether the last two axes of `root` are in the other order.
    variables : list[relax.Var]
        Variables of the bindings in between, nearest to the matmul first.
    """

    root: relax.Expr
    swapped: bool = False
    variables: list[relax.Var] = field(default_factory=list)


def _op(call: Any) -> str:
    return getattr(call.op, "name", "") if isinstance(call, relax.Call) else ""


def _permuted(call: relax.Call, labels: list[Any]) -> list[Any] | None:
    axes = call.attrs.axes
    rank = len(labels)
    order = list(range(rank))[::-1] if axes is None else [int(a) % rank for a in axes]
    before: list[Any] = [None] * rank
    for new, old in enumerate(order):
        before[old] = labels[new]
    return before


def _align_units(
    after: Sequence[Any], before: Sequence[Any], labels: Sequence[Any]
) -> list[Any] | None:
    """Return labels of `before`, when `after` differs from it only by axes of length 1."""
    result: list[Any] = []
    i = 0
    for dim in before:
        while i < len(after) and is_one(after[i]) and not is_one(dim):
            if labels[i] in ("row", "column"):
                return None
            i += 1
        if i < len(after) and same_dim(after[i], dim):
            result.append(labels[i])
            i += 1
        elif is_one(dim):
            result.append(_UNIT)
        else:
            return None
    if any(not is_one(after[j]) or labels[j] in ("row", "column") for j in range(i, len(after))):
        return None
    return result


def _broadcast(
    after: Sequence[Any], before: Sequence[Any], labels: Sequence[Any]
) -> list[Any] | None:
    added = len(after) - len(before)
    if added < 0 or any(label in ("row", "column") for label in labels[:added]):
        return None
    kept = list(labels[added:])
    for i, dim in enumerate(before):
        if not same_dim(dim, after[added + i]):
            if kept[i] in ("row", "column"):
                return None
            kept[i] = _UNIT
    return kept


def _step(call: relax.Call, labels: list[Any]) -> list[Any] | None:
    """Return the labels of the axes of the call's input, given those of its output."""
    name = _op(call)
    if name == "relax.permute_dims":
        return _permuted(call, labels)
    if name not in ("relax.expand_dims", "relax.squeeze", "relax.reshape", "relax.broadcast_to"):
        return None
    before, after = dims(call.args[0]), dims(call)
    if before is None or after is None:
        return None
    if name == "relax.broadcast_to":
        return _broadcast(after, before, labels)
    return _align_units(after, before, labels)


def _readable(labels: list[Any]) -> bool | None:
    """Return whether the last two axes are swapped, or None for a form that no GEMM reads."""
    if len(labels) < 2:
        return None
    if labels[-2:] not in (["row", "column"], ["column", "row"]):
        return None
    batch = labels[:-2]
    # Batch axes align from the right: any number may be missing in front, none in between.
    numbers = [b for b in batch if isinstance(b, int)]
    if len(numbers) != len(batch) or numbers != list(range(-len(batch), 0)):
        return None
    return labels[-2:] == ["column", "row"]


def trace_matrix(view: Any, expr: relax.Expr, usable: Any) -> list[Operand]:
    """Return the forms in which a GEMM can read `expr`, the one nearest to the matmul first.

    Parameters
    ----------
    view : FunctionView
        The function.
    expr : relax.Expr
        An argument of a matmul with at least two axes.
    usable : Callable[[relax.Expr], bool]
        Whether a variable may be read where the matmul is.
    """
    root = view.resolve(expr)
    rank = expr.ty.ndim
    labels: list[Any] = [*range(-(rank - 2), 0), "row", "column"]
    found = [Operand(root)]
    variables: list[relax.Var] = []
    for _ in range(_MAX_STEPS):
        call = view.value(root)
        if not isinstance(root, relax.Var) or not isinstance(call, relax.Call):
            break
        before = _step(call, labels)
        if before is None:
            break
        labels = before
        variables.append(root)
        root = view.resolve(call.args[0])
        swapped = _readable(labels)
        if swapped is not None and usable(root):
            found.append(Operand(root, swapped, list(variables)))
    return found


def trace_rows(view: Any, expr: relax.Expr, usable: Any) -> list[Operand]:
    """Return tensors whose rows (the last axis) are those of `expr`, under other leading axes.

    These are what importers reshape to two axes before a product and back after it.
    """
    root = view.resolve(expr)
    found = [Operand(root)]
    variables: list[relax.Var] = []
    for _ in range(_MAX_STEPS):
        call = view.value(root)
        if not isinstance(root, relax.Var) or _op(call) not in (
            "relax.expand_dims",
            "relax.squeeze",
            "relax.reshape",
        ):
            break
        before, after = dims(call.args[0]), dims(root)
        if not before or not after or not same_dim(before[-1], after[-1]):
            break
        variables.append(root)
        root = view.resolve(call.args[0])
        if usable(root):
            found.append(Operand(root, False, list(variables)))
    return found
