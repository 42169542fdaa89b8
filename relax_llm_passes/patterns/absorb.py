"""Which bindings before a region may join it: those that only the region reads."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from ..dataflow import FunctionView, is_var
from .affine import can_follow

__all__ = ["absorb"]


def _sources(view: FunctionView, var: Any) -> list[Any]:
    """Return the variables that the binding of `var` reads, tuples taken apart."""
    out = []
    for read in view.reads(view.index(var)):
        found = view.resolve(read)
        if is_var(found):
            fields = view.fields(found)
            out += [found] if fields is None else [f for f in fields if is_var(f)]
    return out


def absorb(
    view: FunctionView, core: Iterable[Any], allowed: Callable[[Any], bool] | None = None
) -> dict[Any, None]:
    """Return `core` with every binding before it that only members read and that can be followed.

    Parameters
    ----------
    view : FunctionView
        The scope.
    core : iterable of Var
        The bindings that are members anyway.
    allowed : callable, optional
        `allowed(var) -> bool` instead of `can_follow`.

    Returns
    -------
    dict
        The members, in no particular order.
    """
    allowed = allowed or (lambda v: can_follow(view, v))
    members = {view.resolve(v): None for v in core}
    waiting: list[int] = []
    seen: set[int] = set()

    def queue(var: Any) -> None:
        for read in _sources(view, var):
            row = view.index(read)
            if row >= 0 and row not in seen and read not in members:
                seen.add(row)
                heapq.heappush(waiting, -row)

    for var in list(members):
        queue(var)
    # Readers come after what they read: going backward, all of a value's readers are decided.
    while waiting:
        var = view.bindings[-heapq.heappop(waiting)].var
        if view.is_output(var) or not allowed(var):
            # A split is read through its fields: it joins when all of them did.
            if view.call(var, "relax.split") is None or view.is_output(var):
                continue
        if any(view.resolve(b.var) not in members for b in view.users(var)):
            continue
        members[var] = None
        queue(var)
    return members
