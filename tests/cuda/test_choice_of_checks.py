"""Checks are chosen by a call, by marker, by pytest's option, by the environment, in this order."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_llm_passes.cuda_on_cpu import CHECKS, run_cuda_source, run_module, use_checks
from relax_llm_passes.cuda_on_cpu.checks import VARIABLE, choose_checks, default_checks, settings
from relax_llm_passes.errors import InputError, UnknownNameError

ROOT = Path(__file__).resolve().parents[2]

# One kernel with a bug for each check.
BUGS = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float s[64];
  if (threadIdx.x < 63) s[threadIdx.x] = a[threadIdx.x];   // races with other lanes' reads
  float x = s[63 - threadIdx.x];
  x += a[threadIdx.x + 1];                                 // one beyond the end
  if (threadIdx.x < 32) __syncthreads();                   // half of the block
  b[threadIdx.x] = x;
}
"""
KINDS = {
    "bounds": "out-of-bounds",
    "races": "shared-race",
    "uninitialised": "uninitialised-read",
    "divergence": "divergent-barrier",
}
A = np.random.default_rng(4).standard_normal(64).astype("f4")


def kinds_found(**config):
    return {f.kind for f in run_cuda_source(BUGS, "k", 1, 64, [A, A * 0], **config).report}


@pytest.mark.parametrize("name", KINDS)
def test_each_check_alone_and_all_but_it(name):
    assert kinds_found(checks=name) == {KINDS[name]}
    assert kinds_found(checks=f"-{name}") == set(KINDS.values()) - {KINDS[name]}


def test_poison_and_counters():
    code = """
extern "C" __global__ void k(float* a, float* b) {
  __shared__ float s[64];
  b[threadIdx.x] = a[threadIdx.x] + s[threadIdx.x];
}
"""

    def launch(checks):
        return run_cuda_source(code, "k", 1, 64, [A, A * 0], checks=checks)

    assert np.isnan(launch("poison").outputs[1]).all()
    assert np.array_equal(launch("none").outputs[1], A)
    assert launch("counters").stats[0].global_read == 256
    plain = launch("poison").stats[0]
    assert not plain.checked and plain.global_read == 0


def test_order():
    from tests.cuda.tvm_kernels import CASES

    case = CASES["softmax"]
    inputs = case.inputs("bfloat16")  # its bits depend on the order of threads

    def found(checks):
        r = run_module(case.module("bfloat16"), inputs, function="forward", strict=False,
                       checks=checks)  # fmt: skip
        return {f.kind for f in r.report}

    assert found("order") == {"order"} and found("-order") == {"shared-race"}
    assert found("none") == set()


def test_names():
    assert choose_checks("all") == set(CHECKS) and choose_checks("none") == set()
    two = {"races", "bounds"}
    assert choose_checks(" races, bounds") == two == choose_checks(["races", "bounds"])
    assert choose_checks("-order") == set(CHECKS) - {"order"}
    with pytest.raises(UnknownNameError, match="races"):
        choose_checks("race")
    with pytest.raises(InputError, match="one or the other"):
        choose_checks("races,-order")
    assert settings(choose_checks(False))["checks"] is False
    assert settings(frozenset({"races"}))["checks"] is True


def test_what_counts_before_what(monkeypatch):
    monkeypatch.setenv(VARIABLE, "races")
    with use_checks("bounds"):
        assert default_checks() == {"bounds"} == choose_checks(True)
        with use_checks("none"):
            assert kinds_found() == set()
            assert kinds_found(checks="races") == {"shared-race"}  # a call counts most
        assert kinds_found() == {"out-of-bounds"}


@pytest.mark.cuda_checks("bounds", "races")
def test_marker():
    assert default_checks() == {"bounds", "races"}
    assert kinds_found() == {"out-of-bounds", "shared-race"}


INNER = """
import pytest
from relax_llm_passes.cuda_on_cpu.checks import default_checks

def test_plain():
    print("plain", *sorted(default_checks()))

@pytest.mark.cuda_checks("-order,-counters")
def test_marked():
    print("marked", *sorted(default_checks()))
"""


def pytest_in_a_process(tmp_path, *options, **environment):
    (tmp_path / "test_inner.py").write_text(INNER)
    (tmp_path / "torch.py").write_text("raise ImportError('not needed here')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider",
               "-p", "relax_llm_passes.cuda_on_cpu.pytest_plugin", *options,
               str(tmp_path / "test_inner.py")]  # fmt: skip
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != VARIABLE}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path,
                          env={**kept, "PYTHONPATH": str(ROOT), **environment})  # fmt: skip


def test_option_and_variable_of_pytest(tmp_path):
    marked = "marked bounds divergence poison races uninitialised"
    done = pytest_in_a_process(tmp_path, "--cuda-checks=bounds")
    assert done.returncode == 0 and "plain bounds\n" in done.stdout and marked in done.stdout
    done = pytest_in_a_process(tmp_path, **{VARIABLE: "races,order"})
    assert "plain order races\n" in done.stdout and marked in done.stdout
    done = pytest_in_a_process(tmp_path, "--cuda-checks=bound")
    assert done.returncode == 4 and "bounds" in done.stderr  # did you mean


PROGRAM = """
import sys
import tvm
from tests.cuda.test_choice_of_checks import racing
assert tvm.cuda(0).exist
racing()
sys.exit(3 if "fail" in sys.argv else None)
"""


def racing():
    """What the program of the next test does: a bf16 softmax as TVM compiles it."""
    import tvm
    from tvm import relax

    from relax_llm_passes.cuda_on_cpu import cuda_target
    from tests.cuda.tvm_kernels import CASES, compile_case

    case = CASES["softmax"]
    vm = relax.VirtualMachine(compile_case(case, "bfloat16", cuda_target()), tvm.cuda(0))
    vm["forward"](*[tvm.runtime.tensor(x, tvm.cuda(0)) for x in case.inputs("bfloat16")])


def test_a_program_by_option_or_variable(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "torch.py").write_text("raise ImportError('not needed here')\n")

    def run(*arguments, **environment):
        kept = {k: v for k, v in os.environ.items() if k != VARIABLE}
        path = f"{tmp_path}{os.pathsep}{ROOT}"
        return subprocess.run(
            [sys.executable, "-m", "relax_llm_passes.cuda_on_cpu", *arguments],
            capture_output=True, text=True, env={**kept, "PYTHONPATH": path, **environment},
        )  # fmt: skip

    done = run("--checks", "races", str(program))
    assert done.returncode == 1 and "[shared-race] softmax_kernel" in done.stderr
    done = run(str(program), "fail", **{VARIABLE: "all"})
    assert done.returncode == 3 and "[shared-race] softmax_kernel" in done.stderr
    done = run("--checks=bounds", str(program))
    assert (done.returncode, done.stderr) == (0, "")
    done = run("--checks=race", str(program))
    assert done.returncode == 2 and "races" in done.stderr
    assert run("--checks").returncode == 2
