"""Split, rotary and cache append in one kernel: CPU and CUDA, and their implementations.

Each output element is an expression over its index (see `patterns/split_qkv.py`); sines and
cosines come from the graph's own float32 tables, so positions of any size are as exact as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.s_tir import renew_defs
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..dataflow import FunctionView
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from .attention import emit_plan
from .limits import KernelLimits
from .scalar_expr import bound_analyzer, dtype_of, i64, substitute

__all__ = ["LIMITS", "CpuSplitRotary", "CudaSplitRotary", "elements_cpu", "elements_cuda"]

# What ptxas may say that it needs; tests/cuda/test_limits.py holds it to that.
LIMITS = KernelLimits(registers=40, static_smem=0, resident_threads=1536)

_THREADS = 256


def _begin(match: Any, name: str) -> None:
    T.func_name(name)
    T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": 1, "global_symbol": name})
    for buffer in match.inputs:
        T.arg(buffer.name, buffer)
    for var in match.tir_vars:
        T.arg(var.name, var)
    for element in match.elements:
        T.arg(element.buffer.name, element.buffer)


def _product(shape: Sequence[Any]) -> Any:
    size: Any = i64(1)
    for dim in shape:
        size = size * dim
    return bound_analyzer({}).simplify(size)


def _store(element: Any, index: list[Any]) -> None:
    values = dict(zip(element.index, index, strict=True))
    value = substitute(element.value, values)
    dtype = str(element.buffer.dtype)
    T.buffer_store(
        element.buffer, value if dtype_of(value) == dtype else tirx.Cast(dtype, value), index
    )


def _unravel(flat: Any, shape: Sequence[Any]) -> list[Any]:
    index = []
    for dim in reversed(list(shape)):
        index.append(tirx.floormod(flat, dim))
        flat = tirx.floordiv(flat, dim)
    return [bound_analyzer({}).simplify(i) for i in reversed(index)]


def elements_cpu(match: Any, name: str = "split_rotary") -> Any:
    """Return a PrimFunc that writes every output, parallel over all axes but the last."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        _begin(match, name)
        with T.sblock(name):
            T.reads()
            T.writes()
            for element in match.elements:
                shape = list(element.buffer.shape)
                with T.parallel(_product(shape[:-1])) as flat:
                    lead = [T.bind(i) for i in _unravel(flat, shape[:-1])]
                    with T.serial(shape[-1]) as last:
                        _store(element, [*lead, last])
    return builder.get()


def elements_cuda(match: Any, name: str = "split_rotary") -> Any:
    """Return a PrimFunc with one launch: a thread for each element of each output."""
    sizes = [_product(e.buffer.shape) for e in match.elements]
    total: Any = i64(0)
    for size in sizes:
        total = total + size
    blocks = bound_analyzer({}).simplify(tirx.floordiv(total + i64(_THREADS - 1), i64(_THREADS)))
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        _begin(match, name)
        with T.sblock(name):
            T.reads()
            T.writes()
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", i64(_THREADS)) as thread,
            ):
                flat = T.bind(block * i64(_THREADS) + thread)
                start: Any = i64(0)
                for element, size in zip(match.elements, sizes, strict=True):
                    mine = tirx.And(flat >= start, flat < start + size)
                    with T.If(mine), T.Then():
                        _store(element, _unravel(flat - start, list(element.buffer.shape)))
                    start = start + size
    return builder.get()


class _SplitRotary:
    kind = "split_rotary"

    def _match(self, composite: Composite) -> Any:
        from ..patterns.split_qkv import SplitRotaryMatch, find_split_rotary

        func = composite.func.with_attr("global_symbol", "composite")
        view = FunctionView(tvm.IRModule({"composite": func}), "composite")
        found = find_split_rotary(view, together=True)
        matches = [m for m in found if isinstance(m, SplitRotaryMatch)]
        if len(matches) != 1:
            return Refusal(f"{len(matches)} groups of rotaries in one composite", self.kind)
        if len(matches[0].outputs) != len(composite.outputs):
            return Refusal("the composite returns more than its rotaries", self.kind)
        return matches[0]

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take every composite whose body reads as one group."""
        match = self._match(composite)
        return match if isinstance(match, Refusal) else Accept(f"{len(match.outputs)} outputs")

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir."""
        match = self._match(composite)
        prim = self._kernel(match)
        if target.kind.name == "llvm":  # it misses the sizes in a CUDA kernel's thread extents
            prim = renew_defs(prim)
        as_plan = SimpleNamespace(
            leaves=match.leaves,
            out=match.outputs[0],
            caches=match.outputs[1:],
            plan=SimpleNamespace(tir_vars=match.tir_vars),
        )
        return emit_plan(composite, as_plan, prim, args, bb, "split_rotary")

    def _kernel(self, match: Any) -> Any:
        raise NotImplementedError


@register_implementation("split_rotary")
class CpuSplitRotary(_SplitRotary):
    """Parallel loops over every output."""

    name = "cpu.split_rotary"
    targets = ("llvm",)

    def _kernel(self, match: Any) -> Any:
        return elements_cpu(match)


@register_implementation("split_rotary")
class CudaSplitRotary(_SplitRotary):
    """One launch, a thread for each element."""

    name = "cuda.split_rotary"
    targets = ("cuda",)

    def _kernel(self, match: Any) -> Any:
        return elements_cuda(match)
