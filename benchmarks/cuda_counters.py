"""TVM's default pipeline against ours on CUDA, in figures that need no GPU.

    python benchmarks/cuda_counters.py [GRAPH ...] [--json FILE]

Every graph of the corpus that is named (default: one RWKV-5 and one MPT decode step) is compiled
with TVM's default pipeline and with this package's, executed on the CPU, compared with its golden
outputs, and counted: launches, barriers, bytes touched over the bytes of inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.cuda_on_cpu import cuda_target, install
from relax_llm_passes.cuda_on_cpu.explain import explain_cuda


def default_graphs() -> list[str]:
    """One decode step of RWKV-5 and one of MPT."""
    names = corpus.list_graphs()
    chosen = []
    for family in ("rwkv5", "mpt"):
        decode = [n for n in names if n.startswith(family) and "decode" in n]
        chosen += sorted(decode, key=len)[:1]
    return chosen


def pipelines(target: Any) -> dict[str, Any]:
    """What is compared, by name."""
    return {
        "tvm": relax.get_default_pipeline(target),
        "relax_llm": relax_llm_passes.default_pipeline(target),
    }


def measure(name: str) -> list[dict[str, Any]]:
    """Rows for one graph: one per pipeline."""
    graph = corpus.load(name)
    target = cuda_target()
    rows = []
    for pipeline, passes in pipelines(target).items():
        began = time.perf_counter()
        row: dict[str, Any] = {"graph": name, "pipeline": pipeline}
        try:
            executable = tvm.compile(graph.mod, target, relax_pipeline=passes)
            explanation = explain_cuda(
                executable, graph.inputs(), target, function=graph.function, checks=False
            )
            row.update(explanation.totals)
            row["equal_to_golden"] = bool(graph.compare(explanation.result.outputs))
        except Exception as e:
            row["error"] = f"{type(e).__name__}: {str(e).strip().splitlines()[-1][:200]}"
        row["seconds"] = round(time.perf_counter() - began, 1)
        rows.append(row)
    return rows


def main() -> None:
    """Print the table; write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    install()
    rows = [r for g in arguments.graphs or default_graphs() for r in measure(g)]
    print(f"{'graph':32} {'pipeline':10} {'launches':>8} {'barriers':>9} {'over':>6} equal")
    for r in rows:
        if "error" in r:
            print(f"{r['graph']:32} {r['pipeline']:10} {r['error']}")
        else:
            print(
                f"{r['graph']:32} {r['pipeline']:10} {r['launches']:8} {r['barriers']:9} "
                f"{r['bytes_over_minimum']:6.2f} {r['equal_to_golden']}"
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
