"""Workers that may crash, and the counting of kernel launches."""

from __future__ import annotations

import sys
import time

import pytest
import tvm
from tvm import relax

import relax_llm_passes as rlp
from relax_llm_passes.isolated import Worker
from relax_llm_passes.launches import LaunchCounter
from tests.small_modules import Alias, Relus


def die() -> None:
    """Run in a worker: end the process as C++ does."""
    import ctypes

    ctypes.string_at(0)


def noise() -> list[int]:
    """Run in a worker: print where answers go."""
    import os

    os.system("echo from a library")
    print("from Python")
    return [1, 2]


def wait(seconds: float) -> None:
    """Run in a worker."""
    time.sleep(seconds)


def refuse() -> None:
    """Run in a worker."""
    raise ValueError("first line\nlast line")


def test_crashes_errors_timeouts_and_going_on():
    with Worker() as worker:
        here = "tests.test_cli_isolated"
        assert worker.call(f"{here}:noise", {}).result == [1, 2]
        crashed = worker.call(f"{here}:die", {})
        assert crashed.status == "crashed" and "SIG" in crashed.message
        failed = worker.call(f"{here}:refuse", {})
        assert failed.status == "failed" and failed.message == "ValueError: last line"
        slow = worker.call(f"{here}:wait", {"seconds": 60}, 0.5)
        assert slow.status == "timeout"
        assert worker.call(f"{here}:noise", {}).ok
        assert worker.call("no.such:thing", {}).status == "failed"
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("target", ["llvm", "cuda"])
@pytest.mark.parametrize(("mod", "count"), [(Relus, 1), (Alias, 2)])
def test_launches_are_those_of_call_tir(target, mod, count):
    # TVM fuses element-wise chains into one kernel, and matmul with the relu behind its alias
    # into another.
    tvm_target = rlp.parse_target(target)
    with tvm_target:
        pipeline = relax.get_default_pipeline(tvm_target)
    counter = LaunchCounter(tvm_target)
    with tvm.transform.PassContext(instruments=[counter]):
        tvm.compile(mod, tvm_target, relax_pipeline=pipeline)
    assert counter.launches == {"main": count}
