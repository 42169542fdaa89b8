"""Row programs: what a norm, a softmax or a reduction computes, apart from how threads share it.

A tensor's axes are *outer* (one result or one statistic each) or *reduced*. A row is one point of
the outer axes together with all of its reduced elements. A `RowProgram` says what is loaded per
element, which reductions follow each other, and what is stored; `norm_cuda` and `norm_cpu` turn
it into a PrimFunc. Statistics are always taken in the accumulator type (float32, or float64 for
float64 inputs), whatever the tensors hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_equal

__all__ = [
    "Axis",
    "Load",
    "Operand",
    "RowProgram",
    "Stage",
    "Store",
    "Tensor",
    "build_domain",
    "collapse",
    "extent_product",
    "freshen",
    "identity_of",
    "merge_of",
    "row_major",
]

Dim = Any  # int or a tirx expression
Values = list  # of tirx expressions


@dataclass(frozen=True)
class Axis:
    """One axis of the row program's domain."""

    extent: Dim
    reduced: bool


@dataclass(frozen=True)
class Tensor:
    """A parameter of the PrimFunc: name, shape (ints and variables) and element type."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str


@dataclass(frozen=True)
class Operand:
    """How a tensor is addressed from the domain: one stride (in elements) per axis, 0 repeats."""

    tensor: int
    strides: tuple[Dim, ...]

    def index(self, coords: Sequence[Any]) -> Any:
        """Return the flat element index at the domain coordinates."""
        total: Any = 0
        for c, s in zip(coords, self.strides, strict=True):
            if not (isinstance(s, int) and s == 0):
                total = total + c * s
        return total


@dataclass(frozen=True)
class Load:
    """A value read per element. `index(coords)` gives the flat element index into `tensor`."""

    tensor: int
    index: Callable[[Sequence[Any]], Any]
    follows_last: bool = True  # the index moves with the last domain axis


@dataclass(frozen=True)
class Store:
    """A value written per element (`per_row` False) or per row."""

    tensor: int
    index: Callable[[Sequence[Any]], Any]
    value: Callable[..., Any]  # (vals, late, scalars) or (scalars,) when per_row
    per_row: bool = False


@dataclass(frozen=True)
class Stage:
    """One joint reduction over the row.

    Attributes
    ----------
    combine : tuple[str, ...]
        "sum", "max", "min" or "prod", one for each value reduced together.
    value : callable
        (kept values, row scalars) -> one expression per entry of `combine`.
    post : callable
        (reduced values, earlier scalars) -> scalars appended to the list.
    update : callable, optional
        (kept values, scalars) -> new kept values for the stages and stores that follow.
    """

    combine: tuple[str, ...]
    value: Callable[[Values, Values], Values]
    post: Callable[[Values, Values], Values]
    update: Callable[[Values, Values], Values] | None = None


def _variance_itself(variance: Any) -> Any:
    return variance


@dataclass
class RowProgram:
    """All that decides a norm-like operator's result.

    Attributes
    ----------
    name : str
        Base of the PrimFunc's name; no meaning.
    tensors : list[Tensor]
        Parameters in order, inputs first.
    axes : list[Axis]
        The domain, in the memory order of the main tensor.
    loads, late : list[Load]
        Read once and kept in registers; read when storing.
    init : callable
        Raw loads (cast to the accumulator type) -> kept values.
    stages, stores : list
        In order.
    contiguous : int
        The widest vector (elements) that may be used along the last domain axis.
    acc : str
        Accumulator dtype.
    moments : bool
        The stages are mean and variance of the first kept value: allows splitting a row over
        blocks, with `finish_moments`.
    """

    name: str
    tensors: list[Tensor]
    axes: list[Axis]
    loads: list[Load]
    init: Callable[[Values], Values]
    stages: list[Stage]
    stores: list[Store]
    late: list[Load] = field(default_factory=list)
    contiguous: int = 1
    acc: str = "float32"
    moments: bool = False
    finish_moments: Callable[[Any], Any] = _variance_itself

    @property
    def outer(self) -> list[Axis]:
        """Axes that are not reduced."""
        return [a for a in self.axes if not a.reduced]

    @property
    def reduced(self) -> list[Axis]:
        """Axes that are reduced."""
        return [a for a in self.axes if a.reduced]

    @property
    def rows(self) -> Dim:
        """Number of rows."""
        return extent_product([a.extent for a in self.outer])

    @property
    def length(self) -> Dim:
        """Elements in a row."""
        return extent_product([a.extent for a in self.reduced])

    def coords(self, row: Any, element: Any, step: Any = 0) -> list[Any]:
        """Return domain coordinates of `element` (+ `step` along the last axis) of `row`."""
        outer = unravel(row, [a.extent for a in self.outer])
        inner = unravel(element, [a.extent for a in self.reduced])
        out, i, j = [], 0, 0
        for a in self.axes:
            if a.reduced:
                out.append(inner[j])
                j += 1
            else:
                out.append(outer[i])
                i += 1
        if not (isinstance(step, int) and step == 0):
            out[-1] = out[-1] + step
        return out


def extent_product(extents: Sequence[Dim]) -> Dim:
    """Multiply extents, keeping an int when all are ints."""
    return math.prod(extents) if extents else 1


def unravel(index: Any, extents: Sequence[Dim]) -> list[Any]:
    """Split a flat index into row-major coordinates."""
    out: list[Any] = []
    for k in range(len(extents) - 1, -1, -1):
        e = extents[k]
        if k == 0:
            out.append(index)
        elif isinstance(e, int) and e == 1:
            out.append(0)
        else:
            out.append(tirx.floormod(index, e))
            index = tirx.floordiv(index, e)
    return out[::-1]


def row_major(shape: Sequence[Dim]) -> list[Dim]:
    """Row-major strides of `shape`, in elements."""
    strides: list[Dim] = []
    step: Dim = 1
    for e in reversed(shape):
        strides.append(step)
        step = step * e
    return strides[::-1]


def _same(a: Dim, b: Dim) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(structural_equal(_expr(a), _expr(b))) or _provably_equal(a, b)


def _expr(a: Dim) -> Any:
    return tirx.const(a, "int64") if isinstance(a, int) else a


def _provably_equal(a: Dim, b: Dim) -> bool:
    return bool(Analyzer().can_prove_equal(_expr(a), _expr(b)))


def collapse(axes: Sequence[Axis], operands: Sequence[Operand]) -> tuple[list[Axis], list[Operand]]:
    """Merge neighbouring axes that every operand walks as one, and drop axes of extent 1."""
    strides = [list(o.strides) for o in operands]
    kept = [i for i, a in enumerate(axes) if not (isinstance(a.extent, int) and a.extent == 1)]
    if not any(axes[i].reduced for i in kept):
        kept += [i for i, a in enumerate(axes) if a.reduced][-1:]
        kept.sort()
    out_axes: list[Axis] = []
    out_strides: list[list[Dim]] = [[] for _ in operands]
    for i in kept:
        a = axes[i]
        mergeable = (
            bool(out_axes)
            and out_axes[-1].reduced == a.reduced
            and all(
                _same(out_strides[k][-1], strides[k][i] * a.extent) for k in range(len(operands))
            )
        )
        if mergeable:
            out_axes[-1] = Axis(out_axes[-1].extent * a.extent, a.reduced)
            for k in range(len(operands)):
                out_strides[k][-1] = strides[k][i]
        else:
            out_axes.append(a)
            for k in range(len(operands)):
                out_strides[k].append(strides[k][i])
    merged = [Operand(o.tensor, tuple(s)) for o, s in zip(operands, out_strides, strict=True)]
    return out_axes, merged


def build_domain(
    axes: Sequence[Axis], operands: Sequence[Operand]
) -> tuple[list[Axis], list[Load], int]:
    """Collapse the domain; return axes, one Load per operand, and the widest usable vector.

    A vector of v elements along the last axis is usable when the axis is a multiple of v long,
    every operand moves by 0 or 1 along it, and every other stride is a multiple of v (so that
    addresses are aligned).
    """
    axes, operands = collapse(axes, operands)
    width = 1
    for v in (8, 4, 2):
        last = axes[-1].extent
        if not (isinstance(last, int) and last % v == 0):
            continue
        ok = True
        for o in operands:
            tail = o.strides[-1]
            if not (isinstance(tail, int) and tail in (0, 1)):
                ok = False
            elif tail == 1:
                ok = ok and all(_divisible(s, v) for s in o.strides[:-1])
        if ok:
            width = v
            break
    loads = [
        Load(o.tensor, o.index, not (isinstance(o.strides[-1], int) and o.strides[-1] == 0))
        for o in operands
    ]
    return axes, loads, width


def _divisible(stride: Dim, by: int) -> bool:
    if isinstance(stride, int):
        return stride % by == 0
    return bool(Analyzer().can_prove_equal(tirx.floormod(stride, by), 0))


def freshen(shapes: Sequence[Sequence[Any]]) -> list[tuple[Dim, ...]]:
    """Replace each distinct symbolic dimension by a variable of the PrimFunc's own.

    Every dimension becomes an int or a plain variable, so that a buffer can bind it; equal
    expressions share a variable.
    """
    known: list[tuple[Any, Any]] = []
    out = []
    for shape in shapes:
        dims: list[Dim] = []
        for d in shape:
            if isinstance(d, int):
                dims.append(d)
                continue
            if isinstance(d, tirx.IntImm):
                dims.append(int(d.value))
                continue
            for expr, var in known:
                if _same(expr, d):
                    dims.append(var)
                    break
            else:
                var = tirx.Var(f"n{len(known)}", "int64")
                known.append((d, var))
                dims.append(var)
        out.append(tuple(dims))
    return out


def identity_of(op: str, dtype: str) -> Any:
    """Return the neutral element of a combiner."""
    if op == "sum":
        return tirx.const(0, dtype)
    if op == "prod":
        return tirx.const(1, dtype)
    if op == "max":
        return tirx.const(float("-inf"), dtype)
    return tirx.const(float("inf"), dtype)


def merge_of(op: str, a: Any, b: Any) -> Any:
    """Combine two partial results."""
    if op == "sum":
        return a + b
    if op == "prod":
        return a * b
    return tirx.max(a, b) if op == "max" else tirx.min(a, b)
