"""Several products of one row in one CUDA kernel: blocks side by side, weights as they are.

Each product has blocks of its own. Where one is an operand of another's epilogue (the gate of a
gated feed-forward layer) the same blocks do both, one after the other: the thread that stored an
element of the first is the one that reads it for the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from .cuda_gemv import emit_product, geometry_of, shared_buffer, tensors_of
from .cuda_matmul import MmaSpec
from .limits import KernelLimits

__all__ = ["LIMITS", "Member", "joined_kernel"]

LIMITS = KernelLimits(registers=128, static_smem=8192)


class Member:
    """One product of a joined kernel.

    Parameters
    ----------
    spec : MmaSpec
        What it computes; all members have the same number of threads.
    reads : mapping
        Epilogue operands (by name) that are the results of earlier members: their numbers.
    """

    def __init__(self, spec: MmaSpec, reads: dict[str, int] | None = None) -> None:
        self.spec = spec
        self.reads = dict(reads or {})

    def inputs(self) -> list[tuple[str, tuple[Any, ...], str]]:
        """Return (name, shape, dtype) of the parameters, without results of other members."""
        return [t for t in tensors_of(self.spec)[:-1] if t[0] not in self.reads]


def chains(members: Sequence[Member]) -> list[list[int]]:
    """Return which members share blocks: each with what it reads before it."""
    found: list[list[int]] = []
    for number, member in enumerate(members):
        if not member.reads:
            found.append([number])
            continue
        (chain,) = [c for c in found if any(i in c for i in member.reads.values())]
        chain.append(number)
    return found


def joined_kernel(members: Sequence[Member]) -> tirx.PrimFunc:
    """Return the kernel.

    Parameters
    ----------
    members : sequence of Member
        In an order in which each comes after those that it reads, which are of its geometry.

    Returns
    -------
    PrimFunc
        Scheduled. Parameters: the inputs of each member (see `gemv_kernel`), then the results.
    """
    name = "gemv_join_" + "_".join(f"{m.spec.n}x{m.spec.k}" for m in members)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            buffers: list[dict[str, Any]] = []

            def parameter(number: int, tensor: tuple[str, tuple[Any, ...], str]) -> None:
                role, shape, dtype = tensor
                handle = T.arg(f"p{number}_{role}", T.handle())
                dims = [tirx.const(d, "int64") for d in shape]
                buffers[number][role] = (T.match_buffer(handle, dims, dtype), shape, dtype)

            for number, member in enumerate(members):
                buffers.append({})
                for tensor in member.inputs():
                    parameter(number, tensor)
            for number, member in enumerate(members):
                parameter(number, tensors_of(member.spec)[-1])
            with T.sblock("root"):
                T.reads()
                T.writes()
                flats: list[dict[str, Any]] = []
                for number, member in enumerate(members):
                    flat = {
                        role: T.decl_buffer((math.prod(shape),), dtype, data=buffer.data)
                        for role, (buffer, shape, dtype) in buffers[number].items()
                    }
                    for role, source in member.reads.items():
                        flat[role] = flats[source]["out"]
                    flats.append(flat)
                order = chains(members)
                plans = [geometry_of(m.spec) for m in members]
                sizes = [plans[c[0]].blocks(members[c[0]].spec.n) for c in order]
                with (
                    T.launch_thread("blockIdx.x", sum(sizes)) as bx,
                    T.launch_thread("threadIdx.x", plans[0].threads) as tx,
                ):
                    shared = shared_buffer(max(p.shared for p in plans))
                    _choose(members, flats, order, sizes, bx, tx, shared)
    return builder.get()


def _choose(
    members: Sequence[Member],
    flats: list[dict[str, Any]],
    order: list[list[int]],
    sizes: list[int],
    bx: Any,
    tx: Any,
    shared: Any,
) -> None:
    """Emit the first chain for its blocks, the rest for the others."""

    def run(block: Any) -> None:
        for place, number in enumerate(order[0]):
            if place and shared is not None:  # the sums of the product before are still read
                T.evaluate(T.tvm_storage_sync("shared"))
            emit_product(members[number].spec, flats[number], block, tx, shared)

    if len(order) == 1:
        run(bx)
        return
    with T.If(bx < sizes[0]):
        with T.Then():
            run(bx)
        with T.Else():
            _choose(members, flats, order[1:], sizes[1:], bx - sizes[0], tx, shared)
