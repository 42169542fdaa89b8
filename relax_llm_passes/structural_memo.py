"""Answers kept by what was asked, up to the names of variables.

The layers of a model ask the same questions with other variables; building a kernel or reading a
rotary again for each costs more than everything around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi

__all__ = ["StructuralMemo"]


class StructuralMemo:
    """A memory of answers to questions made of TVM objects, numbers and text.

    Parameters
    ----------
    most : int
        Questions of different hash to keep; then all are forgotten.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._known: dict[int, list[tuple[Any, Any]]] = {}

    def get(self, parts: Sequence[Any]) -> tuple[Any, Any | None]:
        """Return the question, to be given to `put`, and the answer, or None.

        Variables that the parts leave free are the same up to their names.
        """
        question = tvm_ffi.convert(list(parts))
        key = int(tvm_ffi.structural_hash(question, map_free_vars=True))
        for other, answer in self._known.get(key, ()):
            if tvm_ffi.structural_equal(question, other, map_free_vars=True):
                return (key, question), answer
        return (key, question), None

    def put(self, question: Any, answer: Any) -> None:
        """Keep an answer, which is not None."""
        key, asked = question
        if len(self._known) >= self._most:
            self._known.clear()
        self._known.setdefault(key, []).append((asked, answer))
