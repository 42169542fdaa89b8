"""Recognise the wkv recurrences in the operators that importers produce, one token at a time.

The composite's contract::

    kind "wkv", outputs "out" and "state"
    roles  r, k, v, w, u, state            (attrs form "bonus": RWKV-5 and 6)
           r, k, v, w, a, b, state         (attrs form "delta": RWKV-7)
    attrs  form, size (N), heads, value_major, decay_per_token

RWKV-5, 6 keep the state key-major: kv = k (.., N, 1) @ v (.., 1, N); out = r (.., 1, N) @ (u * kv +
state); state' = kv + w * state. RWKV-7 keeps it value-major: vk = v (.., N, 1) @ k (.., 1, N);
state' = state * w + state @ (a (.., N, 1) @ b (.., 1, N)) + vk; out = state' @ r (.., N, 1).

Operands may come in either order, sums in any grouping, and vectors through views and casts to
float32. A prefill that was unrolled over tokens is as many matches. Refused, with the reason: an
intermediate (the outer product, the decayed state) that something else reads, unknown shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from ..dataflow import FunctionView
from ..outline import Region
from ..report import Refusal
from .group_norm import is_view, strip_views
from .shapes import same_dims, static

__all__ = ["KIND", "find_wkv"]

KIND = "wkv"
FLOATS = ("float16", "bfloat16", "float32")


@dataclass
class _Outer:
    """An outer product of two vectors per head: column (.., N, 1) times row (.., 1, N)."""

    var: relax.Var
    column: relax.Expr
    row: relax.Expr
    members: list[relax.Var] = field(default_factory=list)


class _Stop(Exception):
    """The spelling starts like a recurrence and goes on otherwise."""


class _Finder:
    def __init__(self, view: FunctionView) -> None:
        self.view = view

    # Small questions

    def shape(self, expr: relax.Expr) -> tuple[Any, ...]:
        found = self.view.shape(expr)
        if found is None:
            raise _Stop("a shape is unknown")
        return found

    def through(self, expr: relax.Expr, members: list[relax.Var]) -> relax.Expr:
        """Look through views that only this path reads, remembering them as members."""
        root, passed = strip_views(self.view, expr)
        members += passed
        return root

    def vector(self, expr: relax.Expr, members: list[relax.Var]) -> relax.Expr:
        """Return the tensor a vector comes from: through private views and widening casts."""
        view = self.view
        cur = view.resolve(expr)
        while view.index(cur) >= 0 and len(view.users(cur)) == 1 and not view.is_output(cur):
            if is_view(view, cur):
                source = view.resolve(view.value(cur).args[0])
            else:
                cast = view.call(cur, "relax.astype")
                if cast is None or view.dtype(cur) != "float32":
                    break
                source = view.resolve(cast.args[0])
                if view.dtype(source) not in FLOATS:
                    break
            if view.shape(source) is None:
                break
            members.append(cur)
            cur = source
        return cur

    def readers(self, var: relax.Expr) -> list[relax.Var]:
        """Variables that read a value, views in between looked through."""
        out = []
        for user in self.view.users(var):
            if is_view(self.view, user.var) and user.var is not None:
                same = same_dims(self.view.shape(user.var) or (), self.view.shape(var) or ())
                if same:
                    out += self.readers(user.var)
                    continue
            out.append(user.var)
        return out

    def noop_views(self, var: relax.Expr) -> list[relax.Var]:
        """Views of `var` that keep its shape (a broadcast to the shape it has)."""
        out = []
        for user in self.view.users(var):
            if is_view(self.view, user.var) and same_dims(
                self.view.shape(user.var) or (), self.view.shape(var) or ()
            ):
                out += [user.var, *self.noop_views(user.var)]
        return out

    def same(self, a: relax.Expr, b: relax.Expr) -> bool:
        return self.origin(a).same_as(self.origin(b))

    def origin(self, expr: relax.Expr) -> relax.Expr:
        """Look through views that keep the shape, whoever reads them."""
        cur = self.view.resolve(expr)
        while is_view(self.view, cur):
            source = self.view.resolve(self.view.value(cur).args[0])
            if not same_dims(self.view.shape(source) or (), self.view.shape(cur) or ()):
                break
            cur = source
        return cur

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
                found = _Outer(view.resolve(var), col, row)
                found.members.append(found.var)
                return found
        return None

    def private(self, var: relax.Expr, readers: int = 1) -> None:
        if self.view.is_output(var) or any(self.view.is_output(v) for v in self.noop_views(var)):
            raise _Stop(f"{var.name} is returned")
        if len(self.readers(var)) != readers:
            raise _Stop(f"{var.name} is read {len(self.readers(var))} times, expected {readers}")

    def operands(self, var: relax.Expr, op: str) -> list[relax.Expr] | None:
        call = self.view.call(var, op)
        return None if call is None else [self.origin(a) for a in call.args]

    # The two forms

    def bonus(self, kv: _Outer) -> Region | None:
        """RWKV-5 and 6, from the outer product k v."""
        view = self.view
        readers = self.readers(kv.var)
        if len(readers) > 2 and any(self.looks_like_bonus(x) for x in readers):
            raise _Stop(f"{kv.var.name} is read {len(readers)} times, expected 2")
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
                raise _Stop(f"{second.name} adds what is no decayed state")
            if factors[0].same_as(state):
                w = factors[1]
            elif factors[1].same_as(state):
                w = factors[0]
            else:
                raise _Stop(f"{decayed.name} decays another tensor than the state")
            self.private(decayed)
            return self.region_bonus(kv, first, summed, out, decayed, second, r, u, w, state)
        return None

    def looks_like_bonus(self, var: relax.Var) -> bool:
        """Whether `var` is a product that, with a state added, is multiplied by r."""
        if self.operands(var, "relax.multiply") is None:
            return False
        sums = [x for x in self.readers(var) if self.operands(x, "relax.add") is not None]
        return any(self.operands(x, "relax.matmul") for s in sums for x in self.readers(s))

    def region_bonus(self, kv: _Outer, *vars_and_roles: Any) -> Region:
        first, summed, out, decayed, second, r, u, w, state = vars_and_roles
        full = self.shape(kv.var)
        size = static(full[-1]) or 0
        members = [*kv.members, first, summed, out, decayed, second]
        for x in (kv.var, first, summed):
            members += self.noop_views(x)
        if not same_dims(self.shape(state), full) or not same_dims(self.shape(second), full):
            raise _Stop("the state is not one matrix per head")
        if not same_dims(self.shape(r), [*full[:-2], 1, size]):
            raise _Stop(f"r has shape {self.shape(r)}, expected one row per head")
        heads, u_all = self.spread(u, full, column=True)
        w_heads, w_all = self.spread(w, full, column=True)
        if u_all and not self.all_static(full):
            raise _Stop("u has a batch axis")
        if u_all:
            heads = self.count(full[:-2])
        if not w_all and w_heads != heads:
            raise _Stop("u and w differ in heads")
        self.batch(full, heads)
        per_token = w_all
        roles = {
            "r": self.vector(r, members),
            "k": self.vector(kv.column, members),
            "v": self.vector(kv.row, members),
            "w": self.vector(w, members),
            "u": self.vector(u, members),
            "state": self.state(state, members),
        }
        return self.region(members, roles, out, second, "bonus", size, heads, False, per_token)

    def delta(self, ab: _Outer) -> Region | None:
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
        new_state, members = self.top_sum(turned)
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
            raise _Stop(f"{new_state.name} is no sum of decayed state, state @ a b and v k")
        for x in (decayed, outer.var, turned):
            self.private(x)
        out = None
        for reader in self.readers(new_state):
            got = self.operands(reader, "relax.matmul")
            if got is not None and got[0].same_as(new_state):
                if static((view.shape(got[1]) or (0,))[-1]) != 1:
                    continue  # the next token's product with a b
                if out is not None:
                    raise _Stop("two products read the new state")
                out = reader
        if out is None:
            raise _Stop("nothing multiplies the new state by r")
        r = view.value(out).args[1]
        size = static(full[-1]) or 0
        if not same_dims(self.shape(r), [*full[:-2], size, 1]):
            raise _Stop(f"r has shape {self.shape(r)}, expected one column per head")
        w_heads, w_all = self.spread(w, full, column=False)
        heads = w_heads
        if w_all:
            head = static(full[-3])
            if head is None:
                raise _Stop("the number of heads is symbolic")
            heads = head
        self.batch(full, heads)
        members += [*ab.members, *outer.members, turned, decayed, out]
        for x in (ab.var, outer.var, turned, decayed):
            members += self.noop_views(x)
        for x in self.noop_views(new_state):
            if [self.view.resolve(b.var) for b in view.users(x)] == [view.resolve(out)]:
                members.append(x)
        roles = {
            "r": self.vector(r, members),
            "k": self.vector(outer.row, members),
            "v": self.vector(outer.column, members),
            "w": self.vector(w, members),
            "a": self.vector(ab.column, members),
            "b": self.vector(ab.row, members),
            "state": self.state(state, members),
        }
        return self.region(members, roles, out, new_state, "delta", size, heads, True, w_all)

    def top_sum(self, var: relax.Expr) -> tuple[relax.Var, list[relax.Var]]:
        members: list[relax.Var] = []
        cur = self.view.resolve(var)
        while True:
            readers = self.readers(cur)
            if len(readers) != 1 or self.operands(readers[0], "relax.add") is None:
                break
            if members and self.view.is_output(cur):
                break
            cur = self.view.resolve(readers[0])
            members.append(cur)
            if len(self.terms(cur)) >= 3:
                break
        if not members:
            raise _Stop(f"{var.name} is not added to anything")
        return cur, members

    def terms(self, var: relax.Expr) -> list[relax.Expr]:
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

    # Shapes

    def count(self, dims: Any) -> int:
        total = 1
        for d in dims:
            total *= static(d) or 0
        return total

    def all_static(self, dims: Any) -> bool:
        return all(static(d) is not None for d in dims)

    def spread(self, expr: relax.Expr, full: Any, column: bool) -> tuple[int, bool]:
        """Return (heads, whether the operand has all leading axes) of w or u.

        The operand is (.., N, 1) for `column`, else (.., 1, N), and broadcasts to the state.
        """
        shape = self.shape(expr)
        size = static(full[-1])
        want = (size, 1) if column else (1, size)
        if len(shape) < 2 or (static(shape[-2]), static(shape[-1])) != want:
            raise _Stop(f"{shape} is no vector per head that scales the state's keys")
        lead, whole = list(shape[:-2]), list(full[:-2])
        if same_dims(lead, whole) and (len(whole) > 1 or len(lead) == len(whole)):
            every = self.count(whole) if self.all_static(whole) else 0
            if len([d for d in whole if static(d) != 1]) <= 1 and every:
                # One token of one sequence: the two readings are one.
                return every, False
            return every, True
        while lead and static(lead[0]) == 1:
            lead.pop(0)
        if not lead or len(lead) > len(whole):
            raise _Stop(f"{shape} has no head axis")
        if not same_dims(lead, whole[len(whole) - len(lead) :]) or not self.all_static(lead):
            raise _Stop(f"{shape} does not follow the state's heads")
        return self.count(lead), False

    def batch(self, full: Any, heads: int) -> None:
        """Check that the heads are the innermost leading axes."""
        lead = list(full[:-2])
        count = 1
        while lead and count < heads:
            size = static(lead.pop())
            if size is None:
                raise _Stop("the head axis is symbolic")
            count *= size
        if count != heads:
            raise _Stop(f"{heads} heads do not fit the leading axes {list(full[:-2])}")

    def state(self, expr: relax.Expr, members: list[relax.Var]) -> relax.Expr:
        return self.origin(expr)

    def region(
        self,
        members: list[relax.Var],
        roles: dict[str, relax.Expr],
        out: relax.Var,
        new_state: relax.Var,
        form: str,
        size: int,
        heads: int,
        value_major: bool,
        per_token: bool,
    ) -> Region:
        view = self.view
        # Views of the old state that only the recurrence reads come along, others stay outside.
        inside = {view.resolve(m) for m in members}
        for x in self.noop_views(roles["state"]):
            if all(view.resolve(b.var) in inside for b in view.users(x)) and view.users(x):
                members.append(x)
                inside.add(view.resolve(x))
        for role, expr in roles.items():
            if view.dtype(expr) not in FLOATS:
                raise _Stop(f"{role} is {view.dtype(expr)}, expected a float")
        return Region(
            kind=KIND,
            bindings=list(dict.fromkeys(members)),
            roles=roles,
            outputs={"out": view.resolve(out), "state": view.resolve(new_state)},
            attrs={
                "form": form,
                "size": size,
                "heads": heads,
                "value_major": value_major,
                "decay_per_token": per_token,
            },
        )


def find_wkv(view: FunctionView) -> list[Region | Refusal]:
    """Find the recurrences of RWKV-5, 6 and 7 in a scope, in program order."""
    finder = _Finder(view)
    out: list[Region | Refusal] = []
    taken: set[relax.Var] = set()
    for binding in view.bindings:
        var = binding.var
        if view.call(var, "relax.matmul") is None or not view.resolve(var).same_as(var):
            continue
        try:
            outer = finder.outer(var)
            if outer is None:
                continue
            found = finder.bonus(outer) or finder.delta(outer)
        except _Stop as stop:
            out.append(Refusal(str(stop), KIND, view.name, var.name))
            continue
        if found is None or taken & set(found.bindings):
            continue
        taken.update(found.bindings)
        out.append(found)
    return out
