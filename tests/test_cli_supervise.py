"""The installed program: a command that TVM ends is one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_llm_passes.cli import supervise
from tests.small_modules import TEXT

ROOT = Path(__file__).resolve().parent.parent


def program(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([*([str(path)] if path else []), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "relax_llm_passes", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        timeout=300,
    )


def test_a_crash_while_compiling_is_one_line(tmp_path: Path) -> None:
    # A plugin whose pass ends the process as C++ does.
    (tmp_path / "crashing.py").write_text(
        "import ctypes, os\n"
        "from relax_llm_passes import register_pass\n"
        "def register():\n"
        "    @register_pass('Crash', stage='clean')\n"
        "    def crash(mod, run):\n"
        "        os.write(2, b'!!! noise of C++\\nCheck failed: (x) is false: told\\n')\n"
        "        ctypes.string_at(0)\n"
    )
    info = tmp_path / "crashing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[relax_llm_passes.plugins]\ncrashing = crashing:register\n"
    )
    (tmp_path / "m.py").write_text(TEXT)
    library = tmp_path / "m.so"
    arguments = ["compile", tmp_path / "m.py", "--passes", "default,Crash", "-o", library]
    done = program(*arguments, path=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "relax-llm-passes: compile failed while running Crash: TVM crashed (segmentation fault): "
        "Check failed: (x) is false: told (--debug shows what it printed)"
    ]
    assert not library.exists() and not list(tmp_path.glob(".*"))


def test_a_library_that_ends_the_process(tmp_path: Path) -> None:
    from tvm.support import cc

    (tmp_path / "bad.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void f(void){ abort(); }\n"
    )
    library = tmp_path / "bad.so"
    compiler = cc.get_cc()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "bad.c"], check=True)
    (tmp_path / "bad.so.json").write_text(
        '{"format": 1, "target": {"kind": "llvm"}, "functions": {"main": {"params": [], '
        '"result": {"kind": "tensor", "shape": [1], "dtype": "float32"}}}}'
    )
    done = program("run", library)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"relax-llm-passes: run failed while loading {library}: TVM aborted")


def test_what_a_child_says_and_returns_comes_through(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(TEXT)
    library = tmp_path / "new" / "m.so"
    done = program("compile", tmp_path / "m.py", "--target", "llvm", "-o", library)
    assert done.returncode == 0 and library.is_file()
    assert done.stdout.startswith(f"{library}: main, second for llvm")
    assert done.stderr.splitlines() == [f"relax-llm-passes: created the folder {library.parent}"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "compile failed while linking: the system ended the process, most likely because"),
        (-4, "an instruction that this processor does not have"),
        (-99, "ended by signal 99"),
    ],
)
def test_how_a_child_ended(code: int, text: str) -> None:
    assert text in supervise._told(code, "compile", [f"{supervise.STAGE}linking"], [])


def test_options_are_read_without_a_child(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise.entry(["compil"]) == 2
    assert supervise.entry(["compile"]) == 2
    assert supervise.entry(["--version"]) == 0
    found = capfd.readouterr()
    assert len(found.err.splitlines()) == 2 and found.out.startswith("relax-llm-passes ")
