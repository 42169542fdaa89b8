"""Tokens of an unrolled recurrence as one region: which tensors, walked how, over how many tokens.

Steps whose state goes from one straight into the next form a chain. Every operand is read as a
tree of loads (see `affine`); when the trees of all tokens differ by a constant stride, the chain is
one loop over t. What lies between the tensors and the steps (slices, reshapes, permutations, casts,
small arithmetic that nothing else reads) joins the region, and so do the writes that collect the
outputs. A chain that cannot be one loop is refused with the reason and left as single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..dataflow import FunctionView
from ..outline import Region
from ..report import Refusal
from .absorb import absorb
from .affine import (
    FILLED,
    FLOATS,
    AffineReader,
    Apply,
    Index,
    Load,
    Number,
    Tree,
    Unreadable,
    can_follow,
    to_plain,
)
from .collectors import Collector, find_collector
from .shapes import static
from .wkv_steps import Step, Stop, origin

__all__ = ["RoleNames", "chains", "regions_of"]

# What writes to slices leave beside the recurrence itself.
_MADE = ("relax.arange", "relax.equal", *FILLED)


def chains(view: FunctionView, steps: Sequence[Step]) -> list[list[Step]]:
    """Join steps whose whole state is the state that the step before leaves, and nobody else's."""
    by_state = {frozenset(s.new.values()): s for s in steps}
    previous = {}
    following = {}
    for step in steps:
        old = frozenset(origin(view, x) for x in step.old.values())
        before = by_state.get(old)
        if before is None or before is step or before.form != step.form:
            continue
        if all(origin(view, step.old[r]).same_as(before.new[r]) for r in step.old):
            inside = {*before.core, *step.core}
            if all(_stays_inside(view, x, inside) for x in before.new.values()):
                previous[id(step)] = before
                following[id(before)] = step
    out = []
    for step in steps:
        if id(step) in previous:
            continue
        chain = [step]
        while id(chain[-1]) in following:
            chain.append(following[id(chain[-1])])
        out.append(chain)
    return out


def _stays_inside(view: FunctionView, var: Any, inside: set[Any]) -> bool:
    if view.is_output(var):
        return False
    for user in view.users(var):
        if user.var in inside:
            continue
        if not origin(view, user.var).same_as(origin(view, var)):
            return False
        if not _stays_inside(view, user.var, inside):
            return False
    return True


def regions_of(view: FunctionView, chain: list[Step], kind: str) -> Iterator[Region | Refusal]:
    """Return one region for a chain, or a refusal and what its parts give."""
    try:
        yield _Builder(view, chain, kind).region()
    except (Stop, Unreadable) as why:
        name = chain[0].out.name
        text = str(why)
        if len(chain) > 1:
            text = f"{len(chain)} tokens in a row are no one loop: {text}"
        yield Refusal(text, kind, view.name, name)
        if len(chain) > 1:
            for step in chain:
                yield from regions_of(view, [step], kind)


class _Builder:
    def __init__(self, view: FunctionView, chain: list[Step], kind: str) -> None:
        self.view, self.chain, self.kind = view, chain, kind
        self.first, self.last = chain[0], chain[-1]
        self.matrix = self.first.form != "softmax"
        self.lead = list(self.first.full[: -2 if self.matrix else -1])
        size = static(self.first.full[-1])
        if size is None:
            raise Stop("the number of channels is symbolic")
        self.size = size

    def region(self) -> Region:
        view, chain = self.view, self.chain
        core = [v for s in chain for v in s.core]
        outs = [s.out for s in chain]
        collector = find_collector(view, outs) if self.worth_collecting() else None
        if collector is not None:
            core += collector.core
            outputs = {"out": collector.result}
        elif len(outs) == 1:
            outputs = {"out": outs[0]}
        else:
            outputs = {f"out{t}": out for t, out in enumerate(outs)}
        outputs |= self.last.new
        core += [view.resolve(v) for v in outputs.values()]
        members = absorb(view, core, self.allowed)
        self.check_private(members, set(outputs.values()))
        extents: dict[str, int | None] = {f"l{i}": static(d) for i, d in enumerate(self.lead)}
        extents |= {"n": self.size, "i": self.size, "j": self.size}
        reader = AffineReader(view, extents, members)
        trees = {r: self.over_tokens(reader, r) for r in self.first.operands}
        lead: list[Index] = [{f"l{i}": 1} for i in range(len(self.lead))]
        for role, value in self.first.old.items():
            index = [*lead, {"j": 1}, {"i": 1}] if self.matrix else [*lead, {"n": 1}]
            if self.first.form == "delta":
                index[-2:] = index[:-3:-1]
            trees[role] = reader.read(value, index)
        batch_axes, trees = self.split(trees)
        roles = RoleNames()
        plain = {r: to_plain(t, roles.namer(r)) for r, t in trees.items()}
        heads = _count(self.lead[batch_axes:])
        attrs: dict[str, Any] = {
            "form": self.first.form,
            "size": self.size,
            "heads": heads,
            "batch_axes": batch_axes,
            "tokens": len(chain),
            "operands": plain,
            "out_at": None,
        }
        if len(chain) == 1 or collector is not None:
            attrs["out_at"] = self.out_at(collector, batch_axes, heads)
        for value in outputs.values():
            if view.dtype(value) not in FLOATS:
                raise Stop(f"{value.name} is {view.dtype(value)}, expected a float")
        return Region(
            kind=self.kind,
            bindings=list(members),
            roles=roles.found,
            outputs=outputs,
            attrs=attrs,
        )

    def worth_collecting(self) -> bool:
        return all(static(d) is not None for d in self.lead[1:])

    def allowed(self, var: Any) -> bool:
        return can_follow(self.view, var) or self.view.call(var, *_MADE) is not None

    def check_private(self, members: dict[Any, None], outputs: set[Any]) -> None:
        """What leaves the region are its outputs, nothing else."""
        view = self.view
        for var in members:
            if var in outputs:
                continue
            if view.is_output(var):
                raise Stop(f"{var.name} is returned")
            for user in view.users(var):
                if view.resolve(user.var) not in members:
                    raise Stop(f"{var.name} is read by {user.var.name} too")

    def over_tokens(self, reader: AffineReader, role: str) -> Tree:
        """Read a role's vector for every token, as one tree with strides in t."""
        found = []
        for step in self.chain:
            value, place = step.operands[role]
            index: list[Index] = [{f"l{i}": 1} for i in range(len(self.lead))]
            if place == "vector":
                index += [{"n": 1}]
            else:
                index += [{"n": 1}, {}] if place == "column" else [{}, {"n": 1}]
            try:
                found.append(reader.read(value, index))
            except Unreadable as why:
                raise Unreadable(
                    f"{role} ({getattr(value, 'name', 'a constant')}): {why}"
                ) from None
        return _strided(found, role)

    def split(self, trees: dict[str, Tree]) -> tuple[int, dict[str, Tree]]:
        """Tell batch axes from head axes, and give every tree the symbols b and h."""
        problem = Unreadable("no axes")
        last = len(self.lead)
        tries = range(last - 1, -1, -1) if self.matrix else [last]
        for batch_axes in tries:
            if any(static(d) is None for d in self.lead[batch_axes:]):
                problem = Unreadable("the head axis is symbolic")
                continue
            groups = {"b": range(batch_axes), "h": range(batch_axes, last)}
            try:
                return batch_axes, {r: self.merged(t, groups) for r, t in trees.items()}
            except Unreadable as why:
                problem = why
        raise problem

    def merged(self, tree: Tree, groups: dict[str, range]) -> Tree:
        if isinstance(tree, Apply):
            return Apply(tree.op, tuple(self.merged(a, groups) for a in tree.args))
        if isinstance(tree, Number):
            return tree
        at = {k: v for k, v in tree.at if not k.startswith("l")}
        for name, axes in groups.items():
            step: int | None = None
            for i in reversed(axes):
                size = static(self.lead[i])
                if size == 1:
                    continue
                mine = tree.step(f"l{i}")
                if step is None:
                    at[name] = at.get(name, 0) + mine
                elif mine != step:
                    raise Unreadable("batch and head axes are not walked as one")
                if size is None and i != min(axes):
                    raise Unreadable("a symbolic axis inside another")
                step = mine * (size or 0)
        return Load(tree.source, tuple(sorted((k, v) for k, v in at.items() if v)))

    def out_at(self, collector: Collector | None, batch_axes: int, heads: int) -> dict[str, int]:
        """Return by how many elements b, t, h and n move through the output."""
        token = heads * self.size  # elements a token and sequence has
        if collector is None or len(self.chain) == 1:
            return {"b": token, "h": self.size, "n": 1}
        tokens = len(self.chain)
        below = 1
        for d in collector.shape[collector.axis + 1 :]:
            size = static(d)
            if size is None:
                raise Stop("outputs are collected before a symbolic axis")
            below *= size
        batch = _count(self.lead[:batch_axes]) if batch_axes else 1
        if below == token:
            return {"b": tokens * token, "t": token, "h": self.size, "n": 1}
        if below == self.size:
            step = tokens * self.size
            return {"b": heads * step, "t": self.size, "h": step, "n": 1}
        if batch and below == batch * token:
            return {"b": token, "t": batch * token, "h": self.size, "n": 1}
        raise Stop("outputs are collected in another order than batch, head, channel")


class RoleNames:
    """Names for the tensors that are loaded: the role that reads one first."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def namer(self, role: str) -> Any:
        def name(source: Any) -> str:
            for known, expr in self.found.items():
                if expr.same_as(source):
                    return known
            free = role
            count = 1
            while free in self.found:
                free = f"{role}{count}"
                count += 1
            self.found[free] = source
            return free

        return name


def _count(dims: Sequence[Any]) -> int:
    total = 1
    for d in dims:
        total *= static(d) or 0
    return total


def _strided(trees: list[Tree], role: str) -> Tree:
    """Return one tree for all tokens: equal but for constants that grow by a fixed step."""
    first = trees[0]
    if len(trees) == 1:
        return first
    if any(type(t) is not type(first) for t in trees):
        raise Unreadable(f"{role} is not computed alike for every token")
    if isinstance(first, Number):
        if any(t.value != first.value for t in trees):  # type: ignore[union-attr]
            raise Unreadable(f"{role} has another constant in every token")
        return first
    if isinstance(first, Apply):
        if any(t.op != first.op or len(t.args) != len(first.args) for t in trees):  # type: ignore[union-attr]
            raise Unreadable(f"{role} is not computed alike for every token")
        parts = zip(*(t.args for t in trees), strict=True)  # type: ignore[union-attr]
        return Apply(first.op, tuple(_strided(list(p), role) for p in parts))
    at = [dict(t.at) for t in trees]  # type: ignore[union-attr]
    start = [a.pop("", 0) for a in at]
    step = start[1] - start[0]
    for t, tree in enumerate(trees):
        if not tree.source.same_as(first.source) or at[t] != at[0]:  # type: ignore[union-attr]
            raise Unreadable(
                f"{role} of token {t} comes from another tensor, or is walked otherwise"
            )
        if start[t] != start[0] + t * step:
            raise Unreadable(f"{role} does not move evenly from token to token")
    if step < 0:
        raise Unreadable(f"{role} moves backward")
    moved = {**at[0], "": start[0], "t": step}
    return Load(first.source, tuple(sorted((k, v) for k, v in moved.items() if v)))
