"""Give each region its own copy of cheap bindings that several share.

Masks, positions and expanded tables are computed once and used by every layer. A composite that
takes them along (so that its kernel computes them from positions) must not take them away from
the others: they are copied, and what nobody uses afterwards is dead code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tvm import relax
from tvm.relax import BindingBlock, DataflowBlock, MatchCast, VarBinding

from ..cloning import Clone, new_seq
from ..dataflow import FunctionView

__all__ = ["separate_regions"]


def separate_regions(
    view: FunctionView, regions: Sequence[tuple[Iterable[Any], Sequence[Any]]]
) -> relax.Function:
    """Return the function with shared bindings copied, so that only outputs leave a region.

    Parameters
    ----------
    view : FunctionView
        The function's outermost scope.
    regions : sequence of (variables, outputs)
        Variables of each region's bindings, resolved; which of them may be read outside.
    """
    members: dict[Any, list[int]] = {}
    outputs = [list(outs) for _, outs in regions]
    for number, (variables, _) in enumerate(regions):
        for var in variables:
            members.setdefault(var, []).append(number)
    shared: dict[Any, list[int]] = {}
    kept: set[Any] = set()  # shared bindings whose original still has a reader
    owner: dict[Any, int] = {}
    # Backwards: what a shared binding reads is read outside too, by the original that stays.
    for var in sorted(members, key=view.index, reverse=True):
        numbers = members[var]
        if any(var.same_as(o) for n in numbers for o in outputs[n]):
            owner[var] = numbers[0]
            continue
        readers = view.users(var)
        outside = view.is_output(var) or any(
            numbers[0] not in members.get(view.resolve(u.var), []) or view.resolve(u.var) in shared
            for u in readers
        )
        if len(numbers) == 1 and not outside:
            owner[var] = numbers[0]
            continue
        shared[var] = numbers
        if view.is_output(var) or any(
            view.resolve(u.var) not in members or view.resolve(u.var) in kept for u in readers
        ):
            kept.add(var)
    if not shared:
        return view.function
    clones: dict[int, Clone] = {}
    blocks = []
    for block in view.seq.blocks[:]:
        kind = DataflowBlock if isinstance(block, DataflowBlock) else BindingBlock
        bindings: list[Any] = []
        for binding in block.bindings[:]:
            var = binding.var
            resolved = view.resolve(var)
            mine = owner.get(resolved)
            if mine is not None and var.same_as(resolved) and type(binding) is not MatchCast:
                value = clones.setdefault(mine, Clone({}, {})).expr(binding.value)
                bindings.append(VarBinding(var, value, binding.span))
            elif resolved not in shared or resolved in kept:
                bindings.append(binding)
            for number in shared.get(resolved, []):
                clone = clones.setdefault(number, Clone({}, {}))
                if var.same_as(resolved):
                    bindings.append(clone.binding(binding))
                else:
                    clone.env[var] = clone.env[resolved]
        blocks.append(kind(bindings, block.span))
    func = view.function
    body = new_seq(blocks, func.body.body, func.body.ty)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)
