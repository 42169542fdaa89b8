"""Run hand-written CUDA source through the same machinery as TVM's: for the tests of the checks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import RelaxLLMError
from .checks import choose_checks, settings
from .harness import _MAGIC, RunResult, configure, findings, install, launches
from .preload import driver

__all__ = ["run_cuda_source"]


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def _triple(x: int | Sequence[int]) -> tuple[int, int, int]:
    x = (x,) if isinstance(x, int) else tuple(x)
    return (*x, 1, 1)[:3]  # type: ignore[return-value]


def run_cuda_source(
    code: str,
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Any],
    *,
    dynamic_shared: int = 0,
    arch: int = 900,
    **config: Any,
) -> RunResult:
    """Launch one kernel of CUDA source text once.

    Parameters
    ----------
    code : str
        CUDA C++ with ``extern "C" __global__`` kernels.
    kernel : str
        Which one to launch.
    grid, block : int or sequence of up to 3 int
        Launch shape.
    arguments : sequence
        In the kernel's order: NumPy arrays are copied to device memory and back, NumPy scalars are
        passed by value in their own type.
    dynamic_shared : int
        Bytes.
    arch : int
        ``__CUDA_ARCH__``.
    **config
        Fields of :class:`~relax_llm_passes.cuda_on_cpu.Config`; ``checks`` as in
        :func:`~relax_llm_passes.cuda_on_cpu.run_module`.

    Returns
    -------
    RunResult
        ``outputs`` holds every array argument after the launch. A launch that the checks stopped
        has their findings in ``report``; other failures raise.
    """
    install()
    lib = driver()
    for name in ("emu_device_allocate", "emu_host_allocate"):
        getattr(lib, name).restype = ctypes.c_void_p
        getattr(lib, name).argtypes = [ctypes.c_size_t]
    lib.emu_device_free.argtypes = [ctypes.c_void_p]
    chosen = settings(choose_checks(config.pop("checks", True)))
    configure(**{**chosen, **config})
    findings(), launches()

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = ctypes.create_string_buffer(_MAGIC + f"{arch}\n{code}".encode())
    status = lib.cuModuleLoadData(ctypes.byref(module), image)
    status = status or lib.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode())
    if status:
        raise RelaxLLMError(lib.emu_last_error().decode())

    buffers: list[tuple[int, np.ndarray]] = []
    values: list[Any] = []
    for a in arguments:
        if isinstance(a, np.ndarray):
            p = lib.emu_device_allocate(a.nbytes)
            copy = np.ascontiguousarray(a)
            ctypes.memmove(p, copy.ctypes.data, copy.nbytes)
            buffers.append((p, copy))
            values.append(ctypes.c_void_p(p))
        else:
            values.append(ctypes.create_string_buffer(np.asarray(a).tobytes()))
    pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
    shape = [(ctypes.c_uint * 3)(*_triple(x)) for x in (grid, block)]
    launch = _LaunchConfig(*shape, dynamic_shared, None, None, 0)
    status = lib.cuLaunchKernelEx(ctypes.byref(launch), function, pointers, None)
    outputs = []
    for p, a in buffers:
        out = np.empty_like(a)
        ctypes.memmove(out.ctypes.data, p, out.nbytes)
        outputs.append(out)
        lib.emu_device_free(p)
    report = findings()
    error = lib.emu_last_error().decode()
    lib.cuModuleUnload(module)
    result = RunResult(outputs, report, launches())
    configure()
    if status and not report:
        raise RelaxLLMError(error)
    return result
