"""What stock TVM makes of each graph: compile, run and compare, in processes of their own.

    python tests/graphs/upstream.py [--only NAME ...] [--jobs N] [--missing]  # writes upstream.json

Three pipelines: ``tvm.compile`` as it comes for llvm, ``relax.get_default_pipeline`` for llvm, and
the same for cuda (sm_80, compiled only). The default pipelines' kernel launches are recorded too:
`relax-llm-passes check --corpus` takes both from here, as they are of one version of TVM and cost
more than everything that it checks. README.md takes its last column from the result.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from relax_llm_passes import corpus  # noqa: E402

PIPELINES = ("llvm", "llvm_default", "cuda_default")
COUNTED = ("llvm_default", "cuda_default")
# Seconds of processor time: a busy machine must not make a graph look slow.
TIMEOUT = 600


def _flat(value: Any) -> list[Any]:
    if hasattr(value, "numpy"):
        return [value.numpy()]
    return [leaf for item in value for leaf in _flat(item)]


def run_stock(graph: corpus.Graph, pipeline: str) -> str:
    """Compile with stock TVM; for llvm also run and compare. Returns "ok" or what went wrong.

    Prints the launches of the graph's function as soon as the pipeline has been through.
    """
    import tvm
    from tvm import relax

    from relax_llm_passes.launches import LaunchCounter

    if pipeline.startswith("cuda"):
        target = tvm.target.Target(
            {
                "kind": "cuda",
                "arch": "sm_80",
                "max_threads_per_block": 1024,
                "max_shared_memory_per_block": 49152,
                "thread_warp_size": 32,
            },
            host="llvm",
        )
    else:
        target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    if pipeline == "llvm":
        compiled = tvm.compile(graph.mod, target)
    else:
        counter = LaunchCounter(target)
        with target, tvm.transform.PassContext(instruments=[counter]):
            compiled = tvm.compile(
                graph.mod, target, relax_pipeline=relax.get_default_pipeline(target)
            )
        print(f"LAUNCHES {pipeline} {counter.launches[graph.function]}", flush=True)
    if pipeline.startswith("cuda"):
        return "ok"
    machine = relax.VirtualMachine(compiled, tvm.cpu())
    outputs = machine[graph.function](*[tvm.runtime.tensor(a) for a in graph.inputs()])
    verdict = graph.compare(_flat(outputs))
    return "ok" if verdict.ok else f"wrong result: {verdict.max_rel_err:.1e} in {verdict.worst}"


def _reason(text: str) -> str:
    """The telling line of an error text, short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        if ("Error" in line or "Check failed" in line or "CodeGenVM" in line)
        and not line.startswith(("File", "Warning"))
    ]
    return (telling or lines or ["no message"])[0].split(" --> ")[0][:160]


def _child(name: str, pipelines: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT, TIMEOUT + 5))
    graph = corpus.load(name, HERE)
    for pipeline in pipelines:
        print(f"BEGIN {pipeline}", flush=True)
        try:
            outcome = run_stock(graph, pipeline)
        except Exception as err:  # whatever upstream raises is the finding
            outcome = f"{type(err).__name__}: {_reason(str(err))}"
        print(f"RESULT {pipeline} {outcome}", flush=True)


def _isolated(job: tuple[str, list[str]]) -> tuple[str, dict[str, str], dict[str, int]]:
    """All pipelines of one graph in one process; a new one for the rest when it dies."""
    name, waiting = job[0], list(job[1])
    found: dict[str, str] = {}
    launches: dict[str, int] = {}
    while waiting:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, *waiting]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            died = f"not done after {TIMEOUT} s"
        elif done.returncode > 0:
            died = _reason(done.stderr)
        else:
            died = f"process dies (signal {-done.returncode})"
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                _, pipeline, outcome = line.split(" ", 2)
                found[pipeline] = outcome
            if line.startswith("LAUNCHES "):
                _, pipeline, count = line.split(" ", 2)
                launches[pipeline] = int(count)
        rest = [pipeline for pipeline in waiting if pipeline not in found]
        if rest:
            found[rest.pop(0)] = died
        waiting = rest
    return name, found, launches


def _tvm_version() -> str:
    return importlib.metadata.version("apache-tvm")


def _lacks(recorded: dict[str, Any], pipeline: str) -> bool:
    """Whether a pipeline's outcome, or the launches of one that works, are not recorded."""
    if pipeline not in recorded:
        return True
    works = recorded[pipeline] == "ok"
    return works and pipeline in COUNTED and pipeline not in recorded.get("launches", {})


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--missing", action="store_true", help="leave alone what is recorded")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        _child(options.child[0], options.child[1:])
        return 0
    names = [
        name
        for name in corpus.list_graphs(HERE)
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)
    ]
    path = HERE / "upstream.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    jobs = []
    for name in names:
        runs_on = corpus.load(name, HERE).info["runs_on"]
        wanted = [
            pipeline
            for pipeline in PIPELINES
            if (pipeline.startswith("cuda") or "llvm" in runs_on)
            and not (options.missing and not _lacks(results.get(name, {}), pipeline))
        ]
        if wanted:
            jobs.append((name, wanted))
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, outcomes, launches in pool.map(_isolated, jobs):
            entry = results.setdefault(name, {})
            entry.update(outcomes)
            entry["module"] = corpus.load(name, HERE).digest
            entry["tvm"] = _tvm_version()
            if launches:
                entry.setdefault("launches", {}).update(launches)
            for pipeline, outcome in outcomes.items():
                print(f"{name:32} {pipeline:14} {outcome}", flush=True)
            kept = {key: results[key] for key in sorted(results)}
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
