"""What is said of an attention that was found: the roles of its inputs, facts, sizes it needs."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from ..kernels.attention_plan import AttentionPlan
from ..kernels.scalar_expr import any_node, buffer_loads, dtype_of
from .elements import ElementReader
from .rotary import classify_rotary

__all__ = [
    "attention_facts",
    "bound_nonnegative",
    "divisors_in",
    "free_sizes",
    "role_names",
    "size_vars",
]


def attention_facts(plan: AttentionPlan, reader: ElementReader) -> dict[str, Any]:
    """Return what people and reports want to know of a plan."""
    facts: dict[str, Any] = {
        "roles": role_names(plan),
        "head_dim": plan.D,
        "value_dim": plan.E,
        "group": plan.group,
        "append": plan.append_k is not None,
        "fixed_capacity": plan.append_k is not None and not plan.append_k.grows,
        "sink": plan.sink is not None,
        "skips_keys": not (isinstance(plan.key_end, tirx.Var) or reader.same(plan.key_end, plan.T)),
        "zero_if_masked": plan.zero_if_masked,
    }
    facts["split"] = any(name.startswith("qkv") for name in facts["roles"])
    batch = [var for var, _ in plan.batch]
    ranges = {var: extent for var, extent in plan.batch}
    ranges[plan.d] = plan.D
    if len({load.source for load in buffer_loads(plan.q)}) > 1:
        answer = classify_rotary(plan.q, plan.d, plan.D, batch, ranges)
        if not isinstance(answer, str):
            facts["rotary"] = answer[0].to_dict()
    return facts


def role_names(plan: AttentionPlan) -> list[str]:
    """Name each input after what reads it ("query", "qkv", "past_key", "mask", "table", ...)."""
    uses: list[tuple[str, Any]] = [("query", plan.q), ("key", plan.k), ("value", plan.v)]
    if plan.sink is not None:
        uses.append(("sink", plan.sink))
    if plan.append_k is not None and plan.append_v is not None:
        uses += [
            ("past_key", plan.append_k.past),
            ("past_value", plan.append_v.past),
            ("key", plan.append_k.new),
            ("value", plan.append_v.new),
            ("position", plan.append_k.start),
        ]
    reads = [(name, [load.source for load in buffer_loads(expr)]) for name, expr in uses]
    names: list[str] = []
    for bufr in plan.inputs:
        readers = {name for name, sources in reads if any(x.same_as(bufr) for x in sources)}
        if {"query", "key", "value"} <= readers:
            name = "qkv"
        elif "query" in readers and "key" in readers:
            name = "table"
        elif len(readers) == 1:
            name = readers.pop()
        else:
            name = "_".join(sorted(readers)) or "mask"
        count = sum(1 for n in names if n == name or n.rstrip("0123456789") == name)
        names.append(name if count == 0 else f"{name}{count}")
    return names


def bound_nonnegative(analyzer: Any, var: Any) -> None:
    """Tell an analyzer that a symbolic size is at least 0."""
    analyzer.update(var, tvm.sym.ConstIntBound(0, tvm.sym.ConstIntBound.POS_INF), True)


def size_vars(dim: Any) -> list[Any]:
    found: list[Any] = []

    def note(node: Any) -> bool:
        if isinstance(node, tirx.Var):
            found.append(node)
        return False

    any_node(dim, note)
    return found


def divisors_in(expr: Any) -> list[int]:
    found: dict[int, None] = {}

    def note(node: Any) -> bool:
        if isinstance(node, tirx.FloorDiv) and isinstance(node.b, tirx.IntImm):
            found[int(node.b.value)] = None
        return False

    any_node(expr, note)
    return sorted(found, reverse=True)


def free_sizes(plan: AttentionPlan) -> list[Any]:
    """Return symbolic sizes that no single axis of a buffer gives."""
    given = [
        dim
        for bufr in (*plan.inputs, *plan.outputs)
        for dim in bufr.shape
        if isinstance(dim, tirx.Var)
    ]
    exprs = [plan.S, plan.T, plan.q, plan.k, plan.v, plan.score, plan.key_begin, plan.key_end]
    exprs += [extent for _, extent in plan.batch]
    exprs += [dim for bufr in (*plan.inputs, *plan.outputs) for dim in bufr.shape]
    exprs += list(plan.out_index)
    exprs += [] if plan.sink is None else [plan.sink]
    for append in (plan.append_k, plan.append_v):
        exprs += [] if append is None else [append.start, append.past, append.new]
    own = [*plan.ranges, plan.x]
    free: dict[Any, None] = {}
    for expr in exprs:
        for var in size_vars(expr):
            if str(dtype_of(var)) != "int64":
                continue
            if not any(var.same_as(o) for o in (*given, *own)):
                free[var] = None
    return list(free)
