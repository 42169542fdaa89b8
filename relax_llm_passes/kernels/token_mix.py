"""Blends of neighbouring tokens as one kernel: the implementation of the "token_mix" composite.

One pass over the channels of every token: x, the token before it and every m are read once, and all
blends are written. The arithmetic is in float32, each output is rounded once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from ..targets import num_threads, vector_lanes
from .flat_kernel import check_sizes, flat_kernel, tensor_of
from .group_norm import result_type
from .norm_cpu import PARALLEL_ELEMENTS, TASKS_PER_THREAD, split_loop
from .norm_math import functions_for
from .norm_program import Tensor, unravel
from .operand import evaluate

__all__ = ["TokenMix", "emit_token_mix"]

THREADS = 128


def _tensors(composite: Composite) -> list[Tensor]:
    """Return the kernel's parameters: the roles, then the outputs."""
    inputs = [tensor_of(r, composite.ty(r)) for r in composite.roles]
    result = composite.result_ty
    fields = list(result.fields) if len(composite.outputs) > 1 else [result]
    outputs = [tensor_of(n, f) for n, f in zip(composite.outputs, fields, strict=True)]
    check_sizes(inputs, outputs)
    return [*inputs, *outputs]


def emit_token_mix(
    tensors: Sequence[Tensor], trees: Sequence[Any], target: tvm.target.Target
) -> tirx.PrimFunc:
    """Return the scheduled PrimFunc.

    Parameters
    ----------
    tensors : sequence of Tensor
        Parameters: those that the trees load, then one output of shape (..., C) for each tree.
    trees : sequence
        See `operand`; the symbols are l0, l1, ... and n.
    target : Target
        Of kind "cuda" or "llvm".
    """
    functions = functions_for(target)
    names = [t.name for t in tensors]
    outputs = list(range(len(tensors) - len(trees), len(tensors)))
    shape = tensors[-1].shape
    channels, lead = shape[-1], list(shape[:-1])
    rows: Any = 1
    for d in lead:
        rows = rows * d

    def body(flat: list[Any]) -> None:
        def read(role: str, index: Any) -> Any:
            i = names.index(role)
            x = flat[i][index]
            return x if tensors[i].dtype == "float32" else tirx.Cast("float32", x)

        def elements(row: Any, start: Any, width: int) -> None:
            """Emit `width` neighbouring channels of every output."""
            axes = {f"l{i}": v for i, v in enumerate(unravel(row, lead))}
            # What every output needs and no compiler sees to be the same: a choice between loads.
            shifted: dict[str, Any] = {}
            for tree in (s for t in trees for s in _shifts(t)):
                key = json.dumps(tree)
                if key not in shifted:
                    buf = T.alloc_buffer((width,), "float32", scope="local")
                    with _lanes(width) as v:
                        x = evaluate(tree, axes | {"n": start + v}, read, functions)
                        T.buffer_store(buf, x, [v])
                    shifted[key] = buf
            for out, tree in zip(outputs, trees, strict=True):
                with _lanes(width) as v:
                    known = {k: buf[v] for k, buf in shifted.items()}
                    symbols = axes | {"n": start + v}
                    value = evaluate(_named(tree), symbols, _named_read(known, read), functions)
                    value = tirx.Cast(tensors[out].dtype, value)
                    T.buffer_store(flat[out], value, [row * channels + start + v])

        if target.kind.name == "cuda":
            _on_threads(rows * channels, channels, elements)
        else:
            _on_cpu(rows, channels, elements, target)

    return flat_kernel("token_mix", tensors, body)


def _lanes(width: int) -> Any:
    return T.vectorized(width) if width > 1 else nullcontext(0)


def _shifts(tree: Any) -> list[Any]:
    """Return the outermost choices between a first and later tokens in a tree."""
    if str(tree.get("op", "")).startswith("shift:"):
        return [tree]
    return [s for a in tree.get("args", ()) for s in _shifts(a)]


def _named(tree: Any) -> Any:
    """Replace the choices of a tree by loads named after them."""
    if str(tree.get("op", "")).startswith("shift:"):
        return {"load": json.dumps(tree), "at": {}}
    if "args" in tree:
        return {**tree, "args": [_named(a) for a in tree["args"]]}
    return tree


def _named_read(known: Mapping[str, Any], read: Callable[[str, Any], Any]) -> Callable[..., Any]:
    return lambda role, index: known[role] if role in known else read(role, index)


def _on_threads(total: Any, channels: int, elements: Any) -> None:
    """One thread an element: neighbours read neighbours."""
    if isinstance(total, int):
        blocks: Any = -(-total // THREADS)
    else:
        blocks = tirx.floordiv(total + (THREADS - 1), THREADS)
    with (
        T.launch_thread("blockIdx.x", blocks) as bx,
        T.launch_thread("threadIdx.x", THREADS) as tx,
    ):
        at = bx * THREADS + tx

        def run() -> None:
            elements(tirx.floordiv(at, channels), tirx.floormod(at, channels), 1)

        if isinstance(total, int) and total % THREADS == 0:
            run()
        else:
            with T.If(at < total), T.Then():
                run()


def _on_cpu(rows: Any, channels: int, elements: Any, target: tvm.target.Target) -> None:
    """Rows to the threads, channels in vectors."""
    lanes = vector_lanes(target, "float32")
    many = not isinstance(rows, int) or rows * channels >= PARALLEL_ELEMENTS
    with split_loop(rows, TASKS_PER_THREAD * num_threads(target) if many else 1) as row:
        if channels >= lanes > 1:
            with T.serial(channels // lanes) as i:
                elements(row, i * lanes, lanes)
        done = channels - channels % lanes if channels >= lanes > 1 else 0
        if done < channels:
            with T.serial(channels - done) as i:
                elements(row, done + i, 1)


@register_implementation("token_mix", priority=10)
class TokenMix:
    """All blends of one x in one kernel."""

    name = "token_mix.fused"
    kind = "token_mix"
    targets = ("cuda", "llvm")

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take float tensors whose sizes follow from the operands'."""
        try:
            _tensors(composite)
        except InputError as error:
            return Refusal(str(error), composite.kind)
        return Accept()

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir."""
        func = emit_token_mix(_tensors(composite), composite.attrs["outputs"], target)
        gvar = bb.add_func(func, "token_mix")
        operands = [args[composite.roles[role]] for role in composite.roles]
        result = result_type(composite, args)
        many = len(composite.outputs) > 1
        return relax.call_tir(gvar, operands, list(result.fields) if many else result)
