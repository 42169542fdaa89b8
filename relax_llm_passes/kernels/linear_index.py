"""Integer index arithmetic as polynomials: exact division by symbolic sizes.

A reshape turns indices into quotients and remainders of a row-major position. With static sizes
TVM's analyzer undoes them; with symbolic ones it does not know that an axis stays below its own
extent. Here an index is a polynomial in axes and sizes, and `a // b` is carried out when the rest
is provably within [0, b).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

__all__ = ["Polynomial", "polynomial"]

Monomial = tuple[int, ...]  # positions of variables, sorted


class Polynomial:
    """Integer coefficients by monomial; variables are numbered by a shared list."""

    def __init__(self, terms: Mapping[Monomial, int], names: list[Any]) -> None:
        self.terms = {m: c for m, c in terms.items() if c}
        self.names = names

    def __add__(self, other: Polynomial) -> Polynomial:
        out = dict(self.terms)
        for m, c in other.terms.items():
            out[m] = out.get(m, 0) + c
        return Polynomial(out, self.names)

    def __mul__(self, other: Polynomial) -> Polynomial:
        out: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                key = tuple(sorted(m + n))
                out[key] = out.get(key, 0) + c * d
        return Polynomial(out, self.names)

    def __neg__(self) -> Polynomial:
        return Polynomial({m: -c for m, c in self.terms.items()}, self.names)

    def expression(self, dtype: str = "int64") -> Any:
        """Return the polynomial as an expression."""
        total: Any = None
        for m, c in sorted(self.terms.items(), key=lambda t: (-len(t[0]), t[0])):
            term: Any = None
            for i in m:
                v = self.names[i]
                v = v if str(v.ty.dtype) == dtype else tirx.Cast(dtype, v)
                term = v if term is None else term * v
            if term is None:
                term = tirx.IntImm(dtype, c)
            elif c != 1:
                term = term * tirx.IntImm(dtype, c)
            total = term if total is None else total + term
        return tirx.IntImm(dtype, 0) if total is None else total

    def divide(
        self, by: Polynomial, extents: Mapping[int, Polynomial]
    ) -> tuple[Polynomial, Polynomial] | None:
        """Return (quotient, rest) with 0 <= rest < by, or None when that cannot be shown."""
        if len(by.terms) != 1:
            return None
        ((divisor, scale),) = by.terms.items()
        if scale <= 0:
            return None
        quotient: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            left = list(m)
            divisible = c % scale == 0
            for v in divisor:
                if v in left:
                    left.remove(v)
                else:
                    divisible = False
            if divisible:
                quotient[tuple(left)] = c // scale
            else:
                rest[m] = c
        remainder = Polynomial(rest, self.names)
        if any(c < 0 for c in rest.values()):
            return None
        most = remainder.highest(extents)
        if most is None:
            return None
        gap = by + (-most)
        constant = gap.terms.get((), 0)
        if constant < 1 or any(c < 0 for c in gap.terms.values()):
            return None
        return Polynomial(quotient, self.names), remainder

    def highest(self, extents: Mapping[int, Polynomial]) -> Polynomial | None:
        """Replace every axis by its extent less one; sizes stay."""
        one = Polynomial({(): -1}, self.names)
        total = Polynomial({}, self.names)
        for m, c in self.terms.items():
            term = Polynomial({(): c}, self.names)
            for v in m:
                if v in extents:
                    term = term * (extents[v] + one)
                else:
                    term = term * Polynomial({(v,): 1}, self.names)
            total = total + term
        return total


def polynomial(expr: Any, names: list[Any], extents: Mapping[Any, Any]) -> Polynomial | None:
    """Return `expr` as a polynomial, or None when it is none.

    Parameters
    ----------
    expr : expression
        Of integers, with +, -, *, // and %.
    names : list
        Variables by number; new ones are appended.
    extents : mapping of variable to expression
        The axes: each runs from 0 to its extent. All other variables are sizes (at least 1).
    """

    def number(v: Any) -> int:
        for i, known in enumerate(names):
            if known.same_as(v):
                return i
        names.append(v)
        return len(names) - 1

    def go(e: Any) -> Polynomial | None:
        if isinstance(e, int):
            return Polynomial({(): e}, names)
        if isinstance(e, tirx.IntImm):
            return Polynomial({(): int(e.value)}, names)
        if isinstance(e, tirx.Var):
            return Polynomial({(number(e),): 1}, names)
        if isinstance(e, tirx.Cast) and "int" in str(e.ty.dtype):
            return go(e.value)
        if isinstance(e, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)):
            a, b = go(e.a), go(e.b)
            if a is None or b is None:
                return None
            if isinstance(e, tirx.Add):
                return a + b
            if isinstance(e, tirx.Sub):
                return a + (-b)
            if isinstance(e, tirx.Mul):
                return a * b
            bounds = {}
            for v, extent in extents.items():
                bound = go(extent)
                if bound is None:
                    return None
                bounds[number(v)] = bound
            parts = a.divide(b, bounds)
            if parts is None:
                return None
            return parts[0] if isinstance(e, tirx.FloorDiv) else parts[1]
        return None

    return go(expr)
