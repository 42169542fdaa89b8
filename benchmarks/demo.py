"""The main job on two real graphs: compile, run, compare with golden outputs, report, speed.

Usage: python benchmarks/demo.py [GRAPH ...]
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("TVM_NUM_THREADS", str(os.cpu_count() or 1))

import numpy as np
import tvm
from tvm import relax

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.sampling import to_numpy

DEFAULT = ("rwkv5_package_decode", "mpt_hf_decode")


def _machine(mod: tvm.IRModule, target: tvm.target.Target, pipeline: object) -> tuple:
    start = time.perf_counter()
    executable = tvm.compile(mod, target, relax_pipeline=pipeline)
    return relax.VirtualMachine(executable, tvm.cpu()), time.perf_counter() - start


def _alternate(calls: list, rounds: int = 30) -> list[list[float]]:
    """Time the calls in turns, so that both see the same disturbances. Microseconds."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, seen in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seen.append((time.perf_counter() - start) * 1e6)
    return times


def demo(name: str) -> bool:
    """Run one graph of the corpus; return whether its numbers are right."""
    graph = corpus.load(name)
    print(f"\n== {name}: {graph.info['source']}")
    sequence = relax_llm_passes.default_pipeline("native")
    ours, ours_s = _machine(graph.mod, sequence.target, sequence)
    theirs, theirs_s = _machine(
        graph.mod, sequence.target, relax.get_default_pipeline(sequence.target)
    )
    arguments = [tvm.runtime.tensor(np.array(a, order="C")) for a in graph.inputs()]
    result = graph.compare(to_numpy(ours[graph.function](*arguments)))
    print(sequence.report.to_text())
    print(
        f"largest relative error {result.max_rel_err:.1e} (allowed {result.tol:.0e}): "
        + ("equal" if result else f"WRONG at {result.worst}")
    )
    fast, slow = _alternate(
        [lambda: ours[graph.function](*arguments), lambda: theirs[graph.function](*arguments)]
    )
    a, b = statistics.median(fast), statistics.median(slow)
    low, high = np.quantile(np.array(slow) / np.array(fast), [0.25, 0.75])
    print(
        f"run: {a:.0f} us, TVM's default pipeline {b:.0f} us: {b / a:.1f}x "
        f"(quartiles {low:.1f} to {high:.1f}); compile: {ours_s:.1f} s against {theirs_s:.1f} s"
    )
    return bool(result)


def main() -> int:
    names = sys.argv[1:] or list(DEFAULT)
    right = [demo(name) for name in names]
    print(f"\n{sum(right)} passed, {len(right) - sum(right)} failed")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
