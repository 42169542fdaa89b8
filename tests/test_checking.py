"""Results of TVM's default pipeline that earlier runs left: used when they are of this graph."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest

from relax_llm_passes import checking, corpus, upstream_results

GRAPHS = Path(__file__).resolve().parent / "graphs"
NAME = "mpt_hf_decode"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "modules").mkdir()
    for end in ("py", "json"):
        shutil.copy(GRAPHS / "modules" / f"{NAME}.{end}", tmp_path / "modules")
    return tmp_path


def record(folder: Path, **entry: object) -> None:
    (folder / "upstream.json").write_text(json.dumps({NAME: entry}))


def test_recorded_results_belong_to_a_graph_and_a_version(folder: Path) -> None:
    digest = corpus.load(NAME, folder).digest
    known = {"module": digest, "tvm": importlib.metadata.version("apache-tvm")}
    assert upstream_results.kept(NAME, str(folder), "llvm") is None
    good = {**known, "llvm_default": "ok", "launches": {"llvm_default": 61}}
    record(folder, **good, cuda_default="process dies (signal 11)")
    assert upstream_results.kept(NAME, str(folder), "llvm") == {"status": "ok", "launches": 61}
    died = upstream_results.kept(NAME, str(folder), "cuda")
    assert died is not None and died["status"] == "crashed: process dies (signal 11)"
    for change in ({"module": "0"}, {"tvm": "0.26"}, {"launches": {}}, {"llvm_default": None}):
        entry = {k: v for k, v in {**good, **change}.items() if v is not None}
        record(folder, **entry)
        assert upstream_results.kept(NAME, str(folder), "llvm") is None
    (folder / "upstream.json").write_text("{")
    assert upstream_results.kept(NAME, str(folder), "llvm") is None


def test_what_was_found_is_kept_for_the_next_run(folder: Path) -> None:
    upstream_results.keep(NAME, str(folder), "cuda", "timeout: took more than 3 s", None)
    assert upstream_results.kept(NAME, str(folder), "cuda") is None
    upstream_results.keep(NAME, str(folder), "cuda", "failed: InternalError: x", None)
    found = upstream_results.kept(NAME, str(folder), "cuda")
    assert found == {"status": "failed: InternalError: x", "launches": None}
    assert upstream_results.kept(NAME, str(folder), "llvm") is None
    path = folder / "modules" / f"{NAME}.py"
    path.write_text(path.read_text() + "\n# another graph\n")
    assert upstream_results.kept(NAME, str(folder), "cuda") is None


class Worker:
    """Stands for a process: answers at once, and counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, function: str, arguments: dict, timeout: float) -> checking.Outcome:
        self.calls.append(function.rpartition(":")[2])
        return checking.Outcome("ok", {"launches": 7})


def test_a_second_check_does_not_compile_upstream_again(folder: Path) -> None:
    case = checking.Case(NAME, corpus=str(folder))
    worker = Worker()
    for fresh, calls in ((False, 1), (False, 1), (True, 2)):
        settings = checking.Settings(target="llvm", fresh_upstream=fresh)
        found = checking._upstream(worker, case, settings, {})
        assert found == {"upstream_status": "ok", "launches_upstream": 7}
        assert len(worker.calls) == calls
    # A file's module has no name to keep a result under.
    for _ in range(2):
        checking._upstream(worker, checking.Case("m.py", file="m.py"), settings, {})
    assert len(worker.calls) == 4


def test_recorded_results_are_of_the_committed_graphs() -> None:
    entries = json.loads((GRAPHS / "upstream.json").read_text())
    current = {n: corpus.load(n, GRAPHS).digest for n in entries if "module" in entries[n]}
    assert current
    assert {n: entries[n]["module"] for n in current} == current
