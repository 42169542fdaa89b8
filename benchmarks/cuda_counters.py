"""TVM's default pipeline against ours on CUDA, in figures that need no GPU.

    python benchmarks/cuda_counters.py [PATTERN ...] [--json FILE] [--readme] [--kernels]

Graphs of the corpus (those that match a pattern; default: every decode graph) are compiled with
TVM's default pipeline and with this package's, executed on the CPU, compared with their golden
outputs, and counted. Each is done in a process that may crash. `--json` writes the totals,
`--kernels` prints a line per kernel, `--readme` puts the table into benchmarks/README.md.
`--from FILE` takes the rows of an earlier `--json` instead of measuring.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvm import relax

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.cuda_on_cpu import cuda_target
from relax_llm_passes.cuda_on_cpu.compare import Compared, compare_pipelines, comparison_table
from relax_llm_passes.errors import InputError
from relax_llm_passes.isolated import Worker

DEFAULT = ("*decode*",)
PIPELINES = ("TVM's default", "this package")
SECONDS = 900  # for one graph by one pipeline
README = Path(__file__).with_name("README.md")
MARKS = ("<!-- cuda counters: benchmarks/cuda_counters.py --readme -->", "<!-- end -->")


def measure(name: str, pipeline: str) -> dict[str, Any]:
    """The row of one graph by one pipeline, as JSON; called in a worker."""
    graph = corpus.load(name)
    target = cuda_target()
    passes = (
        relax.get_default_pipeline(target)
        if pipeline == PIPELINES[0]
        else relax_llm_passes.default_pipeline(target)
    )
    (row,) = compare_pipelines(
        graph.mod,
        graph.inputs(),
        target,
        {pipeline: passes},
        name=name,
        function=graph.function,
        check=lambda outputs: bool(graph.compare(outputs)),
    )
    return asdict(row)


def measure_all(names: list[str], kernels: bool) -> list[Compared]:
    """Rows for these graphs, one per pipeline."""
    rows = []
    # This file is a module of the worker by its folder's name.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with Worker() as worker:
        for name in names:
            for pipeline in PIPELINES:
                call = {"name": name, "pipeline": pipeline}
                outcome = worker.call("benchmarks.cuda_counters:measure", call, SECONDS)
                row = (
                    Compared(**outcome.result)
                    if outcome.ok
                    else Compared(name, pipeline, failed=str(outcome))
                )
                rows.append(row)
                if kernels:
                    print(f"{name}, {pipeline}\n{row.kernels or row.failed}\n", flush=True)
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def write_readme(table: str) -> None:
    """Put the table between its marks in README.md.

    Raises
    ------
    InputError
        The marks are not there.
    """
    text = README.read_text()
    begin, end = (text.find(m) for m in MARKS)
    if begin < 0 or end < begin:
        raise InputError(f"{README.name} has no place for the table: expected the lines {MARKS}")
    begin += len(MARKS[0])
    README.write_text(f"{text[:begin]}\n\n{table}\n\n{text[end:]}")


def main() -> int:
    """Print the table; 1 when an output of this package differs from the golden one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", type=Path, dest="earlier")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    if arguments.earlier:
        rows = [Compared(**r) for r in json.loads(arguments.earlier.read_text())]
    else:
        names = [
            n
            for n in corpus.list_graphs()
            if any(fnmatch.fnmatch(n, p) for p in arguments.graphs or DEFAULT)
        ]
        if not names:
            raise InputError(f"no graph of the corpus matches {arguments.graphs}")
        rows = measure_all(names, arguments.kernels)
    print(comparison_table(rows))
    if arguments.readme:
        write_readme(comparison_table(rows, markdown=True))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        kept = [{k: v for k, v in asdict(r).items() if k != "kernels"} for r in rows]
        text = ",\n".join(json.dumps(r) for r in kept)
        arguments.json.write_text(f"[{text}]\n")
    return int(any(r.pipeline == PIPELINES[1] and r.equal is not True for r in rows))


if __name__ == "__main__":
    sys.exit(main())
