"""Which keys a mask leaves, read from the score expression: what a kernel may skip.

The score is an expression over the query and key position. Each comparison in it that is linear in
the key position is tried: if the score becomes a constant mask value when the comparison fails (or
holds), then keys beyond that border have no weight. A border may be a position from memory (the
length of a cache of fixed capacity). Everything else keeps the full range, and the kernel evaluates
the mask for every score all the same, so a border that is not found costs time only.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from ..kernels.scalar_expr import (
    any_node,
    buffer_loads,
    depends_on,
    i64,
    rewrite,
    substitute,
    widened,
)

__all__ = ["key_range"]

# finfo(float16).min is the smallest mask value in use. A score this low next to any score that
# float16 can hold (and that is not itself as low) has weight exp(-large) = 0.
_MASK_VALUE = -6.0e4

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def key_range(
    score: Any,
    s: Any,
    t: Any,
    S: Any,
    T: Any,
    analyzer: Any,
    x: Any,
) -> tuple[Any, Any]:
    """Return (begin, end): keys outside have weight 0 in row s. Both never fall as s grows.

    Parameters
    ----------
    score : float32 expression over s, t and x (the product)
    S, T : number of queries and keys
    analyzer : knows the ranges of the variables
    """
    begin, end = i64(0), i64(T)
    atoms = _atoms(score, t)
    for atom in atoms:
        for holds in (False, True):
            mask = _mask_value(score, atom, holds, x)
            if mask is None:
                continue
            border = _border(atom, s, t, analyzer, allowed_when=not holds)
            if border is None:
                continue
            kind, value = border
            safe = _leaves_a_key(kind, value, mask, score, atoms, s, t, S, T, analyzer)
            if safe is False:
                continue
            if safe is not True:
                value = tirx.Select(safe, value, i64(T) if kind == "end" else i64(0))
            if kind == "end":
                end = tirx.Min(end, tirx.Max(value, i64(0)))
            else:
                begin = tirx.Max(begin, value)
    return analyzer.simplify(begin), analyzer.simplify(end)


def _atoms(score: Any, t: Any) -> list[Any]:
    found: list[Any] = []

    def note(node: Any) -> bool:
        if isinstance(node, _COMPARISONS) and depends_on(node, t):
            if not any(depends_on(load, t) for load in buffer_loads(node)):
                found.append(node)
        return False

    any_node(score, note)
    return found


def _fold(expr: Any) -> Any:
    """Fold the constants that replacing a comparison leaves behind."""

    def is_const(node: Any) -> bool:
        return isinstance(node, tirx.IntImm)

    def visit(node: Any) -> Any:
        if isinstance(node, tirx.Not):
            inner = _fold(node.a)
            return tirx.IntImm("bool", 1 - int(inner.value)) if is_const(inner) else None
        if isinstance(node, (tirx.And, tirx.Or)):
            a, b = _fold(node.a), _fold(node.b)
            neutral = 1 if isinstance(node, tirx.And) else 0
            for one, other in ((a, b), (b, a)):
                if is_const(one):
                    return other if int(one.value) == neutral else one
            return type(node)(a, b)
        if isinstance(node, tirx.Select):
            cond = _fold(node.condition)
            if is_const(cond):
                return _fold(node.true_value if int(cond.value) else node.false_value)
            return tirx.Select(cond, _fold(node.true_value), _fold(node.false_value))
        return None

    return rewrite(expr, visit)


def _mask_value(score: Any, atom: Any, holds: bool, x: Any) -> float | None:
    """Return the mask value that the score has when `atom` is (not) true, or None.

    A score to which a finite mask value is added counts as well; it is at most half the mask away
    from it for any product that is not itself near overflow.
    """
    decided = tirx.IntImm("bool", int(holds))
    new = _fold(rewrite(score, lambda n: decided if n.same_as(atom) else None))
    return _as_mask(new)


def _as_mask(expr: Any) -> float | None:
    if isinstance(expr, tirx.FloatImm):
        value = float(expr.value)
        return value if value <= _MASK_VALUE else None
    if isinstance(expr, tirx.Cast):
        return _as_mask(expr.value)
    if isinstance(expr, tirx.Select):
        # Masked either way by two nested conditions.
        yes, no = _as_mask(expr.true_value), _as_mask(expr.false_value)
        return None if yes is None or no is None else max(yes, no)
    if isinstance(expr, tirx.Add):
        for side in (expr.a, expr.b):
            part = _as_mask(side)
            if part is not None and part < -1e30:
                return part
    return None


def _border(atom: Any, s: Any, t: Any, analyzer: Any, allowed_when: bool) -> tuple[str, Any] | None:
    """Return ("end", first key not allowed) or ("begin", first key allowed) for a linear atom."""
    a, b = widened(atom.a), widened(atom.b)
    gap = a - b
    step = analyzer.simplify(substitute(gap, {t: t + i64(1)}) - gap)
    if not isinstance(step, tirx.IntImm) or abs(int(step.value)) != 1:
        return None
    sign = int(step.value)
    rest = analyzer.simplify(gap - t if sign == 1 else gap + t)
    if depends_on(rest, t):
        return None
    # gap = sign * t + rest, compared with 0.
    kind = type(atom)
    upper_if_true = (kind in (tirx.LT, tirx.LE)) == (sign == 1)
    strict = kind in (tirx.LT, tirx.GT)
    edge = -rest if sign == 1 else rest  # gap is 0 at t = edge
    if upper_if_true:
        first_false = edge if strict else edge + i64(1)  # true for t < first_false
        result = ("end", first_false) if allowed_when else ("begin", first_false)
    else:
        first_true = edge + i64(1) if strict else edge  # true for t >= first_true
        result = ("begin", first_true) if allowed_when else ("end", first_true)
    value = analyzer.simplify(result[1])
    slope = analyzer.simplify(substitute(value, {s: s + i64(1)}) - value)
    if not isinstance(slope, tirx.IntImm) or int(slope.value) < 0:
        return None
    return result[0], value


def _leaves_a_key(
    kind: str,
    value: Any,
    mask: float,
    score: Any,
    atoms: list[Any],
    s: Any,
    t: Any,
    S: Any,
    T: Any,
    analyzer: Any,
) -> Any:
    """Tell whether skipping is exact: True, False, or the condition under which it is.

    With -inf it always is: rows that lose every key have no weight anywhere. With a finite mask
    value such a row is the mean of *all* values, so some key must be sure to remain. Where that
    cannot be proved (a length from memory), it is asked when the kernel runs.
    """
    if mask == -math.inf:
        return True
    if any(depends_on(load, t) for load in buffer_loads(score)):
        return False  # another mask, from memory, may take the keys that this one leaves
    if kind == "end":
        if analyzer.can_prove(value >= i64(1)):
            return True
        # Borders never fall from row to row: the first row has the fewest keys.
        return substitute(value, {s: i64(0)}) >= i64(1)
    # A lower border must stay below every upper border, which for windows is the query itself.
    answer: Any = True
    if not analyzer.can_prove(value <= i64(T) - i64(1)):
        answer = substitute(value, {s: i64(S) - i64(1)}) <= i64(T) - i64(1)
    for atom in atoms:
        for allowed in (False, True):
            border = _border(atom, s, t, analyzer, allowed)
            if (
                border is not None
                and border[0] == "end"
                and _mask_value(score, atom, not allowed, None) is not None
                and not analyzer.can_prove(value < border[1])
            ):
                return False
    return answer
