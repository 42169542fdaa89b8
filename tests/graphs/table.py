"""Writes the table of README.md from the graphs and from upstream.json.

python tests/graphs/table.py            # rewrite the table
python tests/graphs/table.py --check    # exit code 1 when it is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from relax_llm_passes import corpus  # noqa: E402

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
LABELS = {
    "llvm": "llvm",
    "llvm_default": "llvm get_default_pipeline",
    "cuda_default": "cuda get_default_pipeline",
}


def _upstream(outcome: dict[str, Any]) -> str:
    known = {pipeline: outcome[pipeline] for pipeline in LABELS if pipeline in outcome}
    bad = [
        f"{LABELS[pipeline]}: {text.replace('|', '/').replace('<', '&lt;')[:110]}"
        for pipeline, text in known.items()
        if text != "ok"
    ]
    return "<br>".join(bad) if bad else ("none" if known else "not run")


def table() -> str:
    """The table as Markdown."""
    results = json.loads((HERE / "upstream.json").read_text(encoding="utf-8"))
    rows = [
        "| graph | source and version | what is special | bindings | tolerance | stock TVM fails |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for graph in corpus.load_all(HERE):
        info = graph.info
        rows.append(
            f"| `{graph.name}` | {info['source']} ({info['source_version']}) | {info['special']} | "
            f"{info['bindings']} | {graph.tolerance:.0e} | "
            f"{_upstream(results.get(graph.name, {}))} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Command line."""
    path = HERE / "README.md"
    text = path.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    fresh = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    path.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
