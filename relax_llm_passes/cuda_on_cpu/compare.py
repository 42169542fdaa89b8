"""One module by several pipelines: launches, barriers and bytes side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .explain import explain_cuda, launch_table

__all__ = ["Compared", "compare_pipelines", "comparison_table"]


@dataclass(frozen=True)
class Compared:
    """What one pipeline's code for a module does.

    Attributes
    ----------
    module, pipeline : str
        Names for the table.
    totals : dict
        Of :func:`~relax_llm_passes.cuda_on_cpu.totals`; empty when it failed.
    equal : bool or None
        Whether the outputs are those expected; None when nobody said.
    failed : str
        Why there is no row, when there is none.
    kernels : str
        One line per kernel, as text.
    """

    module: str
    pipeline: str
    totals: dict[str, Any] = field(default_factory=dict)
    equal: bool | None = None
    failed: str = ""
    kernels: str = ""


def compare_pipelines(
    mod: Any,
    inputs: Sequence[Any],
    target: Any,
    pipelines: Mapping[str, Any],
    *,
    name: str = "",
    function: str = "main",
    check: Callable[[Sequence[Any]], bool] | None = None,
) -> list[Compared]:
    """Compile a module by each pipeline, execute it once on the CPU and count.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    inputs : sequence
        As for :func:`~relax_llm_passes.cuda_on_cpu.run_module`.
    target : tvm.target.Target
        A CUDA target.
    pipelines : mapping of str to pass
        What is compared. One that fails becomes a row with the reason.
    name, function : str
        Of the module, for the table, and of what is called.
    check : callable, optional
        Outputs to whether they are right.
    """
    import tvm

    from .harness import install

    install()
    rows = []
    for pipeline, passes in pipelines.items():
        try:
            executable = tvm.compile(mod, target, relax_pipeline=passes)
            found = explain_cuda(executable, inputs, target, function=function, checks=False)
        except Exception as e:
            text = (str(e).strip().splitlines() or [""])[-1]
            rows.append(Compared(name, pipeline, failed=f"{type(e).__name__}: {text[:160]}"))
            continue
        equal = check(found.result.outputs) if check else None
        kernels = launch_table(found.result.stats)
        rows.append(Compared(name, pipeline, found.totals, equal, kernels=kernels))
    return rows


_HEADER = ("graph", "pipeline", "launches", "barriers", "bytes", "requested", "lanes", "conflicts",
           "equal")  # fmt: skip


def _cells(row: Compared) -> tuple[str, ...]:
    if row.failed:
        return (row.module, row.pipeline, row.failed, *[""] * 6)
    t = row.totals
    sectors = 32 * (t["global_read_sectors"] + t["global_write_sectors"])
    return (
        row.module,
        row.pipeline,
        str(t["launches"]),
        str(t["barriers"]),
        f"{t['bytes_over_minimum']:.2f}",
        f"{sectors / t['least_bytes']:.2f}",
        f"{100 * t['lane_use']:.0f}",
        f"{t['conflicts']:.2f}",
        "-" if row.equal is None else "yes" if row.equal else "NO",
    )


def comparison_table(rows: Sequence[Compared], markdown: bool = False) -> str:
    """The rows as text.

    ``bytes`` is global memory that each launch touches, summed, over the minimum: inputs and
    outputs of the whole function, each once. ``requested`` counts what the warps ask of the caches,
    in sectors of 32 bytes, over the same minimum; ``lanes`` is the share of a warp's lanes that
    take part in its memory accesses, in percent; ``conflicts`` extra cycles per access to shared
    memory.
    """
    cells = [_HEADER, *(_cells(r) for r in rows)]
    if markdown:
        lines = ["| " + " | ".join(c) + " |" for c in cells]
        return "\n".join([lines[0], "| " + " | ".join("---" for _ in _HEADER) + " |", *lines[1:]])
    short = [c for c, r in zip(cells[1:], rows, strict=True) if not r.failed] + [_HEADER]
    widths = [max(len(c[i]) for c in (cells if i < 2 else short)) for i in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
