"""One token of RWKV-4's recurrence: a weighted average per channel, kept in the log domain.

    x = u + k;          q = max(peak, x);   a = exp(peak - q);      b = exp(x - q)
    out = (a * num + b * v) / (a * den + b)
    y = peak + w;       p = max(y, k);      c = exp(y - p);         d = exp(k - p)
    num' = c * num + d * v;                 den' = c * den + d;     peak' = p

Found from the division, by value: importers write `u + k` and `peak + w` out twice. Operands of
sums, products and maxima may come in either order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dataflow import FunctionView, is_var
from ..report import Refusal
from .group_norm import is_view
from .shapes import same_dims
from .wkv_steps import Step, Stop, origin

__all__ = ["find_softmax_steps"]

_COMMUTATIVE = ("relax.add", "relax.multiply", "relax.maximum")
_NUMBERED = (*_COMMUTATIVE, "relax.subtract", "relax.divide", "relax.exp")


class _Values:
    """Numbers for values: equal for two bindings that compute the same from the same."""

    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self._number: dict[Any, int] = {}
        self._known: dict[Any, int] = {}
        self.named: dict[int, list[Any]] = {}
        for binding in view.bindings:
            var = binding.var
            if not view.resolve(var).same_as(var):
                continue
            call = view.call(var)
            if call is not None and call.op.name in _NUMBERED:
                parts = [self(a) for a in call.args]
                if call.op.name in _COMMUTATIVE:
                    parts.sort()
                self._set(var, (call.op.name, *parts))
            elif is_view(view, var) and not origin(view, var).same_as(var):
                self._number[var] = self(origin(view, var))
            self.named.setdefault(self(var), []).append(var)

    def _set(self, var: Any, key: Any) -> None:
        self._number[var] = self._known.setdefault(key, len(self._known))

    def __call__(self, expr: Any) -> int:
        expr = self.view.resolve(expr)
        if not is_var(expr):
            value = self.view.scalar(expr)
            key = ("constant", id(expr) if value is None else float(value))
            return self._known.setdefault(key, len(self._known))
        if expr not in self._number:
            self._set(expr, ("leaf", expr))
        return self._number[expr]


class _Finder:
    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self.number = _Values(view)

    def pairs(self, expr: Any, op: str) -> list[tuple[Any, Any]]:
        """Return the operands of a binary operator in both orders; none if it is another."""
        call = self.view.call(expr, op)
        if call is None:
            return []
        a, b = (origin(self.view, x) for x in call.args)
        return [(a, b)] if op == "relax.subtract" else [(a, b), (b, a)]

    def exponent(self, expr: Any) -> tuple[Any, Any] | None:
        """Read exp(x - q) as (x, q)."""
        call = self.view.call(expr, "relax.exp")
        if call is None:
            return None
        found = self.pairs(origin(self.view, call.args[0]), "relax.subtract")
        return found[0] if found else None

    def is_max(self, expr: Any, a: Any, b: Any) -> bool:
        number = self.number
        wanted = {number(a), number(b)}
        return any({number(x), number(y)} == wanted for x, y in self.pairs(expr, "relax.maximum"))

    def weighted(self, total: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Read a * den + b as (a, den, b), a and b exponentials."""
        for product, b in self.pairs(total, "relax.add"):
            if self.exponent(b) is None:
                continue
            for a, den in self.pairs(product, "relax.multiply"):
                if self.exponent(a) is not None:
                    yield a, den, b

    def averaged(self, total: Any, a: Any, b: Any) -> tuple[Any, Any] | None:
        """Read a * num + b * v as (num, v)."""
        number = self.number
        for left, right in self.pairs(total, "relax.add"):
            for x, num in self.pairs(left, "relax.multiply"):
                for y, v in self.pairs(right, "relax.multiply"):
                    if number(x) == number(a) and number(y) == number(b):
                        return num, v
        return None

    def match(self, division: Any) -> Step | None:
        call = self.view.call(division)
        top, bottom = (origin(self.view, x) for x in call.args)  # type: ignore[union-attr]
        number = self.number
        for a, den, b in self.weighted(bottom):
            found = self.averaged(top, a, b)
            (peak, q), (x, q2) = self.exponent(a), self.exponent(b)  # type: ignore[misc]
            if found is None or number(q) != number(q2) or not self.is_max(q, peak, x):
                continue
            num, v = found
            sums = self.pairs(x, "relax.add")
            if not sums:
                continue
            return self.update(division, sums, num, den, peak, v)
        return None

    def update(self, division: Any, sums: list[Any], num: Any, den: Any, peak: Any, v: Any) -> Step:
        """Find the new state among what reads the old one."""
        view, number = self.view, self.number
        for k, u in sums:
            for product in self.users(den):
                for total in self.users(product):
                    for c, old, d in self.weighted(total):
                        (y, p), (key, p2) = self.exponent(c), self.exponent(d)  # type: ignore[misc]
                        decays = [
                            w for z, w in self.pairs(y, "relax.add") if number(z) == number(peak)
                        ]
                        if (
                            number(old) != number(den)
                            or number(key) != number(k)
                            or number(p) != number(p2)
                            or not decays
                            or not self.is_max(p, y, key)
                        ):
                            continue
                        new_num = self.new_numerator(num, c, d, v)
                        return self.step(
                            division,
                            {"k": k, "v": v, "w": decays[0], "u": u},
                            {"num": num, "den": den, "peak": peak},
                            {"num": new_num, "den": view.resolve(total), "peak": self.first(p)},
                        )
        raise Stop("an average of exponentials whose running sums are not carried on")

    def first(self, value: Any) -> Any:
        """Return the binding of a value that was computed several times."""
        return self.number.named[self.number(value)][0]

    def users(self, expr: Any) -> list[Any]:
        out = []
        for var in self.number.named.get(self.number(expr), [self.view.resolve(expr)]) or []:
            out += [b.var for b in self.view.users(var)]
        if not out:
            out = [b.var for b in self.view.users(expr)]
        return out

    def new_numerator(self, num: Any, c: Any, d: Any, v: Any) -> Any:
        for product in self.users(num):
            for total in self.users(product):
                found = self.averaged(total, c, d)
                if found is not None and [self.number(x) for x in found] == [
                    self.number(num),
                    self.number(v),
                ]:
                    return self.view.resolve(total)
        raise Stop("the numerator is not carried on as the denominator is")

    def step(
        self, division: Any, operands: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
    ) -> Step:
        view = self.view
        full = view.shape(old["den"])
        if full is None or not full:
            raise Stop("the shape of the state is unknown")
        for value in (*old.values(), *new.values(), division):
            if not same_dims(view.shape(value) or (), full):
                raise Stop("numerator, denominator, maximum and output differ in shape")
        leaves = {view.resolve(x) for x in (*operands.values(), *old.values()) if is_var(x)}
        core: dict[Any, None] = {}
        pending = [view.resolve(division), *new.values()]
        while pending:
            var = view.resolve(pending.pop())
            if not is_var(var) or var in leaves or var in core:
                continue
            if view.call(var, *_NUMBERED) is None and not is_view(view, var):
                raise Stop(f"{var.name} is no part of the average")
            core[var] = None
            call: Any = view.call(var)
            pending += call.args[:1] if is_view(view, var) else call.args[:]
        return Step(
            "softmax",
            list(core),
            {name: (x, "vector") for name, x in operands.items()},
            old,
            new,
            view.resolve(division),
            tuple(full),
        )


def find_softmax_steps(view: FunctionView, kind: str) -> Iterator[Step | Refusal]:
    """Yield the tokens of RWKV-4 in a scope, in program order, and near misses."""
    finder: _Finder | None = None
    for binding in view.bindings:
        var = binding.var
        if view.call(var, "relax.divide") is None or not view.resolve(var).same_as(var):
            continue
        if finder is None:
            finder = _Finder(view)
        try:
            found = finder.match(var)
        except Stop as stop:
            yield Refusal(str(stop), kind, view.name, var.name)
            continue
        if found is not None:
            yield found
