"""Recognise token shift and mixing: several blends of a token with the one before it.

    x * m + s * (1 - m)        RWKV-4, 5                x + (s - x) * m        RWKV-6, 7

for several m over one x and one s. The composite's contract::

    kind "token_mix"; outputs "out0", "out1", ... of one shape (..., C)
    attrs  outputs   one tree for each output (see `patterns.wkv`) in the symbols l0, l1, ... for
                     the leading axes and n for the channel; {"op": "shift:l1", "args": [a, b]} is a
                     where l1 is 0 and b elsewhere, b being read one step before
    roles  the tensors that the trees load

What makes the m (RWKV-6 adds a low-rank product's slice) joins when nothing else reads it, and so
does the shift itself: `concat((state, x[:-1]))`, or a padded x with the state written into its
first row. Blends that depend on other blends of the same x (RWKV-6's) are a composite of their own.
A difference s - x that several composites need leaves the first of them. One blend alone is left to
TVM's operator fusion, which makes one kernel of it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..dataflow import FunctionView, is_var
from ..outline import Region
from ..report import Refusal
from .absorb import absorb
from .affine import (
    FILLED,
    FLOATS,
    AffineReader,
    Apply,
    Index,
    Tree,
    Unreadable,
    can_follow,
    to_plain,
)
from .collectors import live_users, written_slice
from .shapes import same_dims, static
from .unrolled import RoleNames
from .wkv_steps import origin

__all__ = ["KIND", "find_token_mix"]

KIND = "token_mix"
_MADE = ("relax.arange", "relax.equal", *FILLED)


@dataclass
class _Blend:
    """One mixed value."""

    var: Any
    x: Any
    s: Any
    core: list[Any]
    level: int = 0


@dataclass
class _Shift:
    """A tensor whose first position along `axis` is `first`, and the rest `rest` one later."""

    axis: int
    first: Any
    rest: Any
    through: Any = None  # the padded copy that is looked behind


def _arguments(view: FunctionView, expr: Any, op: str) -> list[Any] | None:
    call = view.call(expr, op)
    return None if call is None else [origin(view, a) for a in call.args]


def _orders(pair: Sequence[Any] | None) -> list[tuple[Any, Any]]:
    return [] if pair is None else [(pair[0], pair[1]), (pair[1], pair[0])]


def _blend(view: FunctionView, var: Any) -> _Blend | None:
    for left, right in _orders(_arguments(view, var, "relax.add")):
        # x * m + s * (1 - m)
        for s, rest in _orders(_arguments(view, right, "relax.multiply")):
            kept = _arguments(view, rest, "relax.subtract")
            if kept is None or view.scalar(kept[0]) != 1:
                continue
            for x, m in _orders(_arguments(view, left, "relax.multiply")):
                if m.same_as(kept[1]) and is_var(x):
                    return _Blend(var, x, s, [var, left, right])
        # x + (s - x) * m
        for difference, _ in _orders(_arguments(view, right, "relax.multiply")):
            parts = _arguments(view, difference, "relax.subtract")
            if parts is not None and parts[1].same_as(left) and is_var(left):
                return _Blend(var, left, parts[0], [var, right, difference])
    return None


def _shift(view: FunctionView, var: Any) -> _Shift | None:
    """Read a value as a token shift."""
    shape = view.shape(var)
    joined = view.call(var, "relax.concat")
    if joined is not None and shape is not None:
        parts = view.fields(joined.args[0])
        axis = int(joined.attrs.axis or 0) % len(shape)
        if parts is None or len(parts) != 2:
            return None
        first = view.shape(parts[0])
        if first is None or static(first[axis]) != 1:
            return None
        return _Shift(axis, parts[0], parts[1])
    write = written_slice(view, var)
    if write is None or write.position != 0 or shape is None:
        return None
    padded = view.call(write.before, "relax.nn.pad")
    if padded is None or str(padded.attrs.pad_mode) != "constant":
        return None
    width = [int(w) for w in padded.attrs.pad_width]
    wanted = [0] * (2 * len(shape))
    wanted[2 * write.axis : 2 * write.axis + 2] = [1, -1]
    if width != wanted:
        return None
    return _Shift(write.axis, write.value, view.resolve(padded.args[0]), write.before)


class _Reader(AffineReader):
    """Reads through a shift as well."""

    def read(self, expr: Any, index: Sequence[Index]) -> Tree:
        found = self.view.resolve(expr)
        shift = _shift(self.view, found) if is_var(found) and found in self.inside else None
        if shift is None:
            return super().read(expr, index)
        index = self._fit(index, self.view.shape(found) or ())
        symbols = [k for k, v in index[shift.axis].items() if v]
        if shift.through is not None and shift.through not in self.inside:
            raise Unreadable(f"{shift.through.name} is read elsewhere too")
        if len(symbols) != 1 or index[shift.axis][symbols[0]] != 1 or not symbols[0]:
            raise Unreadable("a token shift is not walked token by token")
        first, rest = list(index), list(index)
        first[shift.axis] = {}
        rest[shift.axis] = {symbols[0]: 1, "": -1}
        parts = (self.read(shift.first, first), self.read(shift.rest, rest))
        return Apply(f"shift:{symbols[0]}", parts)


def _levels(view: FunctionView, blends: list[_Blend]) -> None:
    """Number the blends of one x so that none depends on another of its level."""
    start = min(view.index(b.var) for b in blends)
    known: dict[Any, _Blend] = {}
    for blend in sorted(blends, key=lambda b: view.index(b.var)):
        pending, seen = [blend.var], set()
        while pending:
            for read in view.reads(view.index(pending.pop())):
                var = view.resolve(read)
                parts = [var] if is_var(var) else []
                for part in view.fields(var) or parts if parts else []:
                    if not is_var(part) or part in seen or view.index(part) < start:
                        continue
                    seen.add(part)
                    if part in known:
                        blend.level = max(blend.level, known[part].level + 1)
                    pending.append(part)
        known[blend.var] = blend


def _region(view: FunctionView, blends: list[_Blend]) -> Region:
    shape = view.shape(blends[0].var)
    if shape is None or static(shape[-1]) is None:
        raise Unreadable("the number of channels is not known")
    core = {view.resolve(v): None for b in blends for v in b.core}
    shift = _shift(view, blends[0].s) if is_var(blends[0].s) else None
    if shift is not None and shift.through is not None:
        # Importers read the row that is written over, and make nothing of it.
        core |= {u.var: None for u in live_users(view, shift.through)[1]}
    outputs = [b.var for b in blends]

    def leaks(var: Any, inside: dict[Any, None]) -> bool:
        return view.is_output(var) or any(
            view.resolve(u.var) not in inside for u in view.users(var)
        )

    shared = [v for v in core if v not in outputs and leaks(v, core)]
    whole = [v for v in shared if same_dims(view.shape(v) or (), shape)]
    if len(whole) < len(shared):
        raise Unreadable(f"{shared[0].name} is read elsewhere too")
    owned = [v for v in whole if _first_reader(view, v) in core]
    for var in whole:
        if var not in owned:
            del core[var]  # an earlier composite's output: a tensor to load
    outputs += owned
    root = origin(view, blends[0].x)

    def allowed(var: Any) -> bool:
        if var.same_as(root):
            return False
        if view.call(var, *_MADE) is not None or _shift(view, var) is not None:
            return True
        if view.call(var, "relax.nn.pad") is not None:
            return any(_shift(view, u.var) is not None for u in view.users(var))
        return can_follow(view, var)

    members = absorb(view, core, allowed)
    lead = len(shape) - 1
    extents = {f"l{i}": static(d) for i, d in enumerate(shape[:-1])} | {"n": static(shape[-1])}
    reader = _Reader(view, extents, members)
    index: list[Index] = [{f"l{i}": 1} for i in range(lead)] + [{"n": 1}]
    names = RoleNames()
    plain = [to_plain(reader.read(o, index), names.namer("x")) for o in outputs]
    for var in outputs:
        if view.dtype(var) not in FLOATS:
            raise Unreadable(f"{var.name} is {view.dtype(var)}, expected a float")
    return Region(
        kind=KIND,
        bindings=list(members),
        roles=names.found,
        outputs={f"out{i}": v for i, v in enumerate(outputs)},
        attrs={"outputs": plain},
    )


def _first_reader(view: FunctionView, var: Any) -> Any:
    return view.resolve(min(view.users(var), key=lambda u: view.position(u.var)).var)


def find_token_mix(view: FunctionView) -> list[Region | Refusal]:
    """Find the blends of neighbouring tokens in a scope, in program order."""
    groups: dict[tuple[Any, Any], list[_Blend]] = {}
    for binding in view.bindings:
        var = binding.var
        if view.call(var, "relax.add") is None or not view.resolve(var).same_as(var):
            continue
        found = _blend(view, var)
        if found is None or view.shape(var) is None:
            continue
        if not same_dims(view.shape(var) or (), view.shape(found.x) or ()):
            continue
        groups.setdefault((found.x, found.s), []).append(found)
    out: list[Region | Refusal] = []
    for blends in groups.values():
        if len(blends) < 2:
            continue
        _levels(view, blends)
        for level in sorted({b.level for b in blends}):
            mine = [b for b in blends if b.level == level]
            if len(mine) + (level == 0 and len(mine) < len(blends)) < 2:
                continue
            try:
                out.append(_region(view, mine))
            except Unreadable as why:
                out.append(Refusal(str(why), KIND, view.name, mine[0].var.name))
    return out
