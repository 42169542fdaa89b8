"""Random lists of patterns, in the form this package outlines and in the form TVM's pass takes.

A pattern is a chain of operators, each reading the one before on a known side, with anything on the
other side; some close a diamond: the last operator reads the chain's end and one of its inner
values. The same list goes to both, so that what they make of a graph can be compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tvm.ir import Call, Var

from relax_llm_passes.dataflow import FunctionView, is_var, op_name
from relax_llm_passes.outline import Region

BINARY = ("relax.add", "relax.multiply", "relax.subtract")
UNARY = ("relax.nn.relu", "relax.negative", "relax.tanh")


@dataclass(frozen=True)
class Pattern:
    """A chain of operators.

    Attributes
    ----------
    steps : tuple of (str, int)
        Operator names, first to last, and which argument is the step before (0 for the first).
    closes : int or None
        For a diamond: the step that the last operator, a binary one, reads on its other side.
    """

    steps: tuple[tuple[str, int], ...]
    closes: int | None = None

    @property
    def name(self) -> str:
        words = [op.rpartition(".")[2] for op, _ in self.steps]
        return "p." + "_".join(words) + ("_diamond" if self.closes is not None else "")


def usual_patterns() -> list[Pattern]:
    """Return a list as users write it: products with an epilogue first, then bare ones."""
    product = ("relax.matmul", 0)
    return [
        Pattern((product, ("relax.add", 0))),
        Pattern((product, ("relax.multiply", 0))),
        Pattern((product,)),
        Pattern((("relax.nn.relu", 0),)),
    ]


def random_patterns(rng: random.Random) -> list[Pattern]:
    """Return one to four patterns, in no sensible order."""
    found = []
    for _ in range(rng.randrange(1, 5)):
        first = "relax.matmul" if rng.random() < 0.6 else rng.choice(UNARY + BINARY)
        steps = [(first, 0)]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            op = rng.choice(UNARY + BINARY if rng.random() < 0.85 else ("relax.matmul",))
            steps.append((op, 0 if op in UNARY else rng.randrange(2)))
        closes = None
        if len(steps) > 2 and steps[-1][0] in BINARY and rng.random() < 0.5:
            closes = rng.randrange(len(steps) - 2)
        found.append(Pattern(tuple(steps), closes))
    return found


def _match(view: FunctionView, pattern: Pattern, last: Var) -> list[Var] | None:
    """Return the bindings that match a pattern ending in `last`."""
    members: list[Var] = [last]
    for at in range(len(pattern.steps) - 1, -1, -1):
        name, side = pattern.steps[at]
        call = view.value(members[-1])
        if type(call) is not Call or op_name(call) != name:
            return None
        if at > 0:
            before = view.resolve(call.args[side])
            if not is_var(before) or view.position(before) < 0:
                return None
            members.append(before)
    if pattern.closes is not None:
        side = 1 - pattern.steps[-1][1]
        other = view.resolve(view.value(last).args[side])
        if not other.same_as(members[len(members) - 1 - pattern.closes]):
            return None
    return members


def pattern_regions(view: FunctionView, patterns: list[Pattern]) -> list[Region]:
    """Return every match in one scope; the first pattern has the highest priority."""
    found = []
    for number, pattern in enumerate(patterns):
        for binding in view.bindings:
            if view.is_alias(binding.var) or op_name(binding.value) != pattern.steps[-1][0]:
                continue
            members = _match(view, pattern, binding.var)
            if members is not None:
                found.append(Region(pattern.name, members, priority=-number))
    return found


def tvm_patterns(patterns: list[Pattern]) -> list[tuple[str, Any]]:
    """Return the same list for `relax.transform.FuseOpsByPattern`."""
    from tvm.relax.dpl import is_op, wildcard

    result = []
    for pattern in patterns:
        made: list[Any] = []
        for at, (name, side) in enumerate(pattern.steps):
            before = made[-1] if made else wildcard()
            if name in UNARY:
                made.append(is_op(name)(before))
                continue
            other = wildcard()
            if pattern.closes is not None and at == len(pattern.steps) - 1:
                other = made[pattern.closes]
            made.append(is_op(name)(*((before, other) if side == 0 else (other, before))))
        result.append((pattern.name, made[-1]))
    return result
