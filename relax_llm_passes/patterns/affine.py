"""Which elements a value is made of, as integer index maps: how recurrences read their operands.

A step of a recurrence that an importer unrolled reads token `t` through slices, reshapes,
permutations and small arithmetic: `negative(take(a, 3, axis=0))` as a column per head. `read`
turns such a value into a tree over the tensors it starts from,

    Apply("negative", (Load(a, {"h": 64, "n": 1, "": 384}),))

whose loads say, for each loop symbol, by how many elements the address moves ("" is the constant).
Two tokens then differ in the constant alone, and the kernel can run over `t`.

Which bindings are looked behind is decided in `absorb`; everything else is a leaf, and is loaded.

Arithmetic is in float32 whatever the graph's dtype, but casts that round are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import TupleGetItem

from ..dataflow import FunctionView, is_var, op_name
from .shapes import same_dim, static

__all__ = [
    "ELEMENTWISE",
    "FILLED",
    "FLOATS",
    "AffineReader",
    "Apply",
    "Index",
    "Load",
    "Number",
    "Tree",
    "Unreadable",
    "can_follow",
    "loads_of",
    "to_plain",
]

FLOATS = ("float16", "bfloat16", "float32")
Index = dict[str, int]  # loop symbol to elements moved; "" is the constant

_LAYOUT = (
    "relax.reshape",
    "relax.flatten",
    "relax.expand_dims",
    "relax.squeeze",
    "relax.permute_dims",
    "relax.broadcast_to",
    "relax.strided_slice",
    "relax.take",
)
ELEMENTWISE = {
    "relax.add": "add",
    "relax.subtract": "subtract",
    "relax.multiply": "multiply",
    "relax.divide": "divide",
    "relax.maximum": "maximum",
    "relax.minimum": "minimum",
    "relax.negative": "negative",
    "relax.exp": "exp",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.sqrt": "sqrt",
    "relax.square": "square",
    "relax.nn.silu": "silu",
    "relax.nn.relu": "relu",
    "relax.astype": "cast",
}


# Operators that fill a tensor with one number; None: their second argument.
FILLED: dict[str, float | None] = {
    "relax.zeros": 0.0,
    "relax.zeros_like": 0.0,
    "relax.ones": 1.0,
    "relax.ones_like": 1.0,
    "relax.full": None,
    "relax.full_like": None,
}


class Unreadable(Exception):
    """A value is no affine function of its sources; says why."""


@dataclass(frozen=True)
class Load:
    """One element of a tensor, at a flat (row-major) position."""

    source: Any
    at: tuple[tuple[str, int], ...]

    def step(self, symbol: str) -> int:
        """Elements that the address moves when the symbol grows by one."""
        return dict(self.at).get(symbol, 0)


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True)
class Apply:
    """An element-wise operator (a value of `ELEMENTWISE`, or "cast:float16") on trees."""

    op: str
    args: tuple[Any, ...]


Tree = Load | Number | Apply


def loads_of(tree: Tree) -> list[Load]:
    """Return the loads of a tree, from left to right."""
    if isinstance(tree, Load):
        return [tree]
    if isinstance(tree, Apply):
        return [ld for arg in tree.args for ld in loads_of(arg)]
    return []


def to_plain(tree: Tree, name: Callable[[Any], str]) -> dict[str, Any]:
    """Return a tree as data for JSON; `name` gives the role of a source."""
    if isinstance(tree, Number):
        return {"value": tree.value}
    if isinstance(tree, Load):
        return {"load": name(tree.source), "at": {k: v for k, v in tree.at if v}}
    return {"op": tree.op, "args": [to_plain(a, name) for a in tree.args]}


def _frozen(index: Index) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((k, v) for k, v in index.items() if v))


def _plus(a: Index, b: Index, factor: int = 1) -> Index:
    out = dict(a)
    for k, v in b.items():
        out[k] = out.get(k, 0) + v * factor
    return out


def _integers(view: FunctionView, expr: Any) -> list[int] | None:
    """Return the integers of a tuple or shape, None where one is not known."""
    found = view.value(expr)
    fields = getattr(found, "fields", None)
    if fields is None:
        fields = getattr(found, "values", None)
    if fields is None:
        return None
    out = []
    for item in fields[:]:
        value = static(view.resolve(item))
        if value is None:
            return None
        out.append(value)
    return out


def _slices(view: FunctionView, call: Any) -> list[tuple[int, int, int]] | None:
    """Return (axis, begin, step) of a strided_slice with known bounds."""
    shape = view.shape(call.args[0])
    parts = [_integers(view, a) for a in call.args[1:5]]
    if shape is None or any(p is None for p in parts):
        return None
    axes, begins = parts[0] or [], parts[1] or []
    steps = parts[3] if len(parts) > 3 and parts[3] else [1] * len(axes)
    out = []
    for axis, begin, step in zip(axes, begins, steps, strict=True):
        axis %= len(shape)
        size = static(shape[axis])
        if step < 1 or (begin < 0 and size is None):
            return None
        begin = begin + size if begin < 0 and size is not None else begin
        out.append((axis, max(0, begin if size is None else min(begin, size)), step))
    return out


def _taken(view: FunctionView, call: Any) -> tuple[int, int, int] | None:
    """Return (axis, position, rank of the picks) of a take at one constant position."""
    shape = view.shape(call.args[0])
    where = view.scalar(call.args[1])
    picks = view.shape(call.args[1])
    if shape is None or where is None or call.attrs.axis is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    size = static(shape[axis])
    # Outside, "fast" reads whatever is there.
    if size is None or not 0 <= int(where) < size:
        return None
    return axis, int(where), len(picks or ())


def _field(view: FunctionView, var: Any) -> tuple[Any, int, int] | None:
    """Return (tensor, axis, begin) of a field of a split into static parts."""
    item = view.value(var)
    if not isinstance(item, TupleGetItem):
        return None
    call = view.call(item.tuple_value, "relax.split")
    shape = None if call is None else view.shape(call.args[0])
    if call is None or shape is None:
        return None
    axis = int(call.attrs.axis) % len(shape)
    sections = call.attrs.indices_or_sections
    count = static(sections)
    if count is not None:
        size = static(shape[axis])
        if size is None or size % count:
            return None
        return call.args[0], axis, size // count * item.index
    begin = 0 if item.index == 0 else static(sections[item.index - 1])
    return None if begin is None else (call.args[0], axis, begin)


def can_follow(view: FunctionView, var: Any) -> bool:
    """Whether `AffineReader` can look behind this value."""
    if view.index(var) < 0 or view.shape(var) is None:
        return False
    if isinstance(view.value(var), TupleGetItem):
        return _field(view, var) is not None
    call = view.call(var)
    if call is None:
        return False
    if call.op.name in ELEMENTWISE:
        return view.dtype(var) in FLOATS and all(
            view.dtype(a) in FLOATS and view.shape(a) is not None for a in call.args
        )
    if call.op.name not in _LAYOUT or view.shape(call.args[0]) is None:
        return False
    if call.op.name == "relax.strided_slice":
        return _slices(view, call) is not None
    if call.op.name == "relax.take":
        return _taken(view, call) is not None
    return True


class AffineReader:
    """Reads values as trees over the tensors that are not inside.

    Parameters
    ----------
    view : FunctionView
        The scope.
    extents : mapping
        Loop symbols and their extents; None for a symbolic one.
    inside : container
        Variables that are looked behind; all others are leaves.
    """

    def __init__(
        self, view: FunctionView, extents: Mapping[str, int | None], inside: Mapping[Any, None]
    ) -> None:
        self.view, self.extents, self.inside = view, extents, inside

    def read(self, expr: Any, index: Sequence[Index]) -> Tree:
        """Return element `index` of `expr`; indices beyond its rank broadcast, as do its ones.

        Raises
        ------
        Unreadable
            When an address is no affine function of the symbols.
        """
        view = self.view
        expr = view.resolve(expr)
        number = view.scalar(expr)
        if number is not None:
            return Number(float(number))
        shape = view.shape(expr)
        if shape is None:
            raise Unreadable("a shape is unknown")
        index = self._fit(index, shape)
        if not is_var(expr) or expr not in self.inside:
            return self._load(expr, index, shape)
        part = _field(view, expr)
        if part is not None:
            source, axis, begin = part
            moved = list(index)
            moved[axis] = _plus(moved[axis], {"": begin})
            return self.read(source, moved)
        call = view.call(expr)
        if call is None:
            raise Unreadable(f"{expr.name} is no call of an operator")
        name = op_name(call)
        if name in FILLED:
            value = FILLED[name]
            value = view.scalar(call.args[1]) if value is None else value
            if value is None:
                raise Unreadable(f"{expr.name} is filled with a value that is not known")
            return Number(float(value))
        if name in ELEMENTWISE:
            return self._apply(call, expr, index)
        return self.read(call.args[0], self._moved(name, call, expr, index, shape))

    def _apply(self, call: Any, expr: Any, index: list[Index]) -> Tree:
        op = ELEMENTWISE[op_name(call)]
        args = tuple(self.read(a, index) for a in call.args)
        if op == "cast":
            dtype = self.view.dtype(expr)
            return args[0] if dtype == "float32" else Apply(f"cast:{dtype}", args)
        return Apply(op, args)

    def _fit(self, index: Sequence[Index], shape: Sequence[Any]) -> list[Index]:
        if len(index) < len(shape):
            raise Unreadable(f"{len(index)} indices for {len(shape)} axes")
        cut = index[len(index) - len(shape) :]
        return [{} if static(d) == 1 else i for i, d in zip(cut, shape, strict=True)]

    def _load(self, expr: Any, index: list[Index], shape: Sequence[Any]) -> Load:
        if self.view.dtype(expr) not in FLOATS:
            raise Unreadable(f"it reads {self.view.dtype(expr)}")
        return Load(expr, _frozen(self._flat(index, shape)))

    def _flat(self, index: list[Index], shape: Sequence[Any]) -> Index:
        out: Index = {}
        step: int | None = 1
        for i, d in zip(reversed(index), reversed(shape), strict=True):
            if any(i.values()):
                if step is None:
                    raise Unreadable("an axis inside another is symbolic")
                out = _plus(out, i, step)
            size = static(d)
            step = None if size is None or step is None else step * size
        return out

    def _split(self, flat: Index, shape: Sequence[Any]) -> list[Index]:
        """Return the index in `shape` of a flat position."""
        sizes = [static(d) for d in shape]
        out: list[Index] = []
        rest = {k: v for k, v in flat.items() if v}
        for axis, size in enumerate(sizes):
            below = 1
            for inner in sizes[axis + 1 :]:
                if inner is None:
                    raise Unreadable("an axis inside another is symbolic")
                below *= inner
            if size == 1:
                out.append({})
                continue
            part = {k: v // below for k, v in rest.items() if v % below == 0 and k}
            const = rest.get("", 0)
            part[""] = const // below
            rest = {k: v for k, v in rest.items() if k and k not in part}
            rest[""] = const % below
            if self._largest(rest) >= below:
                raise Unreadable("a reshape cuts across an axis that is read")
            out.append({k: v for k, v in part.items() if v})
        return out

    def _largest(self, index: Index) -> int:
        total = index.get("", 0)
        for k, v in index.items():
            if k and v:
                extent = self.extents.get(k)
                if extent is None or v < 0:
                    return 2**62
                total += v * (extent - 1)
        return total

    def _moved(
        self, name: str, call: Any, expr: Any, index: list[Index], shape: Sequence[Any]
    ) -> list[Index]:
        """Return where an element of a layout change was before."""
        view = self.view
        source = view.shape(call.args[0]) or ()
        if name in ("relax.reshape", "relax.flatten"):
            lead = 0
            while lead < min(len(shape), len(source)) and same_dim(shape[lead], source[lead]):
                lead += 1
            tail = self._split(self._flat(index[lead:], shape[lead:]), source[lead:])
            return [*index[:lead], *tail]
        if name == "relax.expand_dims":
            gone = {int(a) % len(shape) for a in call.attrs.axis}
            return [v for i, v in enumerate(index) if i not in gone]
        if name == "relax.squeeze":
            if call.attrs.axis is None:
                lost = {i for i, d in enumerate(source) if static(d) == 1}
            else:
                lost = {int(a) % len(source) for a in call.attrs.axis}
            rest = iter(index)
            return [{} if i in lost else next(rest) for i in range(len(source))]
        if name == "relax.permute_dims":
            axes = call.attrs.axes
            order = list(range(len(shape)))[::-1] if axes is None else [int(a) for a in axes]
            moved: list[Index] = [{} for _ in order]
            for place, axis in enumerate(order):
                moved[axis % len(order)] = index[place]
            return moved
        if name == "relax.broadcast_to":
            return list(index)
        if name == "relax.strided_slice":
            moved = list(index)
            for axis, begin, step in _slices(view, call) or []:
                moved[axis] = _plus({"": begin}, index[axis], step)
            return moved
        if name == "relax.take":
            found = _taken(view, call)
            if found is not None:
                axis, where, rank = found
                return [*index[:axis], {"": where}, *index[axis + rank :]]
        raise Unreadable(f"{name} is not followed")
