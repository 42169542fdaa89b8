"""How the outputs of an unrolled loop become one tensor: writes of slices, concat, stack.

`out[t] = y` leaves importers as

    c = equal(reshape(arange(0, T)), t);  out' = where(c, broadcast_to(expand_dims(y)), out)

once per token, over the tensor of the token before. When every slice is written, in order, what
was in the tensor first plays no part, and the last `where` is the tensor of all outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..dataflow import FunctionView
from .group_norm import is_view
from .shapes import same_dims, static

__all__ = ["Collector", "Write", "find_collector", "live_users", "written_slice"]


@dataclass
class Collector:
    """One tensor of all outputs.

    Attributes
    ----------
    result : Var
        The tensor.
    shape : tuple
        Its shape.
    axis : int
        The axis that counts the tokens.
    core : list of Var
        The bindings that put it together.
    """

    result: Any
    shape: tuple[Any, ...]
    axis: int
    core: list[Any] = field(default_factory=list)


@dataclass
class Write:
    """`value`, spread over all of `axis`, written at `position` of it over `before`."""

    before: Any
    value: Any
    axis: int
    position: int


def live_users(view: FunctionView, var: Any) -> tuple[list[Any], list[Any]]:
    """Return the bindings that read a value and matter, and those that nothing reads."""
    live: list[Any] = []
    dead: list[Any] = []
    for user in view.users(var):
        unread = not view.users(user.var) and not view.is_output(user.var)
        (dead if unread else live).append(user)
    return live, dead


def written_slice(view: FunctionView, var: Any) -> Write | None:
    """Read `var` as the write of a slice: where(position == t, value, before)."""
    call = view.call(var, "relax.where")
    shape = view.shape(var)
    if call is None or shape is None:
        return None
    if not same_dims(view.shape(call.args[2]) or (), shape):
        return None
    condition = view.call(call.args[0], "relax.equal")
    if condition is None:
        return None
    for counter, position in (condition.args, condition.args[::-1]):
        at = view.scalar(position)
        axis = _counted_axis(view, counter, shape)
        if at is not None and axis is not None:
            before, value = view.resolve(call.args[2]), view.resolve(call.args[1])
            return Write(before, value, axis, int(at))
    return None


def _counted_axis(view: FunctionView, counter: Any, shape: tuple[Any, ...]) -> int | None:
    """Return the axis of `shape` along which `counter` is 0, 1, 2, ...; None if it is none."""
    dims = view.shape(counter)
    if dims is None or len(dims) > len(shape):
        return None
    root = view.resolve(counter)
    while is_view(view, root):
        root = view.resolve(view.value(root).args[0])
    made = view.call(root, "relax.arange")
    if made is None:
        return None
    start, end, step = (view.scalar(a) for a in made.args[:3])
    if start != 0 or step != 1:
        return None
    sizes = [static(d) for d in dims]
    wide = [i for i, d in enumerate(sizes) if d != 1]
    if len(wide) > 1:
        return None
    # A single token: any axis of one element will do.
    place = wide[0] if wide else next((i for i, d in enumerate(sizes) if d == 1), None)
    if place is None or sizes[place] != end:
        return None
    if not wide:
        own = [i for i, d in enumerate(shape) if static(d) == 1]
        return own[0] if own else None
    axis = place + len(shape) - len(dims)
    return axis if static(shape[axis]) == end else None


def _follow(view: FunctionView, var: Any) -> tuple[Any, list[Any], Any] | None:
    """Follow a token's output through views to its one reader.

    Returns the value that is read, the views passed, and the reader's binding.
    """
    passed: list[Any] = []
    cur = view.resolve(var)
    while True:
        if view.is_output(cur):
            return None
        live, dead = live_users(view, cur)
        passed += [d.var for d in dead]
        if len(live) != 1:
            return None
        reader = live[0]
        if is_view(view, reader.var):
            passed.append(reader.var)
            cur = view.resolve(reader.var)
            continue
        if view.call(reader.var, "relax.broadcast_to") is not None:
            wide, narrow = view.shape(reader.var), view.shape(cur)
            if wide is None or narrow is None or len(wide) != len(narrow):
                return None
            passed.append(reader.var)
            cur = view.resolve(reader.var)
            continue
        return cur, passed, reader


def _slice_fits(view: FunctionView, value: Any, shape: tuple[Any, ...], axis: int) -> bool:
    """Whether `value` is a slice of one position, possibly spread over the axis."""
    spread = view.call(value, "relax.broadcast_to")
    if spread is not None and not is_view(view, value):
        value = spread.args[0]
    dims = view.shape(value)
    if dims is None or len(dims) > len(shape):
        return False
    wide = [*[1] * (len(shape) - len(dims)), *dims]
    return same_dims(wide, [1 if i == axis else d for i, d in enumerate(shape)])


def find_collector(view: FunctionView, outs: list[Any]) -> Collector | None:
    """Return the tensor that holds every output, one slice each and in order, or None."""
    first = _follow(view, outs[0])
    if first is None:
        return None
    if view.call(first[2].var, "relax.where") is not None:
        return _written(view, outs)
    return _joined(view, outs)


def _written(view: FunctionView, outs: list[Any]) -> Collector | None:
    core: list[Any] = []
    before: Any = None
    axis = -1
    for t, out in enumerate(outs):
        found = _follow(view, out)
        if found is None:
            return None
        value, passed, reader = found
        write = written_slice(view, reader.var)
        shape = view.shape(reader.var)
        if write is None or shape is None or write.position != t:
            return None
        if not write.value.same_as(value):
            return None
        if t == 0:
            axis = write.axis
            if static(shape[axis]) != len(outs):
                return None
        elif not write.before.same_as(before) or write.axis != axis:
            return None
        if not _slice_fits(view, value, tuple(shape), axis):
            return None
        core += [*passed, reader.var]
        before = view.resolve(reader.var)
        if t + 1 < len(outs):
            live, dead = live_users(view, before)
            core += [d.var for d in dead]
            if len(live) != 1 or view.is_output(before):
                return None
    return Collector(before, tuple(view.shape(before) or ()), axis, core)


def _joined(view: FunctionView, outs: list[Any]) -> Collector | None:
    core: list[Any] = []
    result: Any = None
    values = []
    for out in outs:
        found = _follow(view, out)
        if found is None:
            return None
        value, passed, reader = found
        values.append(value)
        core += passed
        if result is not None and not reader.var.same_as(result):
            return None
        result = reader.var
    joined = result
    if view.call(joined, "relax.concat", "relax.stack") is None:
        # The tuple has a name: its one reader is what joins.
        live, _ = live_users(view, joined)
        if len(live) != 1 or view.is_output(joined):
            return None
        core.append(joined)
        joined = live[0].var
    call: Any = view.call(joined, "relax.concat", "relax.stack")
    shape: Any = None if call is None else view.shape(joined)
    if call is None or shape is None:
        return None
    parts = view.fields(call.args[0])
    if parts is None or len(parts) != len(outs):
        return None
    if any(not p.same_as(v) for p, v in zip(parts, values, strict=True)):
        return None
    axis = int(call.attrs.axis or 0) % len(shape)
    if static(shape[axis]) != len(outs):
        return None
    if call.op.name == "relax.concat" and not all(
        _slice_fits(view, v, tuple(shape), axis) for v in values
    ):
        return None
    return Collector(view.resolve(joined), tuple(shape), axis, [*core, view.resolve(joined)])
