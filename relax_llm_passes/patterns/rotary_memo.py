"""Remember what a rotary is: the layers of a model ask the same question with other names.

Classifying a rotary looks at every depth of a head one by one, which is most of the time of finding
attention in a deep model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi

from ..kernels.scalar_expr import buffer_loads, i64

__all__ = ["remembered"]

_MOST = 256


def remembered(classify: Callable[..., Any]) -> Callable[..., Any]:
    """Answer from memory where an expression differs from an earlier one in names only.

    The function takes an expression, its depth variable and size, other index variables and the
    ranges of all; it returns a reason, or plain data and the tensors (one, and a list) in roles.
    """
    # Hash to questions that have it, each with its answer; tensors as places among the loads.
    known: dict[int, list[tuple[Any, Any]]] = {}

    @functools.wraps(classify)
    def ask(expr: Any, d: Any, size: int, heads: Sequence[Any], ranges: Mapping[Any, Any]) -> Any:
        extents = [i64(e) for e in ranges.values()]
        question = tvm_ffi.convert([expr, d, i64(size), i64(len(heads)), *heads, *ranges, *extents])
        key = int(tvm_ffi.structural_hash(question, map_free_vars=True))
        sources = list(dict.fromkeys(load.source for load in buffer_loads(expr)))
        for other, answer in known.get(key, ()):
            if tvm_ffi.structural_equal(question, other, map_free_vars=True):
                if isinstance(answer, str):
                    return answer
                found, turned, tables = answer
                return found, sources[turned], [sources[t] for t in tables]
        result = classify(expr, d, size, heads, ranges)
        kept = result
        if not isinstance(result, str):
            found, turned, tables = result
            kept = found, _place(sources, turned), [_place(sources, t) for t in tables]
        if len(known) >= _MOST:
            known.clear()
        known.setdefault(key, []).append((question, kept))
        return result

    return ask


def _place(sources: list[Any], wanted: Any) -> int:
    return next(i for i, source in enumerate(sources) if source.same_as(wanted))
