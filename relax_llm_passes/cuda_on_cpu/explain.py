"""What a compiled module does on a GPU, counted by executing it on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .checks import choose_checks
from .counters import LaunchStats, totals
from .harness import Choice, RunResult, run_module

__all__ = ["CudaExplanation", "explain_cuda", "launch_table"]

_HEADER = ("kernel", "n", "blocks", "threads", "barriers", "lanes", "balance", "read", "written",
           "over", "smem", "conflicts")  # fmt: skip


def _size(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 10000:
            return f"{n:.0f} {unit}"
        n /= 1000
    return f"{n:.0f} GB"


def launch_table(launches: Iterable[LaunchStats]) -> str:
    """One line per kernel and launch shape, equal ones added up.

    ``barriers`` is per block; ``lanes`` and ``balance`` in percent; ``over`` is bytes moved between
    warps and memory over bytes touched; ``conflicts`` is extra cycles per access to shared memory.
    """
    groups: dict[tuple[Any, ...], list[LaunchStats]] = {}
    for x in launches:
        groups.setdefault((x.kernel, x.grid, x.block), []).append(x)
    rows = [_HEADER]
    for group in groups.values():
        x = group[0]
        rows.append(
            (
                x.kernel,
                str(len(group)),
                str(x.blocks),
                str(x.threads),
                f"{x.barriers_per_block:.0f}",
                f"{100 * x.lane_use:.0f}",
                f"{100 * x.balance:.0f}",
                _size(sum(g.global_read_unique for g in group)),
                _size(sum(g.global_written_unique for g in group)),
                f"{x.bytes_over_minimum:.2f}",
                _size(x.static_shared + x.dynamic_shared),
                f"{x.bank_conflicts / x.shared_accesses:.2f}" if x.shared_accesses else "-",
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADER))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in
                  enumerate(zip(r, widths, strict=True)))
        for r in rows
    )  # fmt: skip


class CudaExplanation:
    """Counters of one run of a module, as text or JSON.

    Attributes
    ----------
    result : RunResult
        Outputs, findings and launches.
    totals : dict
        Sums over the launches, with ``bytes_over_minimum``: bytes that the launches touch over the
        bytes of the module's inputs and outputs.
    """

    def __init__(self, result: RunResult, least_bytes: int) -> None:
        self.result = result
        self.totals = totals(result.stats, least_bytes)

    def to_text(self) -> str:
        """The table, the totals, and what the checks found."""
        t = self.totals
        lines = [
            launch_table(self.result.stats),
            f"{t['launches']} launches, {t['barriers']} barriers, "
            f"{_size(t['global_read_unique'])} read and "
            f"{_size(t['global_written_unique'])} written: "
            f"{t['bytes_over_minimum']:.2f} times the inputs and outputs "
            f"({_size(t['least_bytes'])})",
        ]
        lines += [str(f) for f in self.result.report] or ["checks found nothing"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """``{"launches": [...], "totals": {...}, "findings": [...]}``."""
        return json.dumps(
            {
                "launches": [x.to_dict() for x in self.result.stats],
                "totals": self.totals,
                "findings": [vars(f) for f in self.result.report],
            },
            indent=1,
        )

    __str__ = to_text


def _bytes_of(values: Any) -> int:
    if isinstance(values, np.ndarray):
        return values.nbytes
    if isinstance(values, (list, tuple)):
        return sum(_bytes_of(v) for v in values)
    return 0


def explain_cuda(
    mod: Any,
    inputs: Sequence[Any],
    target: Any = None,
    *,
    function: str = "main",
    relax_pipeline: Any = None,
    checks: Choice = True,
) -> CudaExplanation:
    """Execute a module for CUDA once on the CPU and count what each launch costs.

    Parameters
    ----------
    mod : tvm.IRModule or compiled executable
        An executable must have been compiled in this process after ``install()``, or loaded from a
        library exported so.
    inputs : sequence
        As for :func:`~relax_llm_passes.cuda_on_cpu.run_module`.
    target, function, relax_pipeline
        As for :func:`~relax_llm_passes.cuda_on_cpu.run_module`.
    checks : bool, str or iterable of str
        As for :func:`~relax_llm_passes.cuda_on_cpu.run_module`; counters and bounds are there
        whatever it says.

    Returns
    -------
    CudaExplanation
        ``str()`` of it is a table.
    """
    result = run_module(
        mod,
        inputs,
        target,
        function=function,
        relax_pipeline=relax_pipeline,
        orders=1,
        strict=False,
        checks=choose_checks(checks) | {"counters", "bounds"},
    )
    return CudaExplanation(result, _bytes_of(list(inputs)) + _bytes_of(result.outputs))
