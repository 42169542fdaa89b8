"""ScheduleKernels: gives every PrimFunc that has no schedule yet the first rule that takes it.

The order per target is decided here: this package's rules first, then TVM's dlight rules that are
safe on this target. A rule that raises is a rule that declines: the next one is asked, and the
report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from .cloning import with_functions
from .cross_thread import reads_dtype, why_unsafe
from .environment import ffi_problem
from .errors import InputError
from .registry import PassRun, register_pass

__all__ = ["ScheduleKernels", "schedule_rules"]


def _own_rules(target: tvm.target.Target) -> list[Any]:
    from .kernels.norm_rules import norm_rules

    rules: list[Any] = norm_rules(target)
    if target.kind.name == "llvm":
        from .kernels.cpu_schedule import cpu_rules

        rules += cpu_rules(target)
    return rules


def _matmul_rule() -> Any:
    """dlight's rule, without its tensor-core form for int8, which TVM 0.27 cannot lower."""
    from tvm.s_tir import dlight as dl

    class Matmul(dl.gpu.Matmul):
        def apply(self, func: Any, target: tvm.target.Target, tunable: bool) -> Any:
            if reads_dtype(func, "int8"):
                # Before sm_70 the rule writes a tiled loop.
                target = tvm.target.Target({"kind": "cuda", "arch": "sm_61"})
            return super().apply(func, target, tunable)

    return Matmul()


def _dlight_rules(target: tvm.target.Target) -> list[Any]:
    from tvm.s_tir import dlight as dl

    if target.kind.name != "cuda":
        return []
    # With the tvm-ffi versions that crash in tensor-core scheduling, products that would reach it
    # are left to GEMV and the fallback: slow and right.
    matmul = [] if ffi_problem() else [_matmul_rule()]
    return [
        *matmul,
        dl.gpu.GEMV(),
        dl.gpu.Reduction(),
        dl.gpu.GeneralReduction(),
        dl.gpu.Fallback(),
    ]


def schedule_rules(target: tvm.target.Target) -> list[Any]:
    """Return the schedule rules for `target` in the order in which they are asked."""
    return [*_own_rules(target), *_dlight_rules(target)]


def is_scheduled(func: tirx.PrimFunc) -> bool:
    """Say whether a PrimFunc is marked as scheduled."""
    return bool(func.attrs) and bool(func.attrs.get("tirx.is_scheduled", False))


def _apply(rule: Any, func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc | None:
    space = rule.apply(func, target, False)
    if space is None:
        return None
    schedule = space[0] if isinstance(space, (list, tuple)) else space
    return schedule.mod["main"]


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of ScheduleKernels.

    Attributes
    ----------
    avoid : tuple[str, ...]
        Class names of rules that are not asked (`Matmul+GEMV`).
    """

    avoid: tuple[str, ...] = ()


@register_pass("ScheduleKernels", stage="schedule", options=ScheduleOptions)
def ScheduleKernels(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Schedule every PrimFunc that is not scheduled yet with the first rule that takes it."""
    target = run.target
    if target is None:
        raise InputError(
            "ScheduleKernels needs a target: run it inside `with target:` or in default_pipeline"
        )
    rules: Sequence[Any] = [
        r for r in schedule_rules(target) if type(r).__name__ not in run.options.avoid
    ]
    updated = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or is_scheduled(func):
            continue
        with target:
            for rule in rules:
                name = type(rule).__name__
                try:
                    new = _apply(rule, func, target)
                except Exception as error:
                    run.record.refuse(_reason(name, error), "schedule", gvar.name_hint)
                    continue
                unsafe = why_unsafe(new) if new is not None and target.kind.name == "cuda" else None
                if unsafe:
                    run.record.refuse(f"{name}: {unsafe}", "schedule", gvar.name_hint)
                    continue
                if new is not None:
                    updated[gvar] = new.with_attr("tirx.is_scheduled", True)
                    run.record.match(name, 1, gvar.name_hint)
                    break
    if not updated:
        return mod
    result = with_functions(mod, mod.functions)
    for gvar, func in updated.items():
        result.update_func(gvar, func)
    return result


def _reason(rule: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{rule} failed: {type(error).__name__}: {lines[-1] if lines else ''}"[:200]
