"""TVM's default pipeline against ours on CUDA, in figures that need no GPU.

    python benchmarks/cuda_counters.py [PATTERN ...] [--json FILE] [--readme]

Graphs of the corpus (those named, patterns like `*_decode` allowed; default: a decode step of
RWKV-5 and one of MPT) are compiled with TVM's default pipeline and with this package's, executed
on the CPU, compared with their golden outputs, and counted. `--readme` puts the table into
benchmarks/README.md.
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

DEFAULT = ("rwkv5_package_decode", "mpt_foundry_rope_decode")
README = Path(__file__).with_name("README.md")
MARKS = ("<!-- cuda counters: benchmarks/cuda_counters.py --readme -->", "<!-- end -->")


def pipelines(target: Any) -> dict[str, Any]:
    """What is compared, by name."""
    return {
        "TVM's default": relax.get_default_pipeline(target),
        "this package": relax_llm_passes.default_pipeline(target),
    }


def measure(name: str) -> list[Compared]:
    """Rows for one graph: one per pipeline."""
    graph = corpus.load(name)
    target = cuda_target()
    return compare_pipelines(
        graph.mod,
        graph.inputs(),
        target,
        pipelines(target),
        name=name,
        function=graph.function,
        check=lambda outputs: bool(graph.compare(outputs)),
    )


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
    parser.add_argument("--readme", action="store_true")
    arguments = parser.parse_args()
    names = [
        n
        for n in corpus.list_graphs()
        if any(fnmatch.fnmatch(n, p) for p in arguments.graphs or DEFAULT)
    ]
    if not names:
        raise InputError(f"no graph of the corpus matches {arguments.graphs}")
    rows: list[Compared] = []
    for name in names:
        rows += measure(name)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(comparison_table(rows))
    if arguments.readme:
        write_readme(comparison_table(rows, markdown=True))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    return int(any(r.pipeline == "this package" and r.equal is not True for r in rows))


if __name__ == "__main__":
    sys.exit(main())
