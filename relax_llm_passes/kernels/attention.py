"""Implementations of the composite kind "attention": which kernel takes it, and how it is called.

The composite's body is the program it stands for. It is read again here with the recogniser that
found it, so a kernel computes exactly what the body says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import renew_defs

from ..dataflow import FunctionView
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from ..shape_checks import caller_sizes
from ..targets import num_threads, vector_lanes
from .attention_decode_cpu import attention_decode_cpu
from .attention_decode_cuda import attention_decode_cuda, decode_lanes
from .attention_pieces import static_int
from .attention_plan import AttentionPlan
from .attention_prefill_cpu import attention_prefill_cpu
from .attention_prefill_cuda import attention_prefill_cuda
from .attention_prefill_mma import attention_prefill_mma
from .attention_tiles_mma import MAX_DEPTH, mma_dtype, supports_mma

__all__ = ["CpuAttention", "CudaAttention", "emit_plan", "match_of"]

_MAX_DECODE_ROWS = 16  # query rows times heads of a group that one streaming pass serves
_SPLIT_KEYS = 512  # fewer keys than this a part do not pay for combining


def match_of(composite: Composite) -> Any:
    """Return the AttentionMatch of a composite's body, or a Refusal."""
    from ..patterns.attention import AttentionMatch, find_attention

    func = composite.func
    name = "composite"
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    found = find_attention(FunctionView(mod, name), append=True)
    matches = [m for m in found if isinstance(m, AttentionMatch)]
    if len(matches) != 1:
        reasons = "; ".join(m.reason for m in found if isinstance(m, Refusal))
        return Refusal(reasons or f"{len(matches)} attentions in one composite", "attention")
    return matches[0]


def emit_plan(
    composite: Composite,
    match: Any,
    prim: Any,
    args: Sequence[Any],
    bb: relax.BlockBuilder,
    name: str,
) -> relax.Expr:
    """Emit the call of a plan's PrimFunc with the composite's arguments and result type."""
    params = list(composite.func.params)
    operands = []
    for leaf in match.leaves:
        index = next((i for i, p in enumerate(params) if p.same_as(leaf)), None)
        operands.append(leaf if index is None else args[index])
    gvar = bb.add_func(prim, name)
    wanted = [match.out, *match.caches]
    results = _results(composite.func)
    order = [next(i for i, w in enumerate(wanted) if w.same_as(r)) for r in results]
    types = _types_for_call(composite, args)
    by_plan = [types[order.index(i)] for i in range(len(wanted))]
    if match.plan.tir_vars:
        symbols = caller_sizes(composite.func.params, args)
        operands += [symbols.get(v, v) for v in match.plan.tir_vars]
    call = relax.call_tir(gvar, operands, by_plan if len(by_plan) > 1 else by_plan[0])
    if order == list(range(len(wanted))):
        return call
    whole = bb.emit(call)
    return relax.Tuple([relax.TupleGetItem(whole, i) for i in order])


def _results(func: relax.Function) -> list[Any]:
    """Return the variables that a composite returns, aliases looked through."""
    mod = tvm.IRModule({"f": func.with_attr("global_symbol", "f")})
    view = FunctionView(mod, "f")
    body = view.resolve(func.body.body)
    fields = view.fields(body)
    return [body] if fields is None else fields


def _types_for_call(composite: Composite, args: Sequence[Any]) -> list[Any]:
    from ..cloning import map_type

    ty = composite.result_ty
    fields = list(ty.fields) if isinstance(ty, tvm.ir.TupleType) else [ty]
    symbols = caller_sizes(composite.func.params, args)
    return [map_type(f, symbols) for f in fields]


class _Base:
    kind = "attention"

    def __init__(self) -> None:
        self._cache: dict[Any, list[tuple[Any, Any]]] = {}

    def _match(self, composite: Composite) -> Any:
        """Return the match, read once for each composite function."""
        key = int(tvm_ffi.structural_hash(composite.func))
        for func, match in self._cache.setdefault(key, []):
            if func.same_as(composite.func):
                return match
        match = match_of(composite)
        if len(self._cache) > 64:
            self._cache.clear()
        self._cache.setdefault(key, []).append((composite.func, match))
        return match


@register_implementation("attention")
class CpuAttention(_Base):
    """Streams the cache for a few query rows, tiles for many."""

    name = "cpu.attention"
    targets = ("llvm",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take every attention whose body reads as one plan."""
        match = self._match(composite)
        if isinstance(match, Refusal):
            return match
        plan = match.plan
        if plan.append_k is not None and not _few_rows(plan):
            return Refusal("an append with more than a few query rows", self.kind)
        return Accept("decode, streaming" if _few_rows(plan) else "tiles")

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir."""
        match = self._match(composite)
        plan: AttentionPlan = match.plan
        lanes = vector_lanes(target, "float32")
        if _few_rows(plan):
            prim = attention_decode_cpu(plan, lanes, splits=_splits(plan, target))
            name = "attention_decode"
        else:
            prim = attention_prefill_cpu(plan, lanes)
            name = "attention_prefill"
        return emit_plan(composite, match, renew_defs(prim), args, bb, name)


def _few_rows(plan: AttentionPlan, most: int = _MAX_DECODE_ROWS) -> bool:
    rows = static_int(plan.S)
    return rows is not None and rows * plan.group <= most and rows <= 8


def _splits(plan: AttentionPlan, target: tvm.target.Target) -> int:
    """Return into how many parts the keys go so that every thread has work."""
    threads = num_threads(target)
    heads = 1
    for _, extent in plan.batch:
        heads *= static_int(extent) or 1
    heads //= plan.group
    if heads >= 2 * threads:
        return 1
    keys = static_int(plan.T)
    parts = -(-2 * threads // max(heads, 1))
    return parts if keys is None else max(1, min(parts, keys // _SPLIT_KEYS))


_BLOCKS_TO_FILL = 128  # about the number of multiprocessors of an A100 or H100
_SPLIT_KEYS_CUDA = 128
_SHARED_BYTES = 47 * 1024


@register_implementation("attention")
class CudaAttention(_Base):
    """One launch for decode (two when the keys are split), one for prefill."""

    name = "cuda.attention"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take what fits registers and shared memory."""
        match = self._match(composite)
        if isinstance(match, Refusal):
            return match
        plan = match.plan
        if _cuda_decode_plan(plan) is not None:
            return Accept("decode")
        if plan.append_k is not None:
            return Refusal("an append with more query rows than one block serves", self.kind)
        if max(plan.D, plan.E) > 256:
            return Refusal(f"head dim {plan.D} (value {plan.E}) above 256", self.kind)
        return Accept(
            "tiles, tensor cores" if _on_tensor_cores(plan, target) else "tiles, float32 arithmetic"
        )

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir."""
        match = self._match(composite)
        plan: AttentionPlan = match.plan
        decode = _cuda_decode_plan(plan)
        if decode is not None:
            prim = attention_decode_cuda(decode, splits=_cuda_splits(decode))
            name = "attention_decode"
        elif _on_tensor_cores(plan, target):
            prim, name = attention_prefill_mma(plan), "attention_prefill"
        else:
            prim, name = attention_prefill_cuda(plan), "attention_prefill"
        # Not renewed, as on the CPU: `renew_defs` misses the sizes in thread extents. They are the
        # composite's own, and that function is gone after lowering.
        return emit_plan(composite, match, prim, args, bb, name)


_MAX_DECODE_ROWS_CUDA = 8


def _on_tensor_cores(plan: AttentionPlan, target: tvm.target.Target) -> bool:
    fits = max(plan.D, plan.E) <= MAX_DEPTH and plan.append_k is None
    return fits and mma_dtype(plan) is not None and supports_mma(target)


def _cuda_decode_plan(plan: AttentionPlan) -> AttentionPlan | None:
    """Return the plan for blocks that stream the keys, or None where there are too many rows.

    Heads that share keys are one block's, up to its rows. More of them are several blocks', which
    read the same keys at the same time; but a cache that goes out has to be written by one.
    """
    rows = static_int(plan.S)
    if rows is None or rows > _MAX_DECODE_ROWS_CUDA or _decode_shared(plan) > _SHARED_BYTES:
        return None
    most = _MAX_DECODE_ROWS_CUDA // rows
    group = max(g for g in range(1, most + 1) if plan.group % g == 0)
    if group == plan.group:
        return plan
    return None if plan.append_k is not None else replace(plan, group=group)


def _decode_shared(plan: AttentionPlan) -> int:
    lanes, _ = decode_lanes(plan.D, 32)
    return 128 // lanes * (plan.E + 2) * 4


def _cuda_splits(plan: AttentionPlan) -> int:
    """Return how many blocks share the keys of one group of heads."""
    blocks = 1
    for _, extent in plan.batch:
        blocks *= static_int(extent) or 1
    blocks = max(1, blocks // plan.group)
    parts = -(-_BLOCKS_TO_FILL // blocks)
    keys = static_int(plan.T)
    if keys is not None:
        parts = min(parts, keys // _SPLIT_KEYS_CUDA)
    return max(1, parts)
