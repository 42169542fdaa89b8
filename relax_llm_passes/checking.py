"""The logic of `relax-llm-passes check`: compile, run, compare, and the same for TVM's default.

Everything that compiles or runs happens in worker processes, because TVM's own pipelines end the
process on some graphs. The functions below are what the workers call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .isolated import Outcome, Worker

__all__ = ["Case", "Outcome", "Settings", "check_cases", "corpus_cases", "file_cases", "summary"]

# Largest difference over the largest magnitude when a file is compared with TVM's plain lowering
# of the same program: both round, and sum in another order, at every operator.
_FILE_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


@dataclass(frozen=True)
class Case:
    """One graph to check: a graph of the corpus, or a function of a file."""

    name: str
    corpus: str | None = None
    file: str | None = None
    function: str = "main"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that workers take."""
        return {
            "name": self.name,
            "corpus": self.corpus,
            "file": self.file,
            "function": self.function,
        }


@dataclass(frozen=True)
class Settings:
    """How cases are checked.

    Attributes
    ----------
    target : str
        As on the command line.
    verify : bool
        Check every kernel while compiling.
    upstream : bool
        State the status and number of launches of TVM's default pipeline too.
    fresh_upstream : bool
        Compile with it now, also where an earlier run's result is kept.
    jobs : int
        Worker processes.
    timeout : float
        Seconds for one compilation (and run).
    """

    target: str = "native"
    verify: bool = False
    upstream: bool = True
    fresh_upstream: bool = False
    jobs: int = 1
    timeout: float = 600.0
    passes: str = "default"
    disabled: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    seed: int = 0


def corpus_cases(directory: str | None, only: str | None = None) -> list[Case]:
    """Return the graphs of a corpus folder whose names contain (or match) `only`."""
    import fnmatch

    from . import corpus

    folder = str(corpus.default_dir() if directory is None else Path(directory))
    names = corpus.list_graphs(folder)
    if not names:
        raise InputError(f"no graphs in {folder}")
    if only:
        wanted = [n for n in names if only in n or fnmatch.fnmatch(n, only)]
        if not wanted:
            raise InputError(f"no graph of {folder} matches {only!r}; there are {', '.join(names)}")
        names = wanted
    return [Case(n, corpus=folder) for n in names]


def file_cases(path: str) -> list[Case]:
    """Return one case per public function of a file."""
    from .module_io import public_functions, read_module

    mod = read_module(path).mod
    stem = Path(path).name
    names = list(public_functions(mod))
    return [
        Case(stem if len(names) == 1 else f"{stem}:{n}", file=str(path), function=n) for n in names
    ]


# --- what runs in the workers ----------------------------------------------------------------


def _load(case: dict[str, Any]) -> tuple[Any, str, Any]:
    """Return a case's module, its function's name, and its graph (None for a file)."""
    if case["corpus"] is not None:
        from . import corpus

        graph = corpus.load(case["name"], case["corpus"])
        return graph.mod, graph.function, graph
    from .module_io import read_module

    return read_module(case["file"]).mod, case["function"], None


def _launches(launches: dict[str, int], function: str) -> int | None:
    return launches.get(function)


def compile_upstream(target: str, **case: Any) -> dict[str, Any]:
    """Compile with TVM's default pipeline for the target; return its number of launches."""
    import tvm
    from tvm import relax

    from .launches import LaunchCounter
    from .targets import parse_target, split_libraries

    mod, function, _graph = _load(case)
    tvm_target = parse_target(split_libraries(target)[1])
    with tvm_target:
        pipeline = relax.get_default_pipeline(tvm_target)
    counter = LaunchCounter(tvm_target)
    with tvm.transform.PassContext(instruments=[counter]):
        tvm.compile(mod, tvm_target, relax_pipeline=pipeline)
    return {"launches": _launches(counter.launches, function)}


def check_one(
    target: str,
    verify: bool,
    passes: str,
    disabled: list[str],
    sizes: dict[str, int],
    seed: int,
    **case: Any,
) -> dict[str, Any]:
    """Compile a case with this package, run it where the target can run, and compare."""
    import tvm

    from . import default_pipeline
    from .launches import LaunchCounter

    mod, function, graph = _load(case)
    pipeline: Any = default_pipeline(target, passes=passes, disabled=disabled, verify=verify)
    counter = LaunchCounter(pipeline.target)
    with tvm.transform.PassContext(instruments=[counter]):
        executable = tvm.compile(mod, pipeline.target, relax_pipeline=pipeline)
    result: dict[str, Any] = {
        "launches": _launches(counter.launches, function),
        "passes": _pass_counts(pipeline.report),
        "matched": _kinds(pipeline.report),
        "notes": [f"{p.name}: {n}" for p in pipeline.report.passes for n in p.notes],
    }
    device = _device(pipeline.target)
    if device is None:
        return {**result, "status": "compiled", "max_rel_err": None, "tol": None}
    if graph is not None:
        outputs = _run(executable, device, function, graph.inputs(seed, **sizes))
        want = None
        if seed or sizes:
            want = _reference(mod, function, graph.inputs(seed, **sizes))
        found = graph.compare(outputs, want)
        error, tolerance, worst = found.max_rel_err, found.tol, found.worst
    else:
        error, tolerance, worst = _compare_file(mod, executable, device, function, sizes, seed)
    good = error <= tolerance
    return {
        **result,
        "status": "passed" if good else "failed",
        "max_rel_err": error if math.isfinite(error) else None,
        "tol": tolerance,
        "message": "" if good else f"{worst} differs by {error:.3g}, allowed {tolerance:g}",
    }


def _pass_counts(report: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for record in report.passes:
        entry = counts.setdefault(record.name, {"matched": 0, "refused": 0})
        entry["matched"] += sum(record.matched.values())
        entry["refused"] += len(record.refusals)
    return counts


def _kinds(report: Any) -> dict[str, int]:
    """Return what the fusing passes found, by kind: the attention layers, rotaries, products."""
    found: dict[str, int] = {}
    for record in report.passes:
        if record.fuses:
            for kind, count in record.matched.items():
                found[kind] = found.get(kind, 0) + count
    return found


def _device(target: Any) -> Any:
    """Return the device that can run the target's code here, or None."""
    import tvm

    if target.kind.name == "cuda":
        return tvm.cuda(0) if tvm.cuda(0).exist else None
    return tvm.cpu()


def _run(executable: Any, device: Any, function: str, arguments: Sequence[Any]) -> list[np.ndarray]:
    from tvm import relax

    from .sampling import to_device, to_numpy

    machine = relax.VirtualMachine(executable, device)
    return to_numpy(machine[function](*to_device(arguments, device)))


def _reference(mod: Any, function: str, arguments: Sequence[Any]) -> list[np.ndarray]:
    """Run the program as TVM lowers it with no optimisation, on the CPU."""
    import tvm

    target = tvm.target.Target({"kind": "llvm"})
    return _run(
        tvm.compile(mod, target, relax_pipeline="default_build"), tvm.cpu(), function, arguments
    )


def _compare_file(
    mod: Any, executable: Any, device: Any, function: str, sizes: dict[str, int], seed: int
) -> tuple[float, float, str]:
    from .sampling import random_arguments, sample_sizes
    from .verify import difference

    func = mod[function]
    chosen = {**sample_sizes(func), **sizes}
    arguments = random_arguments(func, chosen, seed)
    want = _reference(mod, function, arguments)
    found = _run(executable, device, function, arguments)
    if len(found) != len(want):
        return math.inf, 0.0, f"{len(found)} outputs, expected {len(want)}; output 0"
    worst, tolerance, where = 0.0, 0.0, "output 0"
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        allowed = _FILE_TOLERANCE.get(str(b.dtype), 0.0)
        error = difference(a, b)
        tolerance = max(tolerance, allowed)
        if error > worst:
            worst, where = error, f"output {i}"
        if not error <= allowed:
            return error, allowed, f"output {i}"
    return worst, tolerance, where


# --- the parent ------------------------------------------------------------------------------


def _check_case(worker: Worker, case: Case, settings: Settings) -> dict[str, Any]:
    common = {"target": settings.target, **case.arguments()}
    ours = worker.call(
        "relax_llm_passes.checking:check_one",
        {
            **common,
            "verify": settings.verify,
            "passes": settings.passes,
            "disabled": list(settings.disabled),
            "sizes": settings.sizes,
            "seed": settings.seed,
        },
        settings.timeout,
    )
    entry: dict[str, Any] = {
        "graph": case.name,
        "target": settings.target,
        "status": "failed",
        "max_rel_err": None,
        "tol": None,
        "launches_upstream": None,
        "launches": None,
        "passes": {},
        "upstream_status": "not run",
    }
    if ours.ok:
        entry.update(ours.result)
    else:
        entry["status"] = ours.status
        entry["message"] = ours.message
    if settings.upstream:
        entry.update(_upstream(worker, case, settings, common))
    return entry


def _upstream(
    worker: Worker, case: Case, settings: Settings, common: dict[str, Any]
) -> dict[str, Any]:
    """Return what TVM's default pipeline makes of a case, from an earlier run where one is kept."""
    from . import upstream_results
    from .targets import parse_target, split_libraries

    kind = parse_target(split_libraries(settings.target)[1]).kind.name
    place = (case.name, case.corpus or "", kind)
    if case.corpus is not None and not settings.fresh_upstream:
        found = upstream_results.kept(*place)
        if found is not None:
            return {"upstream_status": found["status"], "launches_upstream": found["launches"]}
    answer = worker.call("relax_llm_passes.checking:compile_upstream", common, settings.timeout)
    launches = answer.result["launches"] if answer.ok else None
    if case.corpus is not None:
        upstream_results.keep(*place, str(answer), launches)
    return {"upstream_status": str(answer), "launches_upstream": launches}


def passed(entry: dict[str, Any]) -> bool:
    """Say whether a result is good: compared and equal, or compiled where that is all."""
    return entry["status"] in ("passed", "compiled")


def check_cases(
    cases: Sequence[Case],
    settings: Settings,
    progress: Callable[[Case], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Check every case in worker processes; yield one result per case, in the order of `cases`.

    Results have graph, target, status ("passed", "compiled", "failed", "crashed", "timeout"),
    max_rel_err, tol, launches_upstream, launches, passes, upstream_status, matched (kinds and their
    number) and, where something is wrong, message.
    """
    jobs = max(1, min(settings.jobs, len(cases)))
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(jobs)]
        free: list[Worker] = list(workers)

        def one(case: Case) -> dict[str, Any]:
            worker = free.pop()
            try:
                if progress:
                    progress(case)
                return _check_case(worker, case, settings)
            finally:
                free.append(worker)

        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        try:
            yield from pool.map(one, cases)
        except BaseException:  # Ctrl-C: waiting calls return when their workers end
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.close()
            raise


def summary(entries: Sequence[dict[str, Any]]) -> str:
    """Return the closing line."""
    good = sum(passed(e) for e in entries)
    return f"{good} passed, {len(entries) - good} failed"
