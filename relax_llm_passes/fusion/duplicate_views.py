"""Give each region its own copy of the transposes and views that it shares with others.

    wt = permute_dims(w)             wt1 = permute_dims(w)
    a = matmul(x, wt)         ->     a = matmul(x, wt1)
    b = matmul(y, wt)                wt2 = permute_dims(w)
                                     b = matmul(y, wt2)

A transpose that two products share would have to run, and to be stored, before either. Inside a
region it is only an order of reading. The original goes when nothing reads it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.ir import Var
from tvm.relax import Binding, DataflowVar, VarBinding

from ..cloning import Clone
from ..dataflow import FunctionView
from ..patterns.gemm import GemmMatch
from ..rewriting import Draft, draft_scope, row_reads

__all__ = ["duplicate_views"]


def duplicate_views(view: FunctionView, matches: Sequence[GemmMatch]) -> Draft | None:
    """Return a draft of the scope in which no match shares a view; None if none does.

    Parameters
    ----------
    view : FunctionView
        One scope.
    matches : sequence of GemmMatch
        From `match_gemms(view, copy_shared=True)`.
    """
    if not any(m.copies for m in matches):
        return None
    draft = draft_scope(view)
    items = {item.rows[0]: item for item in draft.items}
    left: dict[Var, set[int]] = {}  # rows that still read a shared variable
    for match in matches:
        if not match.copies:
            continue
        shared = {view.resolve(v): None for v in match.copies}
        rows = sorted(view.index(v) for v in match.region.bindings if view.resolve(v) not in shared)
        readers = [r for r in rows if any(v in shared for v in row_reads(view, r, False))]
        sources = sorted(view.index(v) for v in shared)
        copier = _Copier(view, draft, sources)
        for row in readers:
            item = items[row]
            item.replace = copier.write
            for source in sources:
                item.reads.update(row_reads(view, source, False))
        for var in shared:
            readers_of = left.setdefault(var, {view.index(b.var) for b in view.users(var)} - {-1})
            readers_of.difference_update(readers)
    gone: set[int] = set()
    for var in sorted(left, key=view.index, reverse=True):
        if not view.is_output(var) and left[var] <= gone:
            gone.add(view.index(var))
    draft.items = [item for item in draft.items if item.rows[0] not in gone]
    draft.changed = True
    return draft


class _Copier:
    """Writes one region's copies before the first binding that reads them."""

    def __init__(self, view: FunctionView, draft: Draft, sources: list[int]) -> None:
        self.view, self.draft, self.sources = view, draft, sources
        self.clone = Clone({}, {})
        self.written = False

    def write(self, rewritten: list[Binding], writer: Any, dataflow: bool) -> list[Binding]:
        (old,) = rewritten
        result: list[Binding] = []
        if not self.written:
            self.written = True
            for source in self.sources:
                binding = self.view.bindings[source]
                value = self.clone.expr(writer.expr(self.view, binding.value))
                kind = DataflowVar if dataflow else Var
                new = kind(binding.var.name, binding.var.ty)
                self.clone.env[binding.var] = new
                self.clone.env[writer.env.get(binding.var, binding.var)] = new
                result.append(VarBinding(new, value))
        return [*result, VarBinding(old.var, self.clone.expr(old.value), old.span)]
