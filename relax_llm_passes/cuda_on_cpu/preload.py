"""Load the stand-ins for libcuda and libcudart, and TVM's CUDA runtime on top of them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from ..errors import UnsupportedError
from .availability import why_not
from .build import build_runtime

__all__ = ["driver", "stand_ins_loaded"]

_loaded: list[ctypes.CDLL] = []


def stand_ins_loaded() -> bool:
    """Whether CUDA is emulated in this process."""
    return bool(_loaded)


def _mapped(name: str) -> bool:
    """Whether a library of this name is already in the process."""
    with open("/proc/self/maps") as f:
        return any(name in line for line in f)


def _runtime_library() -> Path:
    import tvm.base

    return (
        Path(tvm.base._LOADED_LIBS["tvm_runtime"]._name).resolve().parent / "libtvm_runtime_cuda.so"
    )


def driver() -> ctypes.CDLL:
    """The stand-in for libcuda, loaded on first use; TVM's CUDA runtime is loaded with it.

    Raises
    ------
    UnsupportedError
        Not possible on this machine or in this process; the message says why.
    """
    if _loaded:
        return _loaded[0]
    reason = why_not()
    if not reason and _mapped("libcuda.so"):
        reason = "this process already uses a real CUDA driver; run it in a process without one"
    if reason:
        raise UnsupportedError(f"CUDA code cannot be executed on this CPU: {reason}")
    library = _runtime_library()
    if not library.exists():
        raise UnsupportedError(f"this TVM has no CUDA runtime: {library.name} is missing")
    needed = re.search(rb"libcudart\.so\.\d+", library.read_bytes())
    if needed is None:
        raise UnsupportedError(f"{library.name} does not use the CUDA runtime library")
    if _mapped(needed.group(0).decode()):
        raise UnsupportedError(
            f"this process has already loaded {needed.group(0).decode()}; emulate CUDA in a "
            "process without it"
        )
    paths = build_runtime(needed.group(0).decode())
    handles = [ctypes.CDLL(str(p), mode=ctypes.RTLD_GLOBAL) for p in paths]
    # `import tvm` could not load it, as the machine has no driver: now its names resolve.
    handles.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    _declare(handles[0])
    _loaded.extend(handles)
    return handles[0]


def _declare(lib: ctypes.CDLL) -> None:
    lib.emu_configure.argtypes = [
        ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint,
    ]  # fmt: skip
    lib.emu_configure.restype = None
    for name in ("emu_take_findings", "emu_take_launches", "emu_last_error"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.emu_set_build_error.argtypes = [ctypes.c_char_p]
    lib.emu_set_build_error.restype = None
    lib.emu_set_build_function.restype = None
