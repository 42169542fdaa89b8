"""Schedules for what is no kernel of this package's own, on llvm targets.

TVM's default leaves such functions as they were written: one thread, and a loop order that may
walk a matrix across. The rules here change the order of loops and hand them to threads; vectors are
left to LLVM, which finds them once the innermost loop runs along memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import s_tir, tirx

__all__ = ["CpuLoops", "cpu_rules"]

# Starting threads takes 1 to 3 microseconds, the time of about this many elements.
_PARALLEL_ELEMENTS = 16384
# Steps of a loop that was not several loops, for one thread at a time.
_CHUNK = 1024


def cpu_rules(target: tvm.target.Target) -> list[Any]:
    """Return the rules for an llvm target, in the order in which they are asked."""
    return [CpuLoops()]


def _extent(schedule: Any, loop: Any) -> int | None:
    extent = schedule.get(loop).extent
    return int(extent.value) if isinstance(extent, tirx.IntImm) else None


def _kinds(schedule: Any, block: Any) -> list[str] | None:
    """Return "spatial" or "reduce" for every loop around a block, outermost first.

    None when a loop is not one iteration variable of the block by itself.
    """
    loops = schedule.get_loops(block)
    iters = list(schedule.get(block).iter_vars)
    realize = _realize(schedule, block)
    if realize is None or len(loops) != len(iters):
        return None
    kinds: dict[Any, str] = {}
    for iter_var, value in zip(iters, realize.iter_values, strict=True):
        if not isinstance(value, tirx.Var):
            return None
        kind = {tirx.IterVar.DataPar: "spatial", tirx.IterVar.CommReduce: "reduce"}.get(
            int(iter_var.iter_type)
        )
        if kind is None:
            return None
        kinds[value] = kind
    try:
        return [kinds[schedule.get(loop).loop_var] for loop in loops]
    except KeyError:
        return None


def _realize(schedule: Any, block: Any) -> Any:
    loops = schedule.get_loops(block)
    body = schedule.get(loops[-1]).body if loops else None
    return body if type(body).__name__ == "SBlockRealize" else None


class CpuLoops:
    """Parallel outer loops, sums outside the innermost contiguous loop.

    Takes every function whose leaves are plain loops over their own axes; several leaves are
    scheduled one by one. Element-wise producers are computed where they are used when both run over
    the same elements.
    """

    def apply(
        self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool
    ) -> s_tir.Schedule | None:
        """Return the schedule, or None when the function has nothing to schedule."""
        if target.kind.name != "llvm":
            return None
        schedule = s_tir.Schedule(tvm.IRModule({"main": func}))
        root = schedule.get_sblock("root")
        blocks = list(schedule.get_child_blocks(root))
        if not blocks:
            return None
        blocks = self._inline(schedule, blocks)
        for block in blocks:
            self._schedule(schedule, block)
        return schedule

    def _inline(self, schedule: Any, blocks: Sequence[Any]) -> list[Any]:
        left = []
        for block in blocks:
            kinds = _kinds(schedule, block)
            consumers = schedule.get_consumers(block)
            if kinds and "reduce" not in kinds and len(consumers) == 1:
                mine = [schedule.get(x).extent for x in schedule.get_loops(block)]
                theirs = [schedule.get(x).extent for x in schedule.get_loops(consumers[0])]
                after = _kinds(schedule, consumers[0])
                if after and "reduce" not in after and _product_equal(mine, theirs):
                    try:
                        schedule.compute_inline(block)
                        continue
                    except Exception:  # what cannot be inlined is scheduled by itself
                        pass
            left.append(block)
        return left

    def _schedule(self, schedule: Any, block: Any) -> None:
        kinds = _kinds(schedule, block)
        if not kinds:
            return
        loops = list(schedule.get_loops(block))
        spatial = [x for x, kind in zip(loops, kinds, strict=True) if kind == "spatial"]
        reduce = [x for x, kind in zip(loops, kinds, strict=True) if kind == "reduce"]
        elements = 1
        for loop in loops:
            elements *= _extent(schedule, loop) or _PARALLEL_ELEMENTS
        if not spatial:
            return
        if reduce:
            inner = self._contiguous(schedule, block, spatial)
            outer = spatial[:-1] if inner else spatial
            schedule.reorder(*outer, *reduce, *([spatial[-1]] if inner else []))
            self._parallel(schedule, outer, elements)
            if schedule.get(block).init is not None:
                schedule.decompose_reduction(block, reduce[0])
            return
        if len(spatial) == 1:
            extent = _extent(schedule, spatial[0])
            if elements >= _PARALLEL_ELEMENTS and (extent is None or extent > _CHUNK):
                outer_loop, _ = schedule.split(spatial[0], [None, _CHUNK])
                schedule.parallel(outer_loop)
            return
        self._parallel(schedule, spatial[:-1], elements)

    @staticmethod
    def _parallel(schedule: Any, loops: Sequence[Any], elements: int) -> Any:
        if not loops or elements < _PARALLEL_ELEMENTS:
            return None
        fused = loops[0] if len(loops) == 1 else schedule.fuse(*loops)
        schedule.parallel(fused)
        return fused

    @staticmethod
    def _contiguous(schedule: Any, block: Any, spatial: Sequence[Any]) -> bool:
        """Tell whether the last spatial axis runs along memory in everything that it touches."""
        body = schedule.get(block)
        last = schedule.get(spatial[-1]).loop_var
        realize = _realize(schedule, block)
        variable = None
        for iter_var, value in zip(body.iter_vars, realize.iter_values, strict=True):
            if value.same_as(last):
                variable = iter_var.var
        extent = _extent(schedule, spatial[-1])
        if variable is None or (extent is not None and extent < 4):
            return False
        used = False
        for region in (*body.reads, *body.writes):
            for axis, dim in enumerate(region.region):
                if not _uses(dim.min, variable):
                    continue
                if axis != len(region.region) - 1 or not dim.min.same_as(variable):
                    return False
                used = True
        return used


def _uses(expr: Any, variable: Any) -> bool:
    from tvm.tirx.analysis import undefined_vars

    return any(v.same_as(variable) for v in undefined_vars(expr))


def _product_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    from tvm.sym import Analyzer

    left: Any = tirx.const(1, "int64")
    right: Any = tirx.const(1, "int64")
    for x in a:
        left = left * tirx.Cast("int64", x)
    for x in b:
        right = right * tirx.Cast("int64", x)
    return bool(Analyzer().can_prove_equal(left, right))
