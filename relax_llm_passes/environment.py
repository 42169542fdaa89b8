"""What is installed here, and what is known to break with it."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

__all__ = ["check_import", "ffi_problem", "thread_count"]


def _version(name: str) -> tuple[int, ...]:
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ()
    numbers = []
    for part in text.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


@functools.cache
def ffi_problem() -> str | None:
    """Return what is wrong with the installed apache-tvm-ffi, or None.

    With apache-tvm 0.27, version 0.1.15 of apache-tvm-ffi (what pip resolves by itself) crashes
    the process in `tvm.ir.save_json` and in dlight's `MatmulTensorization`. Code that would
    reach either must ask first.
    """
    found = _version("apache-tvm-ffi")
    if found >= (0, 1, 15):
        text = importlib.metadata.version("apache-tvm-ffi")
        return (
            f"apache-tvm-ffi {text} crashes apache-tvm 0.27 in save_json and in tensor-core "
            "scheduling; install 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'"
        )
    return None


def thread_count() -> int:
    """Return how many threads `T.parallel` uses in this process.

    TVM reads TVM_NUM_THREADS (then OMP_NUM_THREADS) once, at its first parallel loop. Without
    it, TVM takes half of the processors it sees: one thread on 2 vCPUs.
    """
    import tvm

    return int(tvm.get_global_func("runtime.NumThreads")())


def check_import() -> None:
    """Warn about an installation that is known to crash; called on the package's first use."""
    problem = ffi_problem()
    if problem:
        warnings.warn(problem, stacklevel=3)
