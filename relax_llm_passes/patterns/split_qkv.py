"""Group the rotaries of one layer with the split before them and the cache append behind them.

Rotated queries and keys that come from one packed product, or from separate products of the same
activations, are written by one kernel, in the layout that their reader wants. An append
(`concat(past, rotated)`) is part of it, and so is that of the values when they come from the same
packed product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.scalar_expr import any_node, buffer_loads
from ..report import Refusal
from .cache_append import appended_rows, read_appended
from .element_regions import is_biased_product, origin, region_between
from .element_scalars import Unreadable
from .elements import ElementReader
from .rotary import RotaryMatch, find_rotary

__all__ = ["SplitRotaryMatch", "find_split_rotary"]

KIND = "split_rotary"
_VIEWS = ("relax.permute_dims", "relax.reshape", "relax.expand_dims", "relax.squeeze")


@dataclass
class ElementOutput:
    """One output of an elementwise kernel: out[index] = value."""

    buffer: Any
    index: list[Any]
    value: Any


@dataclass
class SplitRotaryMatch:
    """Rotaries of one layer.

    Attributes
    ----------
    outputs : list of Var
        What one kernel writes.
    elements : list of ElementOutput
        How, in the same order.
    inputs : list of tirx.Buffer; leaves : list of Expr
        What the expressions load from.
    region : dict[Var, None]
    tir_vars : list of Var
        Sizes that no buffer's shape gives.
    facts : dict
    """

    outputs: list[Any]
    elements: list[ElementOutput]
    inputs: list[Any]
    leaves: list[Any]
    region: dict[Any, None]
    tir_vars: list[Any]
    facts: dict[str, Any] = field(default_factory=dict)


def find_split_rotary(
    view: FunctionView, together: bool = False
) -> list[SplitRotaryMatch | Refusal]:
    """Return the rotaries of a scope, grouped by layer.

    Parameters
    ----------
    together : bool
        Take all as one group (inside a composite, where the products are not in sight).
    """
    found: list[SplitRotaryMatch | Refusal] = []
    groups: dict[Any, list[RotaryMatch]] = {}
    for match in find_rotary(view):
        if isinstance(match, Refusal):
            found.append(match)
            continue
        key = None if together else _product_input(view, match.source)
        groups.setdefault(key, []).append(match)
    for rotaries in groups.values():
        try:
            found.append(_group(view, rotaries))
        except Unreadable as err:
            name = getattr(rotaries[0].var, "name", "")
            found.append(Refusal(err.reason, KIND, view.name, err.binding or name))
    return found


def _product_input(view: FunctionView, source: Any) -> Any:
    """Return what the product behind `source` reads; `source` itself when there is none."""
    var = view.resolve(source)
    if is_var(var) and is_biased_product(view, var):
        sides = [origin(view, a) for a in view.value(var).args]
        var = next(a for a in sides if view.call(a, "relax.matmul") is not None)
    call = view.call(var, "relax.matmul")
    return var if call is None else origin(view, call.args[0])


def _extend(view: FunctionView, var: Any) -> tuple[Any, bool]:
    """Follow the views behind a rotary, up to and with an append; says whether there is one."""
    while not view.is_output(var):
        users = view.users(var)
        if len(users) != 1:
            break
        call, new = users[0].value, users[0].var
        if op_name(call) in _VIEWS and view.shape(new) is not None:
            var = new
            continue
        if _appended(view, new) is not None and _appended(view, new).same_as(var):
            return new, True
        break
    return var, False


def _appended(view: FunctionView, var: Any) -> Any:
    """Return the new rows of a cache that comes from outside, or None."""
    found = appended_rows(view, var)
    if found is None:
        return None
    past = origin(view, found[0])
    # The cache comes from outside; halves of a rotary are put together by concat as well.
    return found[1] if is_var(past) and view.index(past) < 0 else None


def _value_appends(view: FunctionView, sources: Sequence[Any], taken: Sequence[Any]) -> list[Any]:
    found = []
    for binding in view.bindings:
        new = _appended(view, binding.var)
        if new is None or any(binding.var.same_as(t) for t in taken):
            continue
        reader = ElementReader(view, lambda v: is_biased_product(view, v))
        try:
            shape = reader.shape(new)
            value = reader.read(new, [tirx.Var(f"i{n}", "int64") for n in range(len(shape))])
        except Unreadable:
            continue
        leaves = list(reader.leaves)
        plain = len(buffer_loads(value)) == 1 and len(leaves) == 1
        if plain and any(leaves[0].same_as(s) for s in sources) and len(shape) >= 3:
            found.append(binding.var)
    return found


def _group(view: FunctionView, rotaries: list[RotaryMatch]) -> SplitRotaryMatch:
    outputs, appends = [], 0
    for match in rotaries:
        var, appended = _extend(view, match.var)
        outputs.append(var)
        appends += appended
    sources = [m.source for m in rotaries]
    if appends:
        values = _value_appends(view, sources, outputs)
        outputs += values
        appends += len(values)
    outputs.sort(key=view.index)
    reader = ElementReader(view, lambda v: is_biased_product(view, v))
    elements = []
    for number, var in enumerate(outputs):
        shape = reader.shape(var)
        index = [tirx.Var(f"i{number}_{n}", "int64") for n in range(len(shape))]
        for i, dim in zip(index, shape, strict=True):
            _bind(reader, i, dim)
        buffer = tirx.decl_buffer(shape, view.dtype(var), name=f"out{number}")
        elements.append(ElementOutput(buffer, index, read_appended(reader, var, index)))
    loads = [load for e in elements for load in buffer_loads(e.value)]
    inputs, leaves = [], []
    for leaf, buffer in reader.leaves.items():
        if any(load.source.same_as(buffer) for load in loads):
            inputs.append(buffer)
            leaves.append(leaf)
    region = region_between(view, outputs, leaves)
    facts = {
        "rotary": rotaries[0].rotary.to_dict(),
        "rotaries": len(rotaries),
        "split": len({id(s) for s in sources}) < len(sources) or appends > 1,
        "append": appends > 0,
    }
    free = _free_sizes(elements, inputs)
    return SplitRotaryMatch(outputs, elements, inputs, leaves, region, free, facts)


def _bind(reader: ElementReader, var: Any, extent: Any) -> None:
    import tvm

    reader.analyzer.bind(var, tvm.ir.Range(tirx.IntImm("int64", 0), extent))


def _free_sizes(elements: list[ElementOutput], inputs: list[Any]) -> list[Any]:
    buffers = [*inputs, *(e.buffer for e in elements)]
    given = [dim for b in buffers for dim in b.shape if isinstance(dim, tirx.Var)]
    own = [i for e in elements for i in e.index]
    free: dict[Any, None] = {}

    def note(node: Any) -> bool:
        if isinstance(node, tirx.Var) and not isinstance(node.ty, relax.TensorType):
            is_size = str(getattr(node.ty, "dtype", "")) == "int64"
            if is_size and not any(node.same_as(v) for v in (*given, *own)):
                free[node] = None
        return False

    for expr in [e.value for e in elements] + [dim for b in buffers for dim in b.shape]:
        any_node(expr, note)
    return list(free)
