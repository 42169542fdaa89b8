"""Import TVM's tensor-core intrinsics in seconds instead of minutes.

dlight's tensor-core rule imports ``tvm.s_tir.tensor_intrin.cuda`` when it first meets an fp16
matmul. Each of the 100 functions parsed there asks ``inspect.stack()`` for every frame with its
source and module, and for the frames of the import machinery Python searches all loaded modules
each time: two minutes in a process that has torch loaded. Frames without the module answer
everything that the parser asks.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["cheap_stack", "import_tensor_intrinsics"]


def _frames(frame: FrameType | None) -> list[Any]:
    found = []
    while frame is not None:
        name, line = frame.f_code.co_filename, frame.f_lineno
        text = None if name.startswith("<") else [linecache.getline(name, line)]
        found.append(inspect.FrameInfo(frame, name, line, frame.f_code.co_name, text, 0))
        frame = frame.f_back
    return found


@contextlib.contextmanager
def cheap_stack() -> Iterator[None]:
    """Inside, ``inspect.stack`` and ``getouterframes`` do not look for modules."""
    stack, outer = inspect.stack, inspect.getouterframes
    inspect.stack = lambda context=1: _frames(sys._getframe(1))  # type: ignore[assignment]
    inspect.getouterframes = lambda frame, context=1: _frames(frame)  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.stack, inspect.getouterframes = stack, outer


def import_tensor_intrinsics() -> None:
    """Register TVM's CUDA tensor intrinsics; nothing to do on the second call."""
    with cheap_stack():
        importlib.import_module("tvm.s_tir.tensor_intrin.cuda")
