"""The same bindings once more, with other names: what was found in one layer holds in the next.

Recognising an attention takes some 30 ms, comparing it with the one of the layer before 1 ms.
`alike` walks both at once, from their results back to what they read, and demands the same
operators, attributes, types and constants at every step; so what was read off the first is true
of the second. Sizes must be the very same symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tvm.ir import Call, Tuple, TupleGetItem
from tvm_ffi import structural_equal

from ..dataflow import FunctionView, is_var, op_name
from .element_regions import is_biased_product, origin

__all__ = ["alike", "follow", "path_between"]

_SMALL = 4096  # constants of more elements must be the same object


def path_between(view: FunctionView, start: Any, end: Any, inside: Iterable[Any]) -> list[Any]:
    """Return variables from `start` to `end`, each read by the next; empty where there are none."""
    allowed = set(inside)
    came: dict[Any, Any] = {start: None}
    pending = [start]
    while pending:
        var = pending.pop()
        if var.same_as(end):
            path = [var]
            while came[path[-1]] is not None:
                path.append(came[path[-1]])
            return path[::-1]
        for user in view.users(var):
            if user.var in allowed and user.var not in came:
                came[user.var] = var
                pending.append(user.var)
    return []


def follow(view: FunctionView, path: Sequence[Any], start: Any) -> Any:
    """Walk from `start` as `path` goes from its first variable; return the end, or None.

    At every step the same operators read the variable, and it is a result of the function or not
    as in the path.
    """
    here = start
    for i, old in enumerate(path):
        mine, theirs = view.users(here), view.users(old)
        if len(mine) != len(theirs) or view.is_output(here) != view.is_output(old):
            return None
        names = [[op_name(u.value) for u in users] for users in (theirs, mine)]
        if names[0] != names[1]:
            return None
        if i + 1 < len(path):
            place = next((k for k, u in enumerate(theirs) if u.var.same_as(path[i + 1])), None)
            if place is None:
                return None
            here = mine[place].var
    return here


def alike(
    view: FunctionView,
    region: Iterable[Any],
    outputs: Sequence[Any],
    others: Sequence[Any],
    same_leaf: Callable[[Any, Any], bool] | None = None,
) -> dict[Any, Any] | None:
    """Return what stands for each variable and leaf of `region` in the code that makes `others`.

    Parameters
    ----------
    view : FunctionView
        The scope that holds both.
    region : iterable of Var
        The bindings that were recognised.
    outputs, others : sequence of Var
        Results of the region, and of what may be its like, in the same order.
    same_leaf : callable, optional
        `same_leaf(old, new) -> bool`: a further condition on what the region reads.

    Returns
    -------
    dict or None
        One to one, from the region's variables and inputs; None unless all is the same.
    """
    pairs = _Pairs(view, set(region), same_leaf)
    for old, new in zip(outputs, others, strict=True):
        if not pairs.add(old, new):
            return None
    return pairs.mapped if pairs.run() else None


class _Pairs:
    def __init__(self, view: FunctionView, region: set[Any], same_leaf: Any) -> None:
        self.view = view
        self.region = region
        self.same_leaf = same_leaf
        self.mapped: dict[Any, Any] = {}
        self.back: dict[Any, Any] = {}
        self.pending: list[tuple[Any, Any]] = []

    def run(self) -> bool:
        while self.pending:
            if not self.bindings(*self.pending.pop()):
                return False
        return all(var in self.mapped for var in self.region)

    def add(self, old: Any, new: Any) -> bool:
        """Pair two variables; inside the region their bindings are compared later."""
        if old in self.mapped or new in self.back:
            return old in self.mapped and self.mapped[old].same_as(new)
        if not is_var(new) or not structural_equal(old.ty, new.ty):
            return False
        self.mapped[old], self.back[new] = new, old
        if old in self.region:
            self.pending.append((old, new))
            return True
        return self.leaf(old, new)

    def leaf(self, old: Any, new: Any) -> bool:
        """Tell whether recognition would stop at both for the same reason."""
        view = self.view
        if old.same_as(new):
            return True
        one, other = view.value(old), view.value(new)
        if op_name(one) != op_name(other) or type(one) is not type(other):
            return False
        if (view.index(old) < 0) != (view.index(new) < 0):
            return False
        if isinstance(one, Call) and isinstance(other, Call):
            if [self.kind(a) for a in one.args] != [self.kind(a) for a in other.args]:
                return False
            if is_biased_product(view, old) != is_biased_product(view, new):
                return False
        if isinstance(one, TupleGetItem) and isinstance(other, TupleGetItem):
            wholes = [view.value(v.tuple_value) for v in (one, other)]
            if op_name(wholes[0]) != op_name(wholes[1]):
                return False
        return self.same_leaf is None or self.same_leaf(old, new)

    def kind(self, expr: Any) -> tuple[Any, ...]:
        view = self.view
        found = view.resolve(expr)
        if not is_var(found):
            return (type(found).__name__, view.scalar(found))
        source = origin(view, found)
        return ("variable", view.index(found) < 0, op_name(view.value(source)))

    def bindings(self, old: Any, new: Any) -> bool:
        one, other = self.view.binding(old), self.view.binding(new)
        if one is None or other is None or type(one) is not type(other):
            return False
        cast, recast = getattr(one, "ty", None), getattr(other, "ty", None)
        if (cast is None) != (recast is None):
            return False
        if cast is not None and not structural_equal(cast, recast):
            return False
        return self.exprs(one.value, other.value)

    def exprs(self, old: Any, new: Any) -> bool:
        view = self.view
        old, new = view.resolve(old), view.resolve(new)
        if is_var(old):
            return is_var(new) and self.add(old, new)
        if type(old) is not type(new):
            return False
        if isinstance(old, Call):
            one, other = old.args[:], new.args[:]
            return (
                old.op.same_as(new.op)
                and len(one) == len(other)
                and structural_equal(old.attrs, new.attrs)
                and structural_equal(old.ty_args, new.ty_args)
                and all(map(self.exprs, one, other))
            )
        if isinstance(old, Tuple):
            one, other = old.fields[:], new.fields[:]
            return len(one) == len(other) and all(map(self.exprs, one, other))
        if isinstance(old, TupleGetItem):
            return old.index == new.index and self.exprs(old.tuple_value, new.tuple_value)
        if old.same_as(new):
            return True
        arrays = view.constant(old), view.constant(new)
        if arrays[0] is None or arrays[1] is None:
            return bool(structural_equal(old, new))
        if arrays[0].size > _SMALL or arrays[0].dtype != arrays[1].dtype:
            return False
        same = np.array_equal(arrays[0], arrays[1])
        if same:
            self.mapped.setdefault(old, new)
        return bool(same)
