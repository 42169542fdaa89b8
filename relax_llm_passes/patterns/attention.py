"""Find attention: a product, a softmax and a second product, whatever lies between them.

The recogniser starts at each softmax over the last axis, finds the product with the values behind
it, and reads everything else as scalar expressions (`elements.py`): the scores as a function of
the first product and of positions, the operands down to the tensors they come from. So layouts,
grouped heads, scales, soft caps, masks (causal in any alignment, windows, ALiBi in any form,
additive or boolean tensors) and their spellings need no patterns of their own: the kernel computes
the very expression that the graph does. What is recognised by value is the range of keys that a
mask leaves, so that the kernel can skip the rest.

Refused: probabilities or scores that something else reads, softmax over another axis, products
whose sizes are not known, a mask that cannot be followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TupleGetItem

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.attention_plan import Append, AttentionPlan, shares_keys
from ..kernels.scalar_expr import (
    TensorLoad,
    any_node,
    buffer_loads,
    depends_on,
    dtype_of,
    i64,
    rewrite,
)
from ..report import Refusal
from .elements import (
    LAYOUT,
    ElementReader,
    Unreadable,
    is_biased_product,
    region_between,
    reshaped_index,
)
from .key_range import key_range
from .rotary import classify_rotary

__all__ = ["AttentionMatch", "find_attention"]

KIND = "attention"
_MAX_APPEND_ROWS = 4  # query rows up to which the append and the rotary go into the same kernel


@dataclass
class AttentionMatch:
    """An attention that was found.

    Attributes
    ----------
    plan : AttentionPlan
        What a kernel has to compute.
    leaves : list of relax.Expr
        What the plan's inputs stand for, in the same order.
    region : dict[Var, None]
        Variables of the bindings that belong to it.
    out : Var
        Its result (behind the layout changes that follow the product).
    caches : list[Var]
        Appended caches that the kernel writes too (key, value), or empty.
    softmax : Var
        Where it was found.
    facts : dict
        For people and reports: heads, group, causal, window, rotary style, ...
    """

    plan: AttentionPlan
    leaves: list[Any]
    region: dict[Any, None]
    out: Any
    caches: list[Any]
    softmax: Any
    facts: dict[str, Any] = field(default_factory=dict)


def find_attention(view: FunctionView, append: bool = True) -> list[AttentionMatch | Refusal]:
    """Return every attention of a scope, and a refusal for each softmax that is none.

    Parameters
    ----------
    view : FunctionView
        The scope.
    append : bool
        Take the cache append (and the rotary of the new keys) into a decode attention.
    """
    found: list[AttentionMatch | Refusal] = []
    for binding in view.bindings:
        if op_name(binding.value) not in ("relax.nn.softmax", *_DIRECT):
            continue
        try:
            match = _Finder(view, append).match(binding.var)
        except Unreadable as err:
            name = getattr(binding.var, "name", "")
            found.append(Refusal(err.reason, KIND, view.name, err.binding or name))
            continue
        if match is not None:
            found.append(match)
    return found


# Operators that are attention by themselves are opened by `expand_attention` before.
_DIRECT: tuple[str, ...] = ()


def _fail(reason: str, expr: Any = None) -> Unreadable:
    return Unreadable(reason, expr)


class _Finder:
    def __init__(self, view: FunctionView, append: bool) -> None:
        self.view: Any = view
        self.append = append
        self.reader = ElementReader(view)
        self.region: dict[Any, None] = {}

    def match(self, softmax: Any) -> AttentionMatch | None:
        view = self.view
        call = view.call(softmax)
        ndim = len(self.reader.shape(softmax))
        if int(call.attrs.axis) % ndim != ndim - 1:
            return None  # a softmax over another axis is no attention
        product = self._value_product(softmax)
        if product is None:
            return None  # a softmax with no product behind it: a sampler, a router
        self._axes(product)
        index = self._through_guard(product, softmax)
        self._scores(view.resolve(call.args[0]), index)
        self._operands(product)
        return self._finish(softmax, product)

    # softmax -> the product with the values

    def _value_product(self, softmax: Any) -> Any:
        """Return the matmul whose left operand is the softmax, through what follows it."""
        frontier, seen = [softmax], {softmax: None}
        while frontier:
            var = frontier.pop()
            for user in self.view.users(var):
                name = op_name(user.value)
                if name == "relax.matmul":
                    if self.view.resolve(user.value.args[0]).same_as(var):
                        return user.var
                    continue
                passes = name in LAYOUT or name in ("relax.astype", "relax.where")
                if passes and user.var not in seen:
                    seen[user.var] = None
                    frontier.append(user.var)
        return None

    def _axes(self, product: Any) -> None:
        shape = self.reader.shape(product)
        if len(shape) < 2:
            raise _fail("a product of vectors", product)
        names = {4: ["b", "h"], 3: ["z"], 2: []}.get(len(shape)) or [
            f"z{i}" for i in range(len(shape) - 2)
        ]
        self.batch = [(tirx.Var(n, "int64"), dim) for n, dim in zip(names, shape[:-2], strict=True)]
        self.s, self.t, self.d, self.e = (tirx.Var(n, "int64") for n in "stde")
        self.x = tirx.Var("x", "float32")
        self.S, self.E = shape[-2], _static(shape[-1], "value head dim", product)
        left = self.reader.shape(self.view.call(product).args[0])
        self.T = left[-1]
        ranges = {var: dim for var, dim in self.batch}
        ranges.update({self.s: self.S, self.t: self.T, self.e: self.E})
        for var, extent in ranges.items():
            self.reader.analyzer.bind(var, tvm.ir.Range(i64(0), i64(extent)))
        self._bind_sizes()

    def _bind_sizes(self) -> None:
        """Tell the analyzer that symbolic sizes are not negative."""
        for dim in (self.S, self.T, *(extent for _, extent in self.batch)):
            for var in _size_vars(dim):
                bound_nonnegative(self.reader.analyzer, var)

    def _operand_index(
        self, operand: Any, result: Sequence[Any], batch: Sequence[Any]
    ) -> list[Any]:
        """Return the batch indices of a matmul's operand, broadcasting against the result."""
        shape = self.reader.shape(operand)
        own = shape[:-2]
        offset = len(batch) - len(own)
        index = []
        for i, dim in enumerate(own):
            if self.reader._is(dim, 1):
                index.append(i64(0))
            elif self.reader.same(dim, result[offset + i]):
                index.append(batch[offset + i])
            else:
                raise _fail(
                    f"batch axis of size {dim} in a product of {result[offset + i]}", operand
                )
        return index

    def _through_guard(self, product: Any, softmax: Any) -> list[Any]:
        """Return the softmax's index for (batch, s, t); notes a guard for rows without keys."""
        reader = self.reader
        left = self.view.call(product).args[0]
        batch = [var for var, _ in self.batch]
        shape = reader.shape(product)
        index = [*self._operand_index(left, shape[:-2], batch), self.s, self.t]
        reader.stop = lambda var: var.same_as(softmax)
        value = reader.read(left, index)
        self.zero_if_masked = False
        guard = None
        if isinstance(value, tirx.Select):
            guard = value.condition
            if _is_zero(value.true_value):
                value, masked = value.false_value, True
            elif _is_zero(value.false_value):
                value, masked = value.true_value, False
            else:
                raise _fail("the softmax is mixed with something else before the product", product)
        load = value.value if isinstance(value, tirx.Cast) else value
        buffer = reader.leaves.get(softmax)
        if not isinstance(load, TensorLoad) or not load.source.same_as(buffer):
            raise _fail("the softmax is changed before the product with the values", product)
        found = list(load.indices)
        if not found[-1].same_as(self.t):
            raise _fail("the product does not run over the softmax's axis", product)
        if any(depends_on(i, self.t) for i in found[:-1]):
            raise _fail("softmax rows depend on the key", product)
        if guard is not None:
            self._check_guard(guard, masked, softmax, found)
        self.width = reader.shape(softmax)[-1]
        return found

    def _check_guard(self, guard: Any, zero_when: bool, softmax: Any, index: list[Any]) -> None:
        """Check that a guard is: 0 for the rows whose scores are all -inf, and only for those."""
        reader, view = self.reader, self.view
        loads = buffer_loads(guard)
        if len(loads) != 1:
            raise _fail("a condition on the softmax that is not understood", softmax)
        leaf = next(v for v, b in reader.leaves.items() if b.same_as(loads[0].source))
        call = view.call(leaf, "relax.max", "relax.min", "relax.sum")
        scores = view.resolve(view.call(softmax).args[0])
        ndim = len(reader.shape(scores))
        if call is None or [int(a) % ndim for a in call.attrs.axis or []] != [ndim - 1]:
            raise _fail("a condition on the softmax that is no reduction of its scores", softmax)
        if not all(a.same_as(b) or reader.same(a, b) for a, b in
                   zip(list(loads[0].indices)[: ndim - 1], index[:-1], strict=True)):  # fmt: skip
            raise _fail("a condition on another row of scores", softmax)
        inner = ElementReader(view, lambda var: var.same_as(scores))
        where = [
            i64(0) if reader._is(dim, 1) else tirx.Var(f"i{i}", "int64")
            for i, dim in enumerate(reader.shape(scores))
        ]
        flag = inner.read(call.args[0], where)
        at = buffer_loads(flag)
        if len(at) != 1 or not all(
            reader.same(a, b) for a, b in zip(at[0].indices, where, strict=True)
        ):
            raise _fail("a condition on the softmax that is not elementwise in its scores", softmax)

        def flag_for(score: float) -> float:
            def put(node: Any) -> Any:
                if isinstance(node, tirx.Cast) and isinstance(node.value, TensorLoad):
                    return tirx.FloatImm("float32", score)
                if isinstance(node, TensorLoad):
                    return tirx.FloatImm("float32", score)
                return None

            return _evaluate(rewrite(flag, put))

        low, high = flag_for(-math.inf), flag_for(0.0)
        combine: dict[str, Any] = {
            "relax.max": max,
            "relax.min": min,
            "relax.sum": lambda a, b: a + b,
        }
        both = combine[op_name(call)](low, high)
        none_left = low * (3 if op_name(call) == "relax.sum" else 1)

        def guard_for(value: float) -> bool:
            def put(node: Any) -> Any:
                if isinstance(node, TensorLoad):
                    return _number_like(value, dtype_of(node))
                return None

            return bool(_evaluate(rewrite(guard, put)))

        if (
            guard_for(none_left) != zero_when
            or guard_for(both) == zero_when
            or (guard_for(high) == zero_when)
        ):
            raise _fail("a condition on the softmax that is not 'every score is -inf'", softmax)
        self.zero_if_masked = True
        self.region[leaf] = None
        self.region.update(inner.inside)

    # the scores, down to the first product

    def _scores(self, scores: Any, index: list[Any]) -> None:
        reader, view = self.reader, self.view
        batch = [var for var, _ in self.batch]
        reader.stop = lambda var: view.call(var, "relax.matmul") is not None
        value = reader.read(scores, index)
        names = {b: v for v, b in reader.leaves.items()}
        found: dict[Any, list[Any]] = {}
        for load in buffer_loads(value):
            leaf = names.get(load.source)
            if leaf is not None and is_var(leaf) and view.call(leaf, "relax.matmul") is not None:
                if depends_on(load, self.t):
                    found.setdefault(leaf, []).append(list(load.indices))
        if not found:
            raise _fail("the scores are no product of queries and keys", scores)
        if len(found) > 1:
            raise _fail("the scores come from more than one product", scores)
        ((self.qk, places),) = found.items()
        where = places[0]
        for other in places[1:]:
            if not all(reader.same(a, b) for a, b in zip(where, other, strict=True)):
                raise _fail("the scores mix elements of the product", scores)
        if not reader.same(where[-1], self.t) or any(depends_on(i, self.t) for i in where[:-1]):
            raise _fail("the product's last axis is not the softmax's", scores)
        buffer = reader.leaves[self.qk]
        shape = reader.shape(self.qk)
        if not reader.same(shape[-1], self.T):
            raise _fail(f"{shape[-1]} scores for {self.T} values (extra columns)", scores)
        if not reader.same(self.width, self.T):
            raise _fail(f"softmax over {self.width} scores, {self.T} values", scores)

        def put(node: Any) -> Any:
            inner = node.value if isinstance(node, tirx.Cast) else node
            if isinstance(inner, TensorLoad) and inner.source.same_as(buffer):
                return self.x
            return None

        self.score = rewrite(value, put)
        self.qk_index = where
        self.score_batch = batch

    # operands of both products

    def _plain_stop(self, var: Any) -> bool:
        """Stop where arithmetic begins; a constant factor (a split scale) is still followed."""
        if self._is_layout(var):
            return False
        name = op_name(self.view.value(var))
        if name == "relax.astype":
            return False
        if name in ("relax.multiply", "relax.divide"):
            call = self.view.call(var)
            return not any(self.view.scalar(a) is not None for a in call.args)
        return True

    def _query_stop(self, var: Any) -> bool:
        """Stop at products and at what a matmul's epilogue does (the bias)."""
        return is_biased_product(self.view, var)

    def _operands(self, product: Any) -> None:
        reader, view = self.reader, self.view
        first = view.call(self.qk)
        rows = self.qk_index
        shape = reader.shape(self.qk)
        left, right = first.args[0], first.args[1]
        self.D = _static(reader.shape(left)[-1], "head dim", self.qk)
        reader.analyzer.bind(self.d, tvm.ir.Range(i64(0), i64(self.D)))
        reader.stop = self._plain_stop
        self.k = reader.read(
            right, [*self._operand_index(right, shape[:-2], rows[:-2]), self.d, self.t]
        )
        second = view.call(product)
        batch = [var for var, _ in self.batch]
        values = second.args[1]
        own = reader.shape(product)
        self.v = reader.read(
            values, [*self._operand_index(values, own[:-2], batch), self.t, self.e]
        )
        # What the keys or values are read from is not computed again for the queries.
        inputs = {leaf for leaf in reader.leaves if is_var(leaf)}
        reader.stop = lambda var: var in inputs or self._query_stop(var)
        self.q = reader.read(
            left, [*self._operand_index(left, shape[:-2], rows[:-2]), rows[-2], self.d]
        )
        if depends_on(self.q, self.t):
            raise _fail("the queries depend on the key position", left)
        if depends_on(self.k, self.s):
            raise _fail("the keys depend on the query position", right)

    # the result

    def _out(self, product: Any) -> tuple[Any, list[Any]]:
        """Follow layout changes behind the product; return the last variable and its index."""
        reader, view = self.reader, self.view
        var = product
        index: list[Any] = [*(v for v, _ in self.batch), self.s, self.e]
        while not view.is_output(var):
            users = view.users(var)
            if len(users) != 1:
                break
            call, name = users[0].value, op_name(users[0].value)
            new = users[0].var
            try:
                if name == "relax.permute_dims":
                    axes = call.attrs.axes
                    order = range(len(index) - 1, -1, -1) if axes is None else map(int, axes)
                    index = [index[a] for a in order]
                elif name in ("relax.reshape", "relax.flatten", "relax.expand_dims",
                              "relax.squeeze"):  # fmt: skip
                    # Reading backwards and writing forwards are the same map with shapes swapped.
                    index = reshaped_index(index, reader.shape(var), reader.shape(new), reader)
                elif name == "relax.astype":
                    pass
                else:
                    break
            except Unreadable:
                break
            self.region[var] = None
            var = new
        self.region[var] = None
        return var, [reader.simplify(i) for i in index]

    def _appends(self) -> list[tuple[Append, Any]]:
        """Return the appends of keys and values when a decode kernel can do both."""
        S = self.S
        if not self.append or not isinstance(S, tirx.IntImm) or int(S.value) > _MAX_APPEND_ROWS:
            return []
        found = []
        for expr, depth, size in ((self.k, self.d, self.D), (self.v, self.e, self.E)):
            one = self._append(expr, depth, size)
            if one is None:
                return []
            found.append(one)
        same = self.reader.same(found[0][0].start, found[1][0].start)
        distinct = not found[0][1].same_as(found[1][1])
        return found if same and distinct else []

    def _append(self, expr: Any, depth: Any, size: int) -> tuple[Append, Any] | None:
        reader, view = self.reader, self.view
        loads = buffer_loads(expr)
        if len(loads) != 1:
            return None
        cache = next((v for v, b in reader.leaves.items() if b.same_as(loads[0].source)), None)
        call = view.call(cache, "relax.concat") if cache is not None and is_var(cache) else None
        fields = view.fields(call.args[0]) if call is not None else None
        if call is None or fields is None or len(fields) != 2:
            return None
        index = list(loads[0].indices)
        axis = int(call.attrs.axis or 0) % len(index)
        if not index[axis].same_as(self.t):
            return None
        if any(depends_on(x, self.t) for i, x in enumerate(index) if i != axis):
            return None
        past_length = reader.shape(fields[0])[axis]
        reader.stop = self._append_past_stop
        inside = dict(reader.inside)
        try:
            past = reader.read(fields[0], index)
            reader.stop = self._query_stop
            new = reader.read(fields[1], index)
        except Unreadable:
            reader.inside = inside
            return None
        rows = reader.shape(fields[1])[axis]
        return Append(past, new, past_length, rows, reader.leaves[cache], index), cache

    def _append_past_stop(self, var: Any) -> bool:
        return not self._is_layout(var)

    def _is_layout(self, var: Any) -> bool:
        value = self.view.value(var)
        if isinstance(value, TupleGetItem):
            return self.view.call(value.tuple_value, "relax.split") is not None
        return op_name(value) in LAYOUT

    def _finish(self, softmax: Any, product: Any) -> AttentionMatch:
        reader, view = self.reader, self.view
        out, out_index = self._out(product)
        appends = self._appends()
        dtype = view.dtype(out)
        out_buffer = tirx.decl_buffer(reader.shape(out), dtype, name="out")
        begin, end = key_range(
            self.score, self.s, self.t, self.S, self.T, reader.analyzer, x=self.x,
            zero_if_masked=self.zero_if_masked,
        )  # fmt: skip
        plan = AttentionPlan(
            batch=self.batch, s=self.s, t=self.t, d=self.d, e=self.e, x=self.x,
            S=self.S, T=self.T, D=self.D, E=self.E, q=self.q, k=self.k, v=self.v,
            score=self.score, inputs=[], out=out_buffer, out_index=out_index,
            key_begin=begin, key_end=end, zero_if_masked=self.zero_if_masked,
        )  # fmt: skip
        plan.group = self._group(plan)
        caches: list[Any] = []
        if appends and self._covers(plan, appends):
            plan.append_k, plan.append_v = appends[0][0], appends[1][0]
            caches = [appends[0][1], appends[1][1]]
        plan.inputs, leaves = self._inputs(plan)
        plan.tir_vars = _free_sizes(plan)
        region = region_between(view, [out, *caches], leaves)
        self._check_region(region, out, caches)
        facts = self._facts(plan)
        return AttentionMatch(plan, leaves, region, out, caches, softmax, facts)

    def _group(self, plan: AttentionPlan) -> int:
        if not plan.batch:
            return 1
        extent = plan.batch[-1][1]
        if not isinstance(extent, tirx.IntImm):
            candidates = _divisors_in(plan.k)
        else:
            candidates = [g for g in range(int(extent.value), 1, -1) if int(extent.value) % g == 0]
        for group in candidates:
            if shares_keys(plan, group):
                return group
        return 1

    def _covers(self, plan: AttentionPlan, appends: Sequence[tuple[Append, Any]]) -> bool:
        """Tell whether the groups, keys and depth reach every element of the caches, once."""
        count: Any = i64(1)
        for _, extent in plan.batch:
            count = count * extent
        count = tirx.floordiv(count, i64(plan.group))
        for (append, _), size in zip(appends, (plan.D, plan.E), strict=True):
            elements: Any = i64(1)
            for dim in append.cache.shape:
                elements = elements * dim
            if not self.reader.analyzer.can_prove_equal(elements, count * plan.T * i64(size)):
                return False
        return True

    def _inputs(self, plan: AttentionPlan) -> tuple[list[Any], list[Any]]:
        exprs = [plan.q, plan.k, plan.v, plan.score]
        written = []
        for append in (plan.append_k, plan.append_v):
            if append is not None:
                exprs += [append.past, append.new]
                written.append(append.cache)
        loads = [load for expr in exprs for load in buffer_loads(expr)]
        buffers, leaves = [], []
        for leaf, buffer in self.reader.leaves.items():
            if any(buffer.same_as(w) for w in written):
                continue
            if any(load.source.same_as(buffer) for load in loads):
                buffers.append(buffer)
                leaves.append(leaf)
        return buffers, leaves

    def _check_region(self, region: dict[Any, None], out: Any, caches: Sequence[Any]) -> None:
        """Refuse when a big intermediate of the region is needed outside."""
        view = self.view
        outputs = [out, *caches]
        for var in region:
            if any(var.same_as(o) for o in outputs):
                continue
            name = op_name(view.value(var))
            if name not in ("relax.matmul", "relax.nn.softmax"):
                continue
            outside = view.is_output(var) or any(u.var not in region for u in view.users(var))
            if outside:
                what = "probabilities" if name == "relax.nn.softmax" else "scores"
                raise _fail(f"attention {what} are also used elsewhere", var)

    def _facts(self, plan: AttentionPlan) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "roles": _role_names(plan),
            "head_dim": plan.D,
            "value_dim": plan.E,
            "group": plan.group,
            "append": plan.append_k is not None,
            "skips_keys": not (
                isinstance(plan.key_end, tirx.Var) or self.reader.same(plan.key_end, plan.T)
            ),
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


def _role_names(plan: AttentionPlan) -> list[str]:
    """Name each input after what reads it ("query", "qkv", "past_key", "mask", "table", ...)."""
    uses: list[tuple[str, Any]] = [("query", plan.q), ("key", plan.k), ("value", plan.v)]
    if plan.append_k is not None and plan.append_v is not None:
        uses += [
            ("past_key", plan.append_k.past),
            ("past_value", plan.append_v.past),
            ("key", plan.append_k.new),
            ("value", plan.append_v.new),
        ]
    names: list[str] = []
    for bufr in plan.inputs:
        readers = {
            name
            for name, expr in uses
            if any(load.source.same_as(bufr) for load in buffer_loads(expr))
        }
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


def _size_vars(dim: Any) -> list[Any]:
    found: list[Any] = []

    def note(node: Any) -> bool:
        if isinstance(node, tirx.Var):
            found.append(node)
        return False

    any_node(dim, note)
    return found


def _static(dim: Any, what: str, expr: Any) -> int:
    if isinstance(dim, tirx.IntImm):
        return int(dim.value)
    raise _fail(f"the {what} is not known at compile time: {dim}", expr)


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, (tirx.FloatImm, tirx.IntImm)) and float(expr.value) == 0.0


def _number_like(value: float, dtype: str) -> Any:
    if "float" in dtype:
        return tirx.FloatImm(dtype, value)
    return tirx.IntImm(dtype, int(value))


def _evaluate(expr: Any) -> float:
    """Return the value of an expression of constants only."""
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return expr.value
    if isinstance(expr, tirx.Cast):
        return _evaluate(expr.value)
    if isinstance(expr, tirx.Not):
        return not _evaluate(expr.a)
    if isinstance(expr, tirx.Select):
        branch = expr.true_value if _evaluate(expr.condition) else expr.false_value
        return _evaluate(branch)
    operators: dict[Any, Any] = {
        tirx.EQ: lambda a, b: a == b, tirx.NE: lambda a, b: a != b,
        tirx.LT: lambda a, b: a < b, tirx.LE: lambda a, b: a <= b,
        tirx.GT: lambda a, b: a > b, tirx.GE: lambda a, b: a >= b,
        tirx.And: lambda a, b: a and b, tirx.Or: lambda a, b: a or b,
        tirx.Add: lambda a, b: a + b, tirx.Sub: lambda a, b: a - b,
        tirx.Mul: lambda a, b: a * b,
    }  # fmt: skip
    if type(expr) in operators:
        return operators[type(expr)](_evaluate(expr.a), _evaluate(expr.b))
    raise _fail("a condition on the softmax that is not understood")


def _divisors_in(expr: Any) -> list[int]:
    found: dict[int, None] = {}

    def note(node: Any) -> bool:
        if isinstance(node, tirx.FloorDiv) and isinstance(node.b, tirx.IntImm):
            found[int(node.b.value)] = None
        return False

    any_node(expr, note)
    return sorted(found, reverse=True)


def _free_sizes(plan: AttentionPlan) -> list[Any]:
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
    own = [*plan.ranges, plan.x]
    free: dict[Any, None] = {}
    for expr in exprs:
        for var in _size_vars(expr):
            if str(dtype_of(var)) != "int64":
                continue
            if not any(var.same_as(o) for o in (*given, *own)):
                free[var] = None
    return list(free)
