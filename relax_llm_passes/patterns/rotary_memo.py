"""Remember what a rotary is: the layers of a model ask the same question with other names.

`classify_rotary` looks at every depth of a head one by one, which is most of the time of finding
attention in a deep model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi

from ..kernels.scalar_expr import buffer_loads, i64
from .rotary import Rotary, classify_rotary

__all__ = ["classify_rotary_once"]

# Hash to questions that have it, each with its answer; tensors as places among the loads.
_KNOWN: dict[int, list[tuple[Any, Any]]] = {}
_MOST = 256


def classify_rotary_once(
    expr: Any, d: Any, size: int, heads: Sequence[Any], ranges: Mapping[Any, Any]
) -> tuple[Rotary, Any, list[Any]] | str:
    """Return what `classify_rotary` returns, from memory where only names differ."""
    extents = [i64(e) for e in ranges.values()]
    question = tvm_ffi.convert([expr, d, i64(size), i64(len(heads)), *heads, *ranges, *extents])
    key = int(tvm_ffi.structural_hash(question, map_free_vars=True))
    sources = _sources(expr)
    for other, answer in _KNOWN.get(key, ()):
        if tvm_ffi.structural_equal(question, other, map_free_vars=True):
            if isinstance(answer, str):
                return answer
            rotary, turned, tables = answer
            return rotary, sources[turned], [sources[t] for t in tables]
    found = classify_rotary(expr, d, size, heads, dict(ranges))
    if isinstance(found, str):
        kept: Any = found
    else:
        rotary, turned, tables = found
        kept = rotary, _place(sources, turned), [_place(sources, t) for t in tables]
    if len(_KNOWN) >= _MOST:
        _KNOWN.clear()
    _KNOWN.setdefault(key, []).append((question, kept))
    return found


def _sources(expr: Any) -> list[Any]:
    return [load.source for load in buffer_loads(expr)]


def _place(sources: list[Any], wanted: Any) -> int:
    return next(i for i, source in enumerate(sources) if source.same_as(wanted))
