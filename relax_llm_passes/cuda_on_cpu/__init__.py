"""Execute, check and measure CUDA code on a machine without a GPU.

The CUDA C++ that TVM generates is compiled by g++ and its threads run as fibers, behind stand-ins
for libcuda and libcudart, so ``tvm.compile``, the VM and ``tvm.cuda(0)`` work unchanged:

>>> from relax_llm_passes.cuda_on_cpu import run_module, nvcc_check
>>> outputs, report, stats = run_module(mod, [x, weight])
>>> nvcc_check(mod)     # registers, spills, shared memory per kernel and GPU
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CHECKS": "checks",
    "CheckError": "harness",
    "Compared": "compare",
    "Config": "harness",
    "Finding": "counters",
    "KernelResources": "resources",
    "LaunchStats": "counters",
    "RunResult": "harness",
    "compare_pipelines": "compare",
    "comparison_table": "compare",
    "configure": "harness",
    "cuda_target": "harness",
    "embedded_cubins": "nvcc",
    "explain_cuda": "explain",
    "findings": "harness",
    "install": "harness",
    "launches": "harness",
    "nvcc_check": "nvcc",
    "nvcc_missing": "nvcc",
    "real_gpu_missing": "availability",
    "run_cuda_source": "source",
    "run_module": "harness",
    "run_primfunc": "harness",
    "totals": "counters",
    "use_checks": "checks",
    "why_not": "availability",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
