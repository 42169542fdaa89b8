"""Whether CUDA code can be executed on this machine's CPU, and whether there is a real GPU."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import sys

__all__ = ["real_gpu_missing", "why_not"]


@functools.cache
def why_not() -> str:
    """Why CUDA code cannot be executed on this CPU; empty when it can.

    It needs Linux on x86-64 (the context switch is assembly), g++, and no CUDA driver that is
    already in use by this process.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if shutil.which("g++") is None:
        return "needs g++, which is not on PATH"
    return ""


@functools.cache
def real_gpu_missing() -> str:
    """Why no real CUDA device can be used; empty when there is one.

    Asks the driver itself, never TVM: TVM also sees the device that this package emulates.
    """
    from .preload import stand_ins_loaded

    if stand_ins_loaded():
        return "CUDA is emulated on the CPU in this process"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1) on this machine"
    if hasattr(driver, "emu_configure"):
        return "CUDA is emulated on the CPU in this process"
    if driver.cuInit(0) != 0:
        return "the CUDA driver finds no usable device"
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the CUDA driver lists no device"
    return ""
