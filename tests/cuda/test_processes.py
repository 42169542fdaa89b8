"""Several processes share the cache of compiled kernels: each is built once, and once only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Calls the real compiler and notes what it was asked for.
COMPILER = """#!/bin/sh
echo "$$ $*" >> {log}
exec {real} "$@"
"""

# Two tests that need the same kernel, in two processes, and some that need others.
INNER = '''
import numpy as np
import pytest
from relax_llm_passes.cuda_on_cpu import run_cuda_source

CODE = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float s[32];
  s[threadIdx.x] = a[threadIdx.x] * SCALE;
  __syncthreads();
  b[threadIdx.x] = s[31 - threadIdx.x];
}
"""

@pytest.mark.parametrize("scale", [2, 3])
@pytest.mark.parametrize("again", range(4))
def test_kernel(scale, again):
    a = np.arange(32, dtype="f4")
    r = run_cuda_source(CODE.replace("SCALE", f"{scale}.0f"), "k", 1, 32, [a, a * 0])
    assert r.report == [] and np.array_equal(r.outputs[1], scale * a[::-1])
'''


def compilations(log):
    """Outputs that the compiler was asked to make, without the folder of each attempt."""
    if not log.exists():
        return []
    calls = [line.split() for line in log.read_text().splitlines()]
    return [c[c.index("-o") + 1] for c in calls if "-o" in c and "-c" in c]


def test_two_workers_build_each_kernel_once_and_nothing_the_second_time(tmp_path):
    log = tmp_path / "calls"
    tools = tmp_path / "bin"
    tools.mkdir()
    compiler = tools / "g++"
    compiler.write_text(COMPILER.format(log=log, real=shutil.which("g++")))
    compiler.chmod(0o755)
    # TVM imports torch where it finds it: seconds in each process.
    (tools / "torch.py").write_text("raise ImportError('not needed here')\n")
    inner = tmp_path / "test_inner.py"
    inner.write_text(INNER)
    cache = tmp_path / "cache"
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{tools}{os.pathsep}{ROOT}",
    }
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        environment.pop(name, None)

    def run():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(inner)],
            capture_output=True, text=True, env=environment, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "8 passed" in done.stdout

    run()
    first = compilations(log)
    assert len(first) == 2  # two kernels, instrumented; eight tests in two processes
    calls = len(log.read_text().splitlines())
    files = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.suffix != ".lock"}
    assert any(p.suffix == ".so" for p in files)
    assert not any(p.name.startswith("build-") for p in files)
    run()
    # `g++ --version` is asked once a process; nothing is compiled.
    later = log.read_text().splitlines()[calls:]
    assert all("--version" in line for line in later)
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.suffix != ".lock"} == files
