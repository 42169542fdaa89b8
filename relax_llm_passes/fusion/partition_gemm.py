"""PartitionGemm: products with their transposes, packed weights and epilogues become composites.

    wt = permute_dims(w)
    m = matmul(x, wt)          ->      r = gemm_bias_relu(x, w, b)
    a = add(m, b)
    r = relu(a)

Spellings and refusals: `patterns.gemm`. It is no gain to outline what no implementation takes;
`LowerComposites` puts such a product back as it was.

`partition_for_cublas` and `partition_for_cutlass` are drop-ins for TVM's functions of these names:
the same signatures, and a result in the form that `RunCodegen` of a TVM built with these libraries
reads. They see more spellings, and none that the libraries cannot compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import relax

from ..dataflow import FunctionView
from ..errors import InputError
from ..outline import Region, outline
from ..patterns.gemm import KIND, GemmMatch, match_gemms
from ..registry import PassRun, register_pass
from ..report import PassRecord, Refusal
from ..rewriting import Draft, draft_scope, replace_functions, write_function
from .duplicate_views import duplicate_views

__all__ = ["PartitionGemm", "PartitionGemmOptions", "partition", "prepare"]

Choose = Callable[[FunctionView, GemmMatch], "Region | Refusal"]


@dataclass(frozen=True)
class PartitionGemmOptions:
    """Options of PartitionGemm.

    Attributes
    ----------
    copy_views : bool
        Give each product its own copy of a transpose or view that several share.
    activation_bits : int
        8 or 16 allow a matrix-vector product by group-quantised weights on a CPU to round its left
        operand to integers of so many bits, with a scale for each group of the weights. With 8
        each value is off by at most 1/254 of the largest of its group, as in llama.cpp; with 16 by
        2^-15 of it. 0 keeps every left operand in its type's precision.
    """

    copy_views: bool = True
    activation_bits: int = 0


def _functions(mod: tvm.IRModule) -> list[tvm.ir.GlobalVar]:
    """Return the functions to look at: Relax functions that are no composites already."""
    return [
        gvar
        for gvar, func in mod.functions.items()
        if isinstance(func, relax.Function)
        and isinstance(func.body, relax.SeqExpr)
        and not (func.attrs and ("Composite" in func.attrs or "Codegen" in func.attrs))
    ]


Found = list[tuple[FunctionView, list["GemmMatch | Refusal"]]]


def _find(mod: tvm.IRModule, gvar: tvm.ir.GlobalVar, copy_shared: bool) -> Found:
    return [(view, match_gemms(view, copy_shared)) for view in FunctionView(mod, gvar).scopes()]


def prepare(
    mod: tvm.IRModule, gvar: tvm.ir.GlobalVar, copy_views: bool = True
) -> tuple[tvm.IRModule, Found]:
    """Duplicate shared views for the products of one function; return what is found then."""
    found = _find(mod, gvar, copy_views)
    drafts: dict[int, Draft] = {}
    for view, matches in found:
        draft = duplicate_views(view, [m for m in matches if isinstance(m, GemmMatch)])
        if draft is not None:
            drafts[id(view)] = draft
    if not drafts:
        return mod, found
    whole = _nest(found[0][0], drafts)
    mod = replace_functions(mod, {gvar: write_function(whole)}, {}, set())
    return mod, _find(mod, gvar, False)


def _nest(view: FunctionView, drafts: dict[int, Draft]) -> Draft:
    draft = drafts.get(id(view)) or draft_scope(view)
    draft.children = {}
    for child in view.children:
        assert child.owner is not None
        inner = _nest(child, drafts)
        draft.children.setdefault(view.position(child.owner.var), []).append(inner)
        draft.changed = draft.changed or inner.changed
    return draft


def _ours(view: FunctionView, match: GemmMatch) -> Region:
    steps = [s["op"] for s in match.region.attrs["epilogue"] if s["op"] != "cast"]
    match.region.name = "_".join(["gemm", *steps])
    return match.region


def partition(
    mod: tvm.IRModule,
    choose: Choose,
    record: PassRecord | None = None,
    copy_views: bool = True,
) -> tvm.IRModule:
    """Outline the GEMMs of every function in the form that `choose` gives them."""
    for gvar in _functions(mod):
        mod, found = prepare(mod, gvar, copy_views)
        regions: list[Region] = []
        refusals: list[Refusal] = []
        for view, matches in found:
            for match in matches:
                answer = choose(view, match) if isinstance(match, GemmMatch) else match
                if isinstance(answer, Refusal):
                    refusals.append(answer)
                else:
                    regions.append(answer)
        excluded: list[Refusal] = []
        if regions:
            mod, excluded = outline(mod, gvar, regions)
        if record is not None:
            for refusal in [*refusals, *excluded]:
                record.refuse(refusal)
            if len(regions) > len(excluded):
                record.match(KIND, len(regions) - len(excluded))
    return mod


@register_pass("PartitionGemm", stage="fuse", options=PartitionGemmOptions)
def PartitionGemm(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline products with their transposes, packed weights and epilogues as "gemm" composites."""
    bits = run.options.activation_bits
    if bits not in (0, 8, 16):
        raise InputError(f"PartitionGemm: activation_bits={bits}: expected 0, 8 or 16")

    def ours(view: FunctionView, match: GemmMatch) -> Region:
        region = _ours(view, match)
        if bits and region.attrs["quant"]:
            region.attrs["quant"]["activation_bits"] = bits
        return region

    return partition(mod, ours, run.record, run.options.copy_views)
