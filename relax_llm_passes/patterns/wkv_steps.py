"""One token of a recurrence, in the operators that importers produce: what is read and written.

RWKV-5, 6 keep the state key-major: kv = k (.., N, 1) @ v (.., 1, N); out = r (.., 1, N) @ (u * kv +
state); state' = kv + w * state. RWKV-7 keeps it value-major: vk = v (.., N, 1) @ k (.., 1, N);
state' = state * w + state @ (a (.., N, 1) @ b (.., 1, N)) + vk; out = state' @ r (.., N, 1).

Operands may come in either order, sums in any grouping, with views that keep the shape anywhere.
Which tensors the operands come from is decided in `unrolled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ..dataflow import FunctionView
from ..report import Refusal
from .group_norm import is_view
from .shapes import same_dims, static

__all__ = ["Step", "Stop", "find_matrix_steps", "origin"]


class Stop(Exception):
    """The spelling starts like a recurrence and goes on otherwise."""


@dataclass
class Step:
    """One token of one recurrence.

    Attributes
    ----------
    form : str
        "bonus" (RWKV-5, 6), "delta" (RWKV-7) or "softmax" (RWKV-4).
    core : list of Var
        The recurrence's own bindings.
    operands : dict
        By role: the value as the recurrence reads it, and where its channel is: "column"
        (.., N, 1), "row" (.., 1, N) or "vector" (.., N).
    old, new : dict
        State before and after, by role.
    out : Var
        The token's output.
    full : tuple
        Shape of the state: leading axes, then (N, N), or (channels) for "softmax".
    """

    form: str
    core: list[Any]
    operands: dict[str, tuple[Any, str]]
    old: dict[str, Any]
    new: dict[str, Any]
    out: Any
    full: tuple[Any, ...]


def origin(view: FunctionView, expr: relax.Expr) -> relax.Expr:
    """Look through views that keep the shape, whoever reads them."""
    cur = view.resolve(expr)
    while is_view(view, cur):
        source = view.resolve(view.value(cur).args[0])
        if not same_dims(view.shape(source) or (), view.shape(cur) or ()):
            break
        cur = source
    return cur


@dataclass
class _Outer:
    """An outer product of two vectors per head: column (.., N, 1) times row (.., 1, N)."""

    var: relax.Var
    column: relax.Expr
    row: relax.Expr


class _Finder:
    def __init__(self, view: FunctionView) -> None:
        self.view = view

    def shape(self, expr: relax.Expr) -> tuple[Any, ...]:
        found = self.view.shape(expr)
        if found is None:
            raise Stop("a shape is unknown")
        return found

    def readers(self, var: relax.Expr) -> list[relax.Var]:
        """Variables that read a value, views that keep the shape looked through."""
        out = []
        for user in self.view.users(var):
            if is_view(self.view, user.var) and same_dims(
                self.view.shape(user.var) or (), self.view.shape(var) or ()
            ):
                out += self.readers(user.var)
            else:
                out.append(user.var)
        return out

    def views_of(self, var: relax.Expr) -> list[relax.Var]:
        """Views of `var` that keep its shape (a broadcast to the shape it has)."""
        out = []
        for user in self.view.users(var):
            if is_view(self.view, user.var) and same_dims(
                self.view.shape(user.var) or (), self.view.shape(var) or ()
            ):
                out += [user.var, *self.views_of(user.var)]
        return out

    def outer(self, var: relax.Expr) -> _Outer | None:
        """Read `var` as an outer product."""
        view = self.view
        call = view.call(var, "relax.matmul", "relax.multiply")
        if call is None:
            return None
        out = view.shape(var)
        a, b = view.shape(call.args[0]), view.shape(call.args[1])
        if out is None or a is None or b is None or len(out) < 3 or len(a) < 2 or len(b) < 2:
            return None
        size = static(out[-1])
        if size is None or size < 2 or static(out[-2]) != size:
            return None
        pairs = [(call.args[0], call.args[1], a, b)]
        if call.op.name == "relax.multiply":
            pairs.append((call.args[1], call.args[0], b, a))
        for col, row, ca, ra in pairs:
            if (static(ca[-2]), static(ca[-1])) == (size, 1) and (
                (static(ra[-2]), static(ra[-1])) == (1, size)
            ):
                if not same_dims(ca[:-2], out[:-2]) or not same_dims(ra[:-2], out[:-2]):
                    return None
                return _Outer(view.resolve(var), col, row)
        return None

    def private(self, var: relax.Expr, readers: int = 1) -> None:
        if self.view.is_output(var) or any(self.view.is_output(v) for v in self.views_of(var)):
            raise Stop(f"{var.name} is returned")
        if len(self.readers(var)) != readers:
            raise Stop(f"{var.name} is read {len(self.readers(var))} times, expected {readers}")

    def operands(self, var: relax.Expr, op: str) -> list[relax.Expr] | None:
        call = self.view.call(var, op)
        return None if call is None else [origin(self.view, a) for a in call.args]

    def bonus(self, kv: _Outer) -> Step | None:
        """RWKV-5 and 6, from the outer product k v."""
        view = self.view
        readers = self.readers(kv.var)
        if len(readers) > 2 and any(self.looks_like_bonus(x) for x in readers):
            raise Stop(f"{kv.var.name} is read {len(readers)} times, expected 2")
        if len(readers) != 2:
            return None
        for first, second in (readers, readers[::-1]):
            weighted = self.operands(first, "relax.multiply")
            if weighted is None or self.operands(second, "relax.add") is None:
                continue
            self.private(kv.var, 2)
            u = weighted[1] if weighted[0].same_as(kv.var) else weighted[0]
            self.private(first)
            summed = self.readers(first)[0]
            terms = self.operands(summed, "relax.add")
            if terms is None:
                return None
            state = terms[1] if terms[0].same_as(view.resolve(first)) else terms[0]
            self.private(summed)
            out = self.readers(summed)[0]
            product = self.operands(out, "relax.matmul")
            if product is None or not product[1].same_as(view.resolve(summed)):
                return None
            r = view.value(out).args[0]
            update = self.operands(second, "relax.add") or []
            decayed = update[1] if update[0].same_as(kv.var) else update[0]
            factors = self.operands(decayed, "relax.multiply")
            if factors is None:
                raise Stop(f"{second.name} adds what is no decayed state")
            if factors[0].same_as(state):
                w = factors[1]
            elif factors[1].same_as(state):
                w = factors[0]
            else:
                raise Stop(f"{decayed.name} decays another tensor than the state")
            self.private(decayed)
            return self.bonus_step(kv, [first, summed, out, decayed, second], r, u, w, state)
        return None

    def looks_like_bonus(self, var: relax.Var) -> bool:
        """Whether `var` is a product that, with a state added, is multiplied by r."""
        if self.operands(var, "relax.multiply") is None:
            return False
        sums = [x for x in self.readers(var) if self.operands(x, "relax.add") is not None]
        return any(self.operands(x, "relax.matmul") for s in sums for x in self.readers(s))

    def bonus_step(self, kv: _Outer, chain: list[Any], r: Any, u: Any, w: Any, state: Any) -> Step:
        first, summed, out, _decayed, second = chain
        full = self.shape(kv.var)
        core = [kv.var, *chain]
        for x in (kv.var, first, summed):
            core += self.views_of(x)
        if not same_dims(self.shape(state), full) or not same_dims(self.shape(second), full):
            raise Stop("the state is not one matrix per head")
        if not same_dims(self.shape(r), [*full[:-2], 1, full[-1]]):
            raise Stop(f"r has shape {self.shape(r)}, expected one row per head")
        for x in (u, w):
            self.per_key(x, full, column=True)
        return Step(
            "bonus",
            core,
            {
                "r": (r, "row"),
                "k": (kv.column, "column"),
                "v": (kv.row, "row"),
                "w": (w, "column"),
                "u": (u, "column"),
            },
            {"state": state},
            {"state": self.view.resolve(second)},
            self.view.resolve(out),
            tuple(full),
        )

    def delta(self, ab: _Outer) -> Step | None:
        """RWKV-7, from the outer product a b."""
        view = self.view
        readers = self.readers(ab.var)
        if len(readers) != 1:
            return None
        turned = readers[0]
        product = self.operands(turned, "relax.matmul")
        if product is None or not product[1].same_as(ab.var):
            return None
        state = product[0]
        full = self.shape(ab.var)
        if not same_dims(self.shape(state), full):
            return None
        self.private(ab.var)
        # Collect the three terms of the new state: climb the sums that read them.
        new_state, core = self.top_sum(turned)
        terms = self.terms(new_state)
        decayed = outer = None
        for term in terms:
            if term.same_as(view.resolve(turned)):
                continue
            factors = self.operands(term, "relax.multiply")
            if factors is not None and any(f.same_as(state) for f in factors):
                decayed = term
                w = factors[1] if factors[0].same_as(state) else factors[0]
                continue
            vk = self.outer(term)
            if vk is not None:
                outer = vk
        if len(terms) != 3 or decayed is None or outer is None:
            raise Stop(f"{new_state.name} is no sum of decayed state, state @ a b and v k")
        for x in (decayed, outer.var, turned):
            self.private(x)
        out = None
        for reader in self.readers(new_state):
            got = self.operands(reader, "relax.matmul")
            if got is not None and got[0].same_as(new_state):
                if static((view.shape(got[1]) or (0,))[-1]) != 1:
                    continue  # the next token's product with a b
                if out is not None:
                    raise Stop("two products read the new state")
                out = reader
        if out is None:
            raise Stop("nothing multiplies the new state by r")
        r = view.value(out).args[1]
        if not same_dims(self.shape(r), [*full[:-2], full[-1], 1]):
            raise Stop(f"r has shape {self.shape(r)}, expected one column per head")
        self.per_key(w, full, column=False)
        core += [ab.var, outer.var, turned, decayed, out]
        for x in (ab.var, outer.var, turned, decayed):
            core += self.views_of(x)
        for x in self.views_of(new_state):
            if [view.resolve(b.var) for b in view.users(x)] == [view.resolve(out)]:
                core.append(x)
        return Step(
            "delta",
            core,
            {
                "r": (r, "column"),
                "k": (outer.row, "row"),
                "v": (outer.column, "column"),
                "w": (w, "row"),
                "a": (ab.column, "column"),
                "b": (ab.row, "row"),
            },
            {"state": state},
            {"state": view.resolve(new_state)},
            view.resolve(out),
            tuple(full),
        )

    def top_sum(self, var: relax.Expr) -> tuple[relax.Var, list[relax.Var]]:
        """Climb the sums above `var` until one has three terms; also return those passed."""
        passed: list[relax.Var] = []
        cur = self.view.resolve(var)
        while True:
            readers = self.readers(cur)
            if len(readers) != 1 or self.operands(readers[0], "relax.add") is None:
                break
            if passed and self.view.is_output(cur):
                break
            cur = self.view.resolve(readers[0])
            passed.append(cur)
            if len(self.terms(cur)) >= 3:
                break
        if not passed:
            raise Stop(f"{var.name} is not added to anything")
        return cur, passed

    def terms(self, var: relax.Expr) -> list[relax.Expr]:
        """Return the terms of a sum, private partial sums taken apart."""
        got = self.operands(var, "relax.add")
        if got is None:
            return [self.view.resolve(var)]
        out = []
        for x in got:
            inner = self.operands(x, "relax.add")
            if inner is not None and len(self.readers(x)) == 1 and not self.view.is_output(x):
                out += self.terms(x)
            else:
                out.append(x)
        return out

    def per_key(self, expr: relax.Expr, full: Any, column: bool) -> None:
        """Check that w or u holds one value per key and head, or is spread over heads."""
        shape = self.shape(expr)
        size = static(full[-1])
        want = (size, 1) if column else (1, size)
        if len(shape) < 2 or (static(shape[-2]), static(shape[-1])) != want:
            raise Stop(f"{shape} is no vector per head that scales the state's keys")
        lead = list(shape[:-2])
        while lead and static(lead[0]) == 1:
            lead.pop(0)
        whole = list(full[:-2])
        if len(lead) > len(whole) or not same_dims(lead, whole[len(whole) - len(lead) :]):
            raise Stop(f"{shape} does not follow the state's heads")


def find_matrix_steps(view: FunctionView, kind: str) -> Iterator[Step | Refusal]:
    """Yield the tokens of RWKV-5, 6 and 7 in a scope, in program order, and near misses."""
    finder = _Finder(view)
    taken: set[Any] = set()
    for binding in view.bindings:
        var = binding.var
        if view.call(var, "relax.matmul") is None or not view.resolve(var).same_as(var):
            continue
        try:
            outer = finder.outer(var)
            found = None if outer is None else finder.bonus(outer) or finder.delta(outer)
        except Stop as stop:
            yield Refusal(str(stop), kind, view.name, var.name)
            continue
        if found is not None and not taken & set(found.core):
            taken.update(found.core)
            yield found
