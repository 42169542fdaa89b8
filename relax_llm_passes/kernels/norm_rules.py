"""Schedule rules for norms, softmax and reductions, usable alone through dlight.

    mod = dl.ApplyDefaultSchedule(*norm_rules(target))(mod)

The rule reads the PrimFunc's meaning (see `reduction`) and writes it again in this package's
layout. It declines, with None, whatever it cannot read in full.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx

from .norm import build, too_large
from .norm_math import functions_for
from .reduction import Unreadable, read_program

__all__ = ["RowReduction", "norm_rules", "rebuild"]


def rebuild(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return `func` laid out as a row program, with its attributes.

    Raises
    ------
    Unreadable
        When it is none; says why.
    """
    program = read_program(func, functions_for(target))
    if too_large([t.shape for t in program.tensors]):
        raise Unreadable("a tensor is empty or beyond 2**31 elements")
    new = build(program, target)
    for key, value in (func.attrs or {}).items():
        if key not in ("tirx.noalias", "s_tir"):
            new = new.with_attr(key, value)
    return new.with_attr("tirx.is_scheduled", True)


class RowReduction(s_tir.dlight.ScheduleRule):
    """Norms, softmax and reductions with what was fused into them, for CUDA and the CPU."""

    def apply(
        self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool
    ) -> s_tir.Schedule | None:
        """Return the schedule of the rewritten function, or None when the rule does not apply."""
        if not isinstance(func, tirx.PrimFunc) or target.kind.name not in ("cuda", "llvm"):
            return None
        try:
            new = rebuild(func, target)
        except Unreadable:
            return None
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, tvm.error.TVMError):
            # Some form of expression nobody thought of: a rule may decline, never fail.
            return None
        return s_tir.Schedule(tvm.IRModule({"main": new}))


def norm_rules(target: tvm.target.Target) -> list[Any]:
    """Return the schedule rules of this module for `target` (none for other kinds of target)."""
    return [RowReduction()] if target.kind.name in ("cuda", "llvm") else []
