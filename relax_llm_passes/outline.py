"""Regions to composite functions: the only code that moves bindings. `inline` is the way back.

`outline` replaces the bindings of each accepted region by one call of a new private function:

    m = R.matmul(x, w)                  gv = cls.gemm(x, w, b)
    b2 = R.multiply(b, b)        ->
    gv = R.add(m, b)                    def gemm(x, w, b):  # Composite = "relax_llm.gemm"

The function's body is the original program, so outlining cannot change a result. Which regions
are accepted is decided in `regions.py`; everything else here cannot refuse.

Order. A call stands where the region's last binding was; bindings that need a value of the region
move behind it, bindings that the region needs move before it, nothing moves without a reason. An
impure binding is never crossed. `inline` restores the original order, from a note that `outline`
leaves on the caller when the order changed.

Composite functions carry these attributes: "Composite" ("relax_llm." + kind), "relax_llm.roles"
(JSON, role to parameter index), "relax_llm.outputs" (JSON, names of the results in order),
"relax_llm.attrs" (JSON, the region's static facts). A symbolic size that the parameters' shapes do
not give arrives in a last parameter, `sizes`, a shape. A size that a match_cast inside the region
defines and the outside needs leaves as a last result, a shape ("relax_llm.symbols").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tvm
from tvm.ir import GlobalVar
from tvm.relax import Function, MatchCast

from .cloning import definable_symbols
from .composites import ATTRS, COMPOSITE_PREFIX, ORDER, OUTPUTS, ROLES, ROUND, CompositeBuilder
from .dataflow import FunctionView, function_named, type_vars
from .inlining import inline
from .regions import Chosen, Region, select
from .report import Refusal
from .rewriting import (
    Draft,
    Item,
    draft_scope,
    paused_gc,
    replace_functions,
    write_function,
)
from .shared_views import view_of

__all__ = [
    "ATTRS",
    "COMPOSITE_PREFIX",
    "ORDER",
    "OUTPUTS",
    "ROLES",
    "ROUND",
    "Region",
    "inline",
    "outline",
]


@paused_gc()
def outline(
    mod: tvm.IRModule, function: GlobalVar | str, regions: Iterable[Region]
) -> tuple[tvm.IRModule, list[Refusal]]:
    """Move regions of one function into composite functions of their own.

    Parameters
    ----------
    mod : tvm.IRModule
        The module; it is not changed.
    function : GlobalVar or str
        The Relax function whose bindings the regions name, in its body or in scopes inside it.
    regions : iterable of Region
        What recognisers found; they may overlap. Items that are not regions (refusals that a
        recogniser returned among them) are skipped.

    Returns
    -------
    mod : tvm.IRModule
        The module with a call in place of each accepted region.
    refusals : list of Refusal
        Why each of the other regions stays as it is.

    Raises
    ------
    UnknownNameError, InputError
        When `mod` has no such Relax function.
    """
    gvar, func = function_named(mod, function)
    wanted = [(i, r) for i, r in enumerate(regions) if isinstance(r, Region)]
    if not wanted:
        return mod, []
    root = view_of(mod, gvar)
    refusals: list[Refusal] = []
    by_scope = _by_scope(root, wanted, refusals)
    builder = CompositeBuilder(_names(mod), _next_round(mod))
    draft = draft_scope(root)
    note = _plan(draft, by_scope, builder, refusals)
    if not any(by_scope.values()):
        return mod, refusals
    new = write_function(draft)
    if not builder.added:
        return mod, refusals
    if note is not None:
        old = func.attrs.get(ORDER, None)
        notes = json.loads(str(old)) if old is not None else []
        new = new.with_attr(ORDER, json.dumps([*notes, {"round": builder.round, **note}]))
    return replace_functions(mod, {gvar: new}, builder.added, set()), refusals


def _by_scope(
    root: FunctionView, regions: Sequence[tuple[int, Region]], refusals: list[Refusal]
) -> dict[FunctionView, list[tuple[int, Region]]]:
    home = {b.var: scope for scope in root.scopes() for b in scope.bindings}
    found: dict[FunctionView, list[tuple[int, Region]]] = {s: [] for s in root.scopes()}
    for number, region in regions:
        lost = [v for v in region.bindings if v not in home]
        scopes = {home[v] for v in region.bindings if v in home}
        first = next(iter(region.bindings), None)
        name = first.name if first is not None else ""
        if lost:
            reason = f"{lost[0].name} is not bound in function {root.name}"
            refusals.append(Refusal(reason, region.kind, root.name, lost[0].name))
        elif not scopes:
            refusals.append(Refusal("it has no bindings", region.kind, root.name))
        elif len(scopes) == 1:
            found[scopes.pop()].append((number, region))
        else:
            reason = "its bindings are in several scopes (an If branch or a local function)"
            refusals.append(Refusal(reason, region.kind, root.name, name))
    return found


def _names(mod: tvm.IRModule) -> set[str]:
    names = {gv.name_hint for gv in mod.get_global_vars()}
    for func in mod.functions.values():
        symbol = func.attrs.get("global_symbol", None) if func.attrs else None
        if symbol is not None:
            names.add(str(symbol))
    return names


def _next_round(mod: tvm.IRModule) -> int:
    rounds = [0]
    for func in mod.functions.values():
        if isinstance(func, Function) and func.attrs and "Composite" in func.attrs:
            rounds.append(int(func.attrs.get(ROUND, 0)))
    return max(rounds) + 1


def _plan(
    draft: Draft,
    by_scope: dict[FunctionView, list[tuple[int, Region]]],
    builder: CompositeBuilder,
    refusals: list[Refusal],
) -> dict[str, Any] | None:
    """Put the accepted regions of a scope, and of those inside it, into its draft.

    Returns the note from which `inline` restores the order, or None where nothing moved.
    """
    note: dict[str, Any] = {}
    number = {item.rows[0]: i for i, item in enumerate(draft.items)}
    for row, children in draft.children.items():
        for k, child in enumerate(children):
            inner = _plan(child, by_scope, builder, refusals)
            if inner is not None:
                note.setdefault("inner", {})[f"{number[row]}.{k}"] = inner
    regions = by_scope[draft.view]
    if regions:
        chosen, order, refused = select(draft.view, regions)
        refusals += refused
        if chosen:
            before = [(item.rows[0], item.block) for item in draft.items]
            _group(draft, chosen, order, builder)
            after = [(row, item.block) for item in draft.items for row in item.rows]
            if after != before:
                note["order"] = [number[row] for row, _ in after]
                note["blocks"] = _block_sizes(draft, [block for _, block in before])
    return note or None


def _block_sizes(draft: Draft, blocks: list[int]) -> list[list[int]]:
    sizes: list[list[int]] = []
    last = None
    for block in blocks:
        if block != last:
            sizes.append([int(draft.dataflow[block]), 0])
            last = block
        sizes[-1][1] += 1
    return sizes


def _group(
    draft: Draft, chosen: list[Chosen], order: list[list[int]], builder: CompositeBuilder
) -> None:
    """Reorder the draft's items and make one item of the rows of each chosen region."""
    view = draft.view
    single = {item.rows[0]: item for item in draft.items}
    groups = {c.rows[0]: c for c in chosen}
    items: list[Item] = []
    home: dict[Any, int] = {}
    for rows in order:
        found = groups.get(rows[0])
        if found is None:
            item = single[rows[0]]
        else:
            reads: dict[Any, None] = {}
            for row in rows:
                reads.update(single[row].reads)
            for row in rows:
                reads.pop(view.bindings[row].var, None)
            block = max(view.block(row) for row in rows)
            outputs = list(found.outputs.values())
            item = Item(rows, block, builder.replacer(view, found), outputs, reads)
        # Nothing may come before what it reads: a value that moved to a later block takes those
        # who read it along. So does a symbolic size, which the first match_cast of it defines.
        for var in item.reads:
            item.block = max(item.block, home.get(var, 0))
        for row in rows:
            for var in type_vars(view.bindings[row].var.ty):
                item.block = max(item.block, home.get(var, 0))
        for row in rows:
            binding = view.bindings[row]
            if type(binding) is MatchCast:
                for var in definable_symbols(binding.ty):
                    home.setdefault(var, item.block)
        for var in item.outputs:
            home[var] = item.block
        items.append(item)
    items.sort(key=lambda item: item.block)
    draft.items = items
    draft.changed = True
