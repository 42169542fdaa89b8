"""Views of functions kept from pass to pass while a pipeline runs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import tvm
from tvm.ir import GlobalVar

from .dataflow import FunctionView

__all__ = ["shared_views", "view_of"]


@dataclass
class _Shared:
    """The views of one module that have been asked for."""

    mod: tvm.IRModule | None = None
    views: dict[str, FunctionView] = field(default_factory=dict)


_SHARED: contextvars.ContextVar[_Shared | None] = contextvars.ContextVar("views", default=None)


@contextlib.contextmanager
def shared_views() -> Iterator[None]:
    """Within this context `view_of` keeps the views of the module it was last asked about.

    Most passes change nothing in most functions; those that follow need not read them again.
    """
    token = _SHARED.set(_Shared())
    try:
        yield
    finally:
        _SHARED.reset(token)


def view_of(mod: tvm.IRModule, gvar: GlobalVar) -> FunctionView:
    """Return the view of a function, which must not be changed: it may be shared."""
    shared = _SHARED.get()
    if shared is None:
        return FunctionView(mod, gvar)
    if shared.mod is None or not shared.mod.same_as(mod):
        shared.mod, shared.views = mod, {}
    known = shared.views.get(gvar.name_hint)
    # A module may be changed in place while it is built.
    if known is None or not known.function.same_as(mod[gvar]):
        known = shared.views[gvar.name_hint] = FunctionView(mod, gvar)
    return known
