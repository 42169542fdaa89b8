"""What lies behind an attention's second product, and what of the region others need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dataflow import FunctionView, op_name
from .attention_softmax import fail
from .element_layout import reshaped_index
from .element_scalars import Unreadable
from .elements import ElementReader

__all__ = ["check_region", "follow_result", "take_dead"]


def follow_result(
    reader: ElementReader, product: Any, index: list[Any], region: dict[Any, None]
) -> tuple[Any, list[Any]]:
    """Follow layout changes behind the product; return the last variable and its index.

    `index` is where an element is in the product; what is passed on the way joins `region`.
    """
    view, var = reader.view, product
    before: tuple[Any, list[Any]] | None = None  # where the last step only merged rows
    while not view.is_output(var):
        users = view.users(var)
        if len(users) != 1:
            break
        call, name = users[0].value, op_name(users[0].value)
        new, last = users[0].var, index
        try:
            if name == "relax.permute_dims":
                axes = call.attrs.axes
                order = range(len(index) - 1, -1, -1) if axes is None else map(int, axes)
                index = [index[a] for a in order]
            elif name in ("relax.reshape", "relax.flatten", "relax.expand_dims",
                          "relax.squeeze"):  # fmt: skip
                # Reading backwards and writing forwards are the same map with shapes swapped.
                index = reshaped_index(index, reader.shape(var), reader.shape(new), reader)
            elif name == "relax.astype":
                pass
            else:
                break
        except Unreadable:
            break
        region[var] = None
        before = (var, last) if _keeps_columns(reader, call, var, new) else None
        var = new
    if before is not None and _is_operand(view, var):
        # The product behind takes its rows as they were: then what follows it is its epilogue.
        var, index = before
    region[var] = None
    return var, [reader.simplify(i) for i in index]


def take_dead(view: FunctionView, region: dict[Any, None]) -> None:
    """Add readers whose results nobody uses (the places of a maximum beside its values)."""
    pending = list(region)
    while pending:
        for user in view.users(pending.pop()):
            if user.var not in region and not view.is_needed(user.var):
                region[user.var] = None
                pending.append(user.var)


def check_region(
    view: FunctionView, region: dict[Any, None], out: Any, caches: Sequence[Any]
) -> None:
    """Refuse when a big intermediate of the region is needed outside."""
    outputs = [out, *caches]
    for var in region:
        if any(var.same_as(o) for o in outputs):
            continue
        name = op_name(view.value(var))
        if name not in ("relax.matmul", "relax.nn.softmax"):
            continue
        outside = view.is_output(var) or any(u.var not in region for u in view.users(var))
        if outside:
            what = "probabilities" if name == "relax.nn.softmax" else "scores"
            raise fail(f"attention {what} are also used elsewhere", var)


def _keeps_columns(reader: ElementReader, call: Any, old: Any, new: Any) -> bool:
    """Tell whether a step is a reshape of all axes but the last."""
    if op_name(call) not in ("relax.reshape", "relax.flatten"):
        return False
    shapes = reader.shape(old), reader.shape(new)
    return all(shapes) and reader.same(shapes[0][-1], shapes[1][-1])


def _is_operand(view: FunctionView, var: Any) -> bool:
    """Tell whether a product's left operand is all that a value is used for."""
    users = view.users(var)
    if view.is_output(var) or len(users) != 1 or op_name(users[0].value) != "relax.matmul":
        return False
    return bool(view.resolve(users[0].value.args[0]).same_as(var))
