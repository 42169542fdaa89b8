"""Whole models: this package, TVM's default, torch eager and torch.compile, in turns.

RWKV-5 also beside the PyPI package `rwkv` as it is shipped (engine "rwkv"); its graphs and RWKV-4's
prefill are of 6 tokens, unrolled by the importer. `--size 1b5-6` is a quarter of RWKV-5 1.5B.

Usage: python benchmarks/models.py --threads 1 --json out.json [--models mpt llama] [--modes decode]

All run on the same weights. Each engine lives in a process of its own, which is stopped (SIGSTOP)
while another one runs, so that no engine's spinning worker threads disturb a neighbour. Rounds
alternate between the engines; a speed ratio is the median of the ratios of neighbouring rounds.
Outputs must agree before any time is printed. Needs the `extract` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

# The graph of each model and mode (tests/graphs/generate.py --list).
GRAPHS = {
    "mpt": {"decode": "mpt_hf_decode", "prefill": "mpt_hf_prefill"},
    "llama": {"decode": "llama_decode", "prefill": "llama_prefill"},
    "neox": {"decode": "neox_decode", "prefill": "neox_prefill"},
    "rwkv4": {"decode": "rwkv4_hf_decode", "prefill": "rwkv4_hf_prefill6"},
    "rwkv5": {"decode": "rwkv5_package_decode", "prefill": "rwkv5_package_prefill6"},
}
ENGINES = ("ours", "tvm", "torch", "compile", "rwkv")
# Of a benchmark of quantised weights: this package with left operands of 8 bits.
OURS_8 = "ours8"


# --- worker -------------------------------------------------------------------------------------


def _tvm_call(built: Any, engine: str, bits: int = 0) -> Any:
    import tvm
    from tvm import relax

    import relax_llm_passes
    from benchmarks.packed_graph import with_packed_weights
    from relax_llm_passes.sampling import to_numpy

    target = relax_llm_passes.parse_target("native")
    graph = built.graph
    options = {"PartitionGemm": {"activation_bits": 8 if engine == OURS_8 else 0}}
    pipeline = (
        relax.get_default_pipeline(target)
        if engine == "tvm"
        else relax_llm_passes.default_pipeline(target, options=options)
    )
    module, inputs = with_packed_weights(graph, bits) if bits else (graph.mod, graph.inputs())
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())
    arguments = [tvm.runtime.tensor(np.array(a, order="C")) for a in inputs]
    function = machine[graph.function]
    return lambda: function(*arguments), to_numpy


def _torch_call(built: Any, engine: str, threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)
    module = built.source.module.eval()
    if engine == "compile":
        module = torch.compile(module)

    def flat(result: Any) -> list[np.ndarray]:
        if isinstance(result, (tuple, list)):
            return [a for item in result for a in flat(item)]
        return [result.detach().float().numpy()]

    def call() -> Any:
        with torch.no_grad():
            return module(*built.torch_args)

    return call, flat


def _package_call(built: Any, graph: str, size: str, threads: int) -> Any:
    """The PyPI package `rwkv` as it is shipped: its TorchScript functions, a list of tokens."""
    import torch

    from tests.graphs.sources.rwkv_package import package_as_shipped

    torch.set_num_threads(threads)
    forward = package_as_shipped(built.source.module, graph[len("rwkv")], size)
    tokens, state = built.torch_args
    numbers = [int(t) for t in tokens.reshape(-1)]
    full = len(numbers) > 1

    def call() -> Any:
        with torch.no_grad():
            return forward(numbers, [s.clone() for s in state], full)

    def flat(result: Any) -> list[np.ndarray]:
        logits, new = result
        return [a.detach().float().numpy() for a in (logits, *new)]

    return call, flat


def worker(engine: str, graph: str, size: str, threads: int, output: str) -> None:
    """Build one engine, write its outputs, then time rounds as asked on standard input.

    `graph+4` and `graph+8` are a graph with its weights quantised to so many bits.
    """
    sys.path.insert(0, str(ROOT))
    from tests.graphs.build import build

    graph, _, bits = graph.partition("+")
    built = build(graph, size)
    start = time.perf_counter()
    if engine in ("ours", OURS_8, "tvm"):
        call, flat = _tvm_call(built, engine, int(bits or 0))
    elif engine == "rwkv":
        call, flat = _package_call(built, graph, size, threads)
    else:
        call, flat = _torch_call(built, engine, threads)
    outputs = flat(call())
    np.savez(output, *[o.astype("float32") for o in outputs])
    print(json.dumps({"ready": time.perf_counter() - start}), flush=True)
    answer(call)


def answer(call: Any) -> None:
    """Time as many calls as each line of standard input asks for."""
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        print(json.dumps({"ms": times}), flush=True)


# --- parent -------------------------------------------------------------------------------------


class Engine:
    """A worker process, stopped except while it is asked for something."""

    def __init__(
        self, engine: str, graph: str, size: str, threads: int, folder: Path, script: str = __file__
    ) -> None:
        self.name = engine
        self.output = folder / f"{engine}.npz"
        environment = dict(
            os.environ,
            TVM_NUM_THREADS=str(threads),
            OMP_NUM_THREADS=str(threads),
            PYTHONPATH=str(ROOT),
        )
        # These would slow a current numpy or torch: they are for old OpenBLAS builds.
        for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [
                sys.executable,
                script,
                "--worker",
                engine,
                graph,
                size,
                str(threads),
                str(self.output),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.ready_s = self._read()["ready"]
        self._stop()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"engine {self.name} ended with status {self.process.wait()}")

    def _stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def time(self, repeats: int) -> float:
        """Return the median milliseconds of `repeats` calls after one to warm up."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{repeats + 1}\n")
        self.process.stdin.flush()
        times = self._read()["ms"][1:]
        self._stop()
        return statistics.median(times)

    def close(self) -> None:
        """End the worker."""
        self.process.kill()
        self.process.wait()


def _difference(a: Path, b: Path) -> float:
    left, right = np.load(a), np.load(b)
    worst = 0.0
    for name in right.files:
        scale = max(float(np.abs(right[name]).max()), 1e-30)
        worst = max(worst, float(np.abs(left[name] - right[name]).max()) / scale)
    return worst


def measure(
    model: str, mode: str, size: str, threads: int, engines: list[str], rounds: int, repeats: int
) -> dict[str, Any]:
    """Measure one model in one mode; raises when the engines' outputs differ."""
    graph = GRAPHS[model][mode]
    # The package is an engine for the models that come from it.
    engines = [e for e in engines if e != "rwkv" or "package" in graph]
    running: list[Engine] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in engines:
                running.append(Engine(name, graph, size, threads, Path(folder)))
            reference = running[-1]
            errors = {e.name: _difference(e.output, reference.output) for e in running}
            if max(errors.values()) > 1e-3:
                raise SystemExit(f"{graph}: outputs differ from {reference.name}'s: {errors}")
            samples: dict[str, list[float]] = {e.name: [] for e in running}
            for _ in range(rounds):
                for engine in running:
                    slow = engine.name == "tvm" and mode == "prefill"
                    if slow and samples["tvm"]:
                        continue  # half a minute a call; one is enough to place it
                    samples[engine.name].append(engine.time(1 if slow else repeats))
        finally:
            for engine in running:
                engine.close()
    result: dict[str, Any] = {
        "model": model,
        "mode": mode,
        "graph": graph,
        "size": size,
        "threads": threads,
        "ms": {n: round(statistics.median(s), 3) for n, s in samples.items()},
        "spread_ms": {n: [round(min(s), 3), round(max(s), 3)] for n, s in samples.items()},
        "first_call_s": {e.name: round(e.ready_s, 2) for e in running},
        "max_rel_diff": errors,
        "ratio": {},
    }
    for name in engines:
        if name != "ours" and "ours" in samples:
            ratios = [a / b for a, b in zip(samples["ours"], samples[name], strict=False)]
            result["ratio"][f"ours/{name}"] = {
                "median": round(statistics.median(ratios), 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
            }
    return result


def main() -> int:
    """Parse arguments, measure, print a table, write JSON."""
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        engine, graph, size, threads, output = sys.argv[2:]
        worker(engine, graph, size, int(threads), output)
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--modes", nargs="+", default=["decode", "prefill"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--size", default="real")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    print(
        f"{'model':8}{'mode':9}"
        + "".join(f"{e + ' ms':>12}" for e in options.engines)
        + "   ratios"
    )
    for model in options.models:
        for mode in options.modes:
            if mode not in GRAPHS[model]:
                continue
            row = measure(
                model,
                mode,
                options.size,
                options.threads,
                options.engines,
                options.rounds,
                options.repeats,
            )
            results.append(row)
            ratios = ", ".join(
                f"{n} {r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
                for n, r in row["ratio"].items()
            )
            print(
                f"{model:8}{mode:9}"
                + "".join(
                    f"{row['ms'][e]:12.2f}" if e in row["ms"] else f"{'-':>12}"
                    for e in options.engines
                )
                + f"   {ratios}",
                flush=True,
            )
    if options.json:
        record = {
            "machine": {
                "processor": _processor(),
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
            },
            "results": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
