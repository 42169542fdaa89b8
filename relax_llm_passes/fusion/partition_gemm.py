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
from ..outline import Region, outline
from ..patterns.gemm import KIND, GemmMatch, match_gemms
from ..registry import PassRun, register_pass
from ..report import PassRecord, Refusal
from ..rewriting import Draft, draft_scope, replace_functions, write_function
from .duplicate_views import duplicate_views

__all__ = ["PartitionGemm", "PartitionGemmOptions", "find_regions", "prepare"]

Choose = Callable[[FunctionView, GemmMatch], "Region | Refusal"]


@dataclass(frozen=True)
class PartitionGemmOptions:
    """Options of PartitionGemm.

    Attributes
    ----------
    copy_views : bool
        Give each product its own copy of a transpose or view that several share.
    """

    copy_views: bool = True


def _functions(mod: tvm.IRModule) -> list[tvm.ir.GlobalVar]:
    """Return the functions to look at: Relax functions that are no composites already."""
    return [
        gvar
        for gvar, func in mod.functions.items()
        if isinstance(func, relax.Function)
        and isinstance(func.body, relax.SeqExpr)
        and not (func.attrs and ("Composite" in func.attrs or "Codegen" in func.attrs))
    ]


def prepare(mod: tvm.IRModule, gvar: tvm.ir.GlobalVar) -> tvm.IRModule:
    """Return the module with shared views duplicated for the products of one function."""
    root = FunctionView(mod, gvar)
    drafts: dict[int, Draft] = {}
    for view in root.scopes():
        matches = [m for m in match_gemms(view, copy_shared=True) if isinstance(m, GemmMatch)]
        draft = duplicate_views(view, matches)
        if draft is not None:
            drafts[id(view)] = draft
    if not drafts:
        return mod
    whole = _nest(root, drafts)
    return replace_functions(mod, {gvar: write_function(whole)}, {}, set())


def _nest(view: FunctionView, drafts: dict[int, Draft]) -> Draft:
    draft = drafts.get(id(view)) or draft_scope(view)
    draft.children = {}
    for child in view.children:
        assert child.owner is not None
        inner = _nest(child, drafts)
        draft.children.setdefault(view.position(child.owner.var), []).append(inner)
        draft.changed = draft.changed or inner.changed
    return draft


def find_regions(
    mod: tvm.IRModule, gvar: tvm.ir.GlobalVar, choose: Choose
) -> tuple[list[Region], list[Refusal]]:
    """Return the regions of one function, all scopes, that `choose` gives; and the refusals."""
    regions: list[Region] = []
    refusals: list[Refusal] = []
    for view in FunctionView(mod, gvar).scopes():
        for found in match_gemms(view):
            answer = choose(view, found) if isinstance(found, GemmMatch) else found
            (refusals if isinstance(answer, Refusal) else regions).append(answer)  # type: ignore[arg-type]
    return regions, refusals


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
        if copy_views:
            mod = prepare(mod, gvar)
        regions, refusals = find_regions(mod, gvar, choose)
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
    return partition(mod, _ours, run.record, run.options.copy_views)
