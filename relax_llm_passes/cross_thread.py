"""What TVM 0.27 lowers wrongly of reductions across threads, seen before it is lowered.

A reduction whose loop is bound to threads becomes shuffles, or, where the type has no shuffle, a
tree in shared memory. Two of its cases give wrong code on a GPU:

- the block has a bound on what is kept (`T.where`, rows that the threads do not divide): it is
  applied to the sum and dropped for the store, which writes beyond the result (a bound on what is
  summed is fine);
- types of less than 4 bytes but fp16: the tree's steps have no `__syncwarp` between them.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad
from tvm_ffi import WalkResult

__all__ = ["reads_dtype", "why_unsafe"]


def _walk(root: Any, kind: Any, visit: Any) -> None:
    def step(node: Any) -> Any:
        visit(node)
        return WalkResult.ADVANCE

    tvm_ffi.structural_walk(root, (kind, step), order="pre")


def _thread_loops(func: tirx.PrimFunc) -> set[Any]:
    found = set()

    def visit(loop: Any) -> None:
        binding = loop.thread_binding
        if binding is not None and str(binding.thread_tag).startswith("threadIdx"):
            found.add(loop.loop_var)

    _walk(func.body, tirx.For, visit)
    return found


def _variables(expr: Any) -> set[Any]:
    seen: list[Any] = []
    _walk(expr, tirx.Var, seen.append)
    return set(seen)


def reads_dtype(func: tirx.PrimFunc, dtype: str) -> bool:
    """Say whether a function reads a buffer of this dtype."""
    found: list[Any] = []
    _walk(func.body, TensorLoad, lambda load: found.append(str(load.source.dtype)))
    return dtype in found


def why_unsafe(func: tirx.PrimFunc) -> str | None:
    """Return why a scheduled function must not be lowered by TVM, or None.

    Only for CUDA: other code generators have no threads to reduce across.
    """
    threads = _thread_loops(func)
    reason: str | None = None

    def visit(node: Any) -> None:
        nonlocal reason
        if reason or node.block.init is None:
            return
        summed: set[Any] = set()
        kept: set[Any] = set()
        for v, value in zip(node.block.iter_vars, node.iter_values, strict=True):
            axis = summed if int(v.iter_type) == int(tirx.IterVar.CommReduce) else kept
            axis |= _variables(value)
        if not summed & threads:
            return
        if _variables(node.predicate) & kept:
            reason = "a reduction across threads with a bound, whose store TVM leaves unbounded"
        for write in node.block.writes:
            dtype = str(write.source.dtype)
            if tvm.DataType(dtype).bits < 32 and dtype != "float16":
                reason = f"a {dtype} reduction across threads, which TVM does not synchronise"

    _walk(func.body, s_tir.SBlockRealize, visit)
    return reason
