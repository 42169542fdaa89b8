"""Where an element was before a layout operator, and what creators put there.

Handlers: (reader, call, index, var) -> scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx

from ..kernels.scalar_expr import buffer_loads, dtype_of, i64, is_float
from .element_scalars import Unreadable, cast, common, const_like

if TYPE_CHECKING:
    from .elements import ElementReader

__all__ = ["CREATE", "JOIN", "LAYOUT", "broadcast_index", "reshaped_index"]


def broadcast_index(reader: ElementReader, operand: Any, index: list[Any], out: Any) -> list[Any]:
    shape = reader.shape(operand)
    offset = len(index) - len(shape)
    target = None
    result = []
    for i, dim in enumerate(shape):
        if reader.is_size(dim, 1):
            result.append(i64(0))
            continue
        if target is None:
            target = reader.shape(out)
        if not reader.same(dim, target[offset + i]):
            raise Unreadable(
                f"axis {i} has size {dim} where the result has {target[offset + i]}: "
                "broadcast or not is not known",
                operand,
            )
        result.append(index[offset + i])
    return result


def _permute(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    axes = call.attrs.axes
    order = range(len(index) - 1, -1, -1) if axes is None else [int(a) % len(index) for a in axes]
    moved: list[Any] = [None] * len(index)
    for place, axis in enumerate(order):
        moved[axis] = index[place]
    return reader.read(call.args[0], moved)


def linear_index(index: Sequence[Any], shape: Sequence[Any]) -> Any:
    """Return the row-major position of `index` in `shape`."""
    flat: Any = i64(0)
    for i, dim in zip(index, shape, strict=True):
        flat = flat * dim + i
    return flat


def unravel(flat: Any, shape: Sequence[Any], simplify: Callable[[Any], Any]) -> list[Any]:
    """Return the index in `shape` of a row-major position."""
    result: list[Any] = []
    for axis in range(len(shape) - 1, -1, -1):
        if isinstance(shape[axis], tirx.IntImm) and int(shape[axis].value) == 1:
            result.append(i64(0))
            continue
        rest_is_one = all(isinstance(d, tirx.IntImm) and int(d.value) == 1 for d in shape[:axis])
        result.append(simplify(flat if rest_is_one else tirx.floormod(flat, shape[axis])))
        flat = simplify(tirx.floordiv(flat, shape[axis]))
    result.reverse()
    return result


def reshaped_index(
    index: list[Any], new: list[Any], old: list[Any], reader: ElementReader
) -> list[Any]:
    """Return where element `index` of a tensor of shape `new` was when its shape was `old`.

    Axes that are the same on both sides are kept as they are, so that only the part that changed
    is divided.
    """
    lead = 0
    while lead < min(len(new), len(old)) and reader.same(new[lead], old[lead]):
        lead += 1
    tail = 0
    limit = min(len(new), len(old)) - lead
    while tail < limit and reader.same(new[len(new) - 1 - tail], old[len(old) - 1 - tail]):
        tail += 1
    middle = unravel(
        reader.simplify(linear_index(index[lead : len(new) - tail], new[lead : len(new) - tail])),
        old[lead : len(old) - tail],
        reader.simplify,
    )
    return [*index[:lead], *middle, *index[len(new) - tail :]]


def _reshape(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    source = call.args[0]
    moved = reshaped_index(index, reader.shape(var), reader.shape(source), reader)
    return reader.read(source, moved)


def _expand_dims(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    rank = len(index)
    gone = {int(a) % rank for a in call.attrs.axis}
    return reader.read(call.args[0], [v for i, v in enumerate(index) if i not in gone])


def _squeeze(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    shape = reader.shape(call.args[0])
    if call.attrs.axis is None:
        gone = {i for i, dim in enumerate(shape) if reader.is_size(dim, 1)}
    else:
        gone = {int(a) % len(shape) for a in call.attrs.axis}
    rest = iter(index)
    return reader.read(
        call.args[0], [i64(0) if i in gone else next(rest) for i in range(len(shape))]
    )


def _broadcast_to(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    return reader.read(call.args[0], broadcast_index(reader, call.args[0], index, var))


def _strided_slice(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    moved = list(index)
    for axis, begin, _, step in reader.slices(call):
        moved[axis] = reader.simplify(begin + index[axis] * i64(step))
    return reader.read(call.args[0], moved)


def _concat_parts(reader: ElementReader, call: Any) -> list[Any]:
    fields = reader.view.fields(call.args[0])
    if fields is None:
        raise Unreadable("concat of a tuple that is not built in sight", call)
    return fields


def _concat(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    parts = _concat_parts(reader, call)
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(index)
    starts, start = [], i64(0)
    for part in parts:
        starts.append(start)
        start = reader.simplify(start + reader.shape(part)[axis])
    at = reader.simplify(index[axis])

    def branch(i: int) -> Any:
        moved = list(index)
        moved[axis] = reader.simplify(at - starts[i])
        return reader.read(parts[i], moved)

    last = len(parts) - 1
    for i in range(last):  # an index whose place is known reads one part only
        if reader.analyzer.can_prove(at < starts[i + 1]) and reader.analyzer.can_prove(
            at >= starts[i]
        ):
            return branch(i)
    if reader.analyzer.can_prove(at >= starts[last]):
        return branch(last)
    value = branch(last)
    for i in range(last - 1, -1, -1):
        # Lazy: the branch not taken would read out of bounds.
        value = tirx.if_then_else(at < starts[i + 1], *common(branch(i), value))
    return value


def _stack(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    parts = _concat_parts(reader, call)
    axis = int(call.attrs.axis or 0) % len(index)
    at = reader.simplify(index[axis])
    rest = [v for i, v in enumerate(index) if i != axis]
    if isinstance(at, tirx.IntImm):
        return reader.read(parts[int(at.value)], rest)
    value = reader.read(parts[-1], rest)
    for i in range(len(parts) - 2, -1, -1):
        value = tirx.Select(at < i64(i + 1), *common(reader.read(parts[i], rest), value))
    return value


def _take(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    source, picks = call.args[0], call.args[1]
    if call.attrs.axis is None:
        raise Unreadable("take without an axis", var)
    shape = reader.shape(source)
    axis = int(call.attrs.axis) % len(shape)
    if isinstance(getattr(reader.view.resolve(picks), "ty", None), relax.TensorType):
        rank = len(reader.shape(picks))
    else:
        rank = 0
    where = reader.read(picks, index[axis : axis + rank])
    if isinstance(where, tirx.IntImm):
        if not 0 <= int(where.value) or not (reader.analyzer.can_prove(i64(where) < shape[axis])):
            raise Unreadable(f"take at {where} of an axis of size {shape[axis]}", var)
    elif buffer_loads(where):
        # Gathered rows (a rotary's tables at position ids) are read as they are, not looked up anew
        # for every element.
        reader.inside.pop(var, None)
        return reader.load(var, index)
    return reader.read(source, [*index[:axis], i64(where), *index[axis + rank :]])


def _repeat(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    if call.attrs.axis is None:
        raise Unreadable("repeat without an axis", var)
    axis = int(call.attrs.axis) % len(index)
    moved = list(index)
    moved[axis] = reader.simplify(tirx.floordiv(index[axis], i64(int(call.attrs.repeats))))
    return reader.read(call.args[0], moved)


def _tile(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    shape = reader.shape(call.args[0])
    moved = index[len(index) - len(shape) :]
    moved = [
        i64(0) if reader.is_size(dim, 1) else reader.simplify(tirx.floormod(i, dim))
        for i, dim in zip(moved, shape, strict=True)
    ]
    return reader.read(call.args[0], moved)


def _arange(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    dtype = reader.view.dtype(var) or "int64"
    start, step = (reader.read(call.args[i], []) for i in (0, 2))
    if is_float(dtype):
        return cast(start, "float32") + cast(index[0], "float32") * cast(step, "float32")
    return cast(i64(start) + index[0] * i64(step), dtype)


def _full(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    value = reader.read(call.args[1], [])
    return cast(value, reader.view.dtype(var) or dtype_of(value))


def _fill(value: int) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        return const_like(value, reader.view.dtype(var) or "float32")

    return handle


LAYOUT: dict[str, Callable[..., Any]] = {
    "relax.permute_dims": _permute,
    "relax.reshape": _reshape,
    "relax.flatten": _reshape,
    "relax.expand_dims": _expand_dims,
    "relax.squeeze": _squeeze,
    "relax.broadcast_to": _broadcast_to,
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.repeat": _repeat,
    "relax.tile": _tile,
}

CREATE: dict[str, Callable[..., Any]] = {
    "relax.arange": _arange,
    "relax.full": _full,
    "relax.full_like": _full,
    "relax.zeros": _fill(0),
    "relax.zeros_like": _fill(0),
    "relax.ones": _fill(1),
    "relax.ones_like": _fill(1),
}

JOIN: dict[str, Callable[..., Any]] = {"relax.concat": _concat, "relax.stack": _stack}
