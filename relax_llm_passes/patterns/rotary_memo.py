"""Remember what a rotary is: the layers of a model ask the same question with other names.

Classifying a rotary looks at every depth of a head one by one, which is most of the time of finding
attention in a deep model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..kernels.scalar_expr import buffer_loads, i64
from ..structural_memo import StructuralMemo

__all__ = ["remembered"]


def remembered(classify: Callable[..., Any]) -> Callable[..., Any]:
    """Answer from memory where an expression differs from an earlier one in names only.

    The function takes an expression, its depth variable and size, other index variables and the
    ranges of all; it returns a reason, or plain data and the tensors (one, and a list) in roles.
    """
    # Tensors in answers as places among the loads.
    memo = StructuralMemo()

    @functools.wraps(classify)
    def ask(expr: Any, d: Any, size: int, heads: Sequence[Any], ranges: Mapping[Any, Any]) -> Any:
        extents = [i64(e) for e in ranges.values()]
        parts = [expr, d, i64(size), i64(len(heads)), *heads, *ranges, *extents]
        sources = list(dict.fromkeys(load.source for load in buffer_loads(expr)))
        question, answer = memo.get(parts)
        if isinstance(answer, str):
            return answer
        if answer is not None:
            found, turned, tables = answer
            return found, sources[turned], [sources[t] for t in tables]
        result = classify(expr, d, size, heads, ranges)
        kept = result
        if not isinstance(result, str):
            found, turned, tables = result
            kept = found, _place(sources, turned), [_place(sources, t) for t in tables]
        memo.put(question, kept)
        return result

    return ask


def _place(sources: list[Any], wanted: Any) -> int:
    return next(i for i, source in enumerate(sources) if source.same_as(wanted))
