"""What TVM's default pipeline makes of the corpus' graphs, kept from earlier runs.

Compiling all graphs with it takes longer than everything that `check` does, and the answer depends
on the graph and on TVM's version only. `tests/graphs/upstream.py` records it in the corpus'
`upstream.json`; what is not there is kept in the user's cache folder once it has been found.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from . import corpus

__all__ = ["keep", "kept"]

# As `tests/graphs/upstream.py` calls them.
_PIPELINES = {"llvm": "llvm_default", "cuda": "cuda_default"}


def _version() -> str:
    return importlib.metadata.version("apache-tvm")


def _status(text: str) -> str:
    """Return a recorded outcome in the words of `isolated.Outcome`."""
    if text == "ok" or text.startswith("wrong result"):
        return text
    if text.startswith("process dies"):
        return f"crashed: {text}"
    return f"timeout: {text}" if text.startswith("not done") else f"failed: {text}"


def _cache_file(graph: corpus.Graph, kind: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = f"{graph.digest}-{kind}-{_version()}.json"
    return Path(base) / "relax_llm_passes" / "upstream" / name


def kept(name: str, directory: str, kind: str) -> dict[str, Any] | None:
    """Return {"status", "launches"} of a graph for "llvm" or "cuda", or None where not known.

    Results for another version of TVM, or of the graph, are not returned.
    """
    graph = corpus.load(name, directory)
    pipeline = _PIPELINES.get(kind, "")
    for folder in (Path(directory), Path(directory).parent):
        try:
            entry = json.loads((folder / "upstream.json").read_text(encoding="utf-8"))[name]
            current = entry["module"] == graph.digest and entry["tvm"] == _version()
            status = entry[pipeline]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        launches = entry.get("launches", {}).get(pipeline)
        if current and (status != "ok" or launches is not None):
            return {"status": _status(status), "launches": launches}
    try:
        found = json.loads(_cache_file(graph, kind).read_text(encoding="utf-8"))
        return {"status": str(found["status"]), "launches": found["launches"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(name: str, directory: str, kind: str, status: str, launches: int | None) -> None:
    """Remember a result, unless it says nothing about the graph (a timeout)."""
    if status.startswith("timeout"):
        return
    path = _cache_file(corpus.load(name, directory), kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.part")
        scratch.write_text(json.dumps({"status": status, "launches": launches}), encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        pass  # a read-only home costs time, nothing else
