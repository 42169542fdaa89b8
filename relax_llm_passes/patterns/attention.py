"""Find attention: a product, a softmax and a second product, whatever lies between them.

The recogniser starts at each softmax over the last axis, finds the product with the values behind
it, and reads everything else as scalar expressions (`elements.py`): the scores as a function of
the first product and of positions, the operands down to the tensors they come from. So layouts,
grouped heads, scales, soft caps, masks (causal in any alignment, windows, ALiBi in any form,
additive or boolean tensors) and their spellings need no patterns of their own: the kernel computes
the very expression that the graph does. What is recognised by value is the range of keys that a
mask leaves, so that the kernel can skip the rest.

`attention_softmax.py` reads the rows of the softmax (guards, sinks), `cache_append.py` the append,
`attention_facts.py` says what was found.

Refused: probabilities or scores that something else reads, softmax over another axis, products
whose sizes are not known, a mask that cannot be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TupleGetItem

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.attention_plan import Append, AttentionPlan, grouped, shares_keys
from ..kernels.scalar_expr import buffer_loads, depends_on, i64
from ..report import Refusal
from .alike import alike, follow, path_between
from .attention_facts import (
    attention_facts,
    bound_nonnegative,
    divisors_in,
    free_sizes,
    size_vars,
)
from .attention_result import check_region, follow_result, take_dead
from .attention_softmax import SoftmaxRows, fail
from .cache_append import read_append
from .element_layout import LAYOUT
from .element_regions import is_biased_product, region_between
from .element_scalars import Unreadable
from .elements import ElementReader
from .key_range import key_range
from .paged_cache import paged_attentions

__all__ = ["AttentionMatch", "find_attention"]

KIND = "attention"
_MOST_FORMS = 8  # kinds of attention that a graph's layers take turns in
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
    forms: list[AttentionMatch] = []  # those that were no like of an earlier one
    for binding in view.bindings:
        if op_name(binding.value) not in ("relax.nn.softmax", *_DIRECT):
            continue
        again = next((m for f in forms if (m := _again(view, f, binding.var)) is not None), None)
        if again is not None:
            found.append(again)
            continue
        try:
            match = _Finder(view, append).match(binding.var)
        except Unreadable as err:
            name = getattr(binding.var, "name", "")
            found.append(Refusal(err.reason, KIND, view.name, err.binding or name))
            continue
        if match is not None:
            found.append(match)
            forms = [match, *forms[: _MOST_FORMS - 1]]
    return found + paged_attentions(view)


def _again(view: FunctionView, form: AttentionMatch, softmax: Any) -> AttentionMatch | None:
    """Return the attention around `softmax` where it differs from `form` in names only."""
    out = follow(view, path_between(view, form.softmax, form.out, form.region), softmax)
    if out is None:
        return None
    mapped = alike(view, form.region, [form.out], [out])
    if mapped is None or not mapped[form.softmax].same_as(softmax):
        return None
    leaves = [mapped.get(leaf, leaf) for leaf in form.leaves]
    caches = [mapped[c] for c in form.caches]
    region = {mapped[v]: None for v in form.region}
    try:
        check_region(view, region, out, caches)
    except Unreadable:
        return None
    return replace(form, leaves=leaves, region=region, out=out, caches=caches, softmax=softmax)


# Operators that are attention by themselves are opened by `expand_attention` before.
_DIRECT: tuple[str, ...] = ()


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
        left = view.call(product).args[0]
        batch = [var for var, _ in self.batch]
        own = self._operand_index(left, self.reader.shape(product)[:-2], batch)
        self.rows = SoftmaxRows(view, self.reader, self.s, self.t, self.x, self.T)
        self.rows.read(softmax, left, [*own, self.s, self.t])
        self.region.update(self.rows.guard_region)
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
            raise fail("a product of vectors", product)
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
            for var in size_vars(dim):
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
            if self.reader.is_size(dim, 1):
                index.append(i64(0))
            elif self.reader.same(dim, result[offset + i]):
                index.append(batch[offset + i])
            else:
                raise fail(
                    f"batch axis of size {dim} in a product of {result[offset + i]}", operand
                )
        return index

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
        first = view.call(self.rows.qk)
        rows = self.rows.qk_index
        shape = reader.shape(self.rows.qk)
        left, right = first.args[0], first.args[1]
        self.D = _static(reader.shape(left)[-1], "head dim", self.rows.qk)
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
            raise fail("the queries depend on the key position", left)
        if depends_on(self.k, self.s):
            raise fail("the keys depend on the query position", right)

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
        reader = self.reader
        loads = [load for load in buffer_loads(expr) if depends_on(load, self.t)]
        if len(loads) != 1:
            return None
        cache = next((v for v, b in reader.leaves.items() if b.same_as(loads[0].source)), None)
        if cache is None or not is_var(cache):
            return None
        index = list(loads[0].indices)
        reader.stop = lambda _: False
        found = read_append(reader, cache, index)
        if found is None or not index[found.axis].same_as(self.t):
            return None
        if depends_on(found.start, depth, self.s):
            return None
        reader.stop = self._append_past_stop
        inside = dict(reader.inside)
        try:
            past = reader.read(found.past, found.past_index)
            reader.stop = self._query_stop
            new = reader.read(found.new, found.new_index)
        except Unreadable:
            reader.inside = inside
            return None
        buffer = reader.leaves[cache]
        return Append(past, new, found.start, found.rows, buffer, index, found.grows), cache

    def _append_past_stop(self, var: Any) -> bool:
        return not self._is_layout(var)

    def _is_layout(self, var: Any) -> bool:
        value = self.view.value(var)
        if isinstance(value, TupleGetItem):
            return self.view.call(value.tuple_value, "relax.split") is not None
        return op_name(value) in LAYOUT

    def _finish(self, softmax: Any, product: Any) -> AttentionMatch:
        reader, view = self.reader, self.view
        out, out_index = follow_result(
            self.reader, product, [*(v for v, _ in self.batch), self.s, self.e], self.region
        )
        appends = self._appends()
        dtype = view.dtype(out)
        out_buffer = tirx.decl_buffer(reader.shape(out), dtype, name="out")
        begin, end = key_range(
            self.rows.score, self.s, self.t, self.S, self.T, reader.analyzer, x=self.x
        )
        plan = AttentionPlan(
            batch=self.batch, s=self.s, t=self.t, d=self.d, e=self.e, x=self.x,
            S=self.S, T=self.T, D=self.D, E=self.E, q=self.q, k=self.k, v=self.v,
            score=self.rows.score, inputs=[], out=out_buffer, out_index=out_index,
            key_begin=begin, key_end=end, sink=self.rows.sink,
            zero_if_masked=self.rows.zero_if_masked,
        )  # fmt: skip
        plan.group = self._group(plan)
        caches: list[Any] = []
        if appends and self._covers(plan, appends):
            plan.append_k, plan.append_v = appends[0][0], appends[1][0]
            caches = [appends[0][1], appends[1][1]]
        plan.inputs, leaves = self._inputs(plan)
        plan.tir_vars = free_sizes(plan)
        region = region_between(view, [out, *caches], leaves)
        take_dead(self.view, region)
        check_region(self.view, region, out, caches)
        facts = attention_facts(plan, reader)
        return AttentionMatch(plan, leaves, region, out, caches, softmax, facts)

    def _group(self, plan: AttentionPlan) -> int:
        if not plan.batch:
            return 1
        extent = plan.batch[-1][1]
        if not isinstance(extent, tirx.IntImm):
            candidates = divisors_in(plan.k)
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
            first, last = (grouped(plan, i64(append.start), n) for n in (0, plan.group - 1))
            if not self.reader.same(first, last):
                return False  # heads that share keys would write them to different rows
        return True

    def _inputs(self, plan: AttentionPlan) -> tuple[list[Any], list[Any]]:
        exprs = [plan.q, plan.k, plan.v, plan.score]
        exprs += [] if plan.sink is None else [plan.sink]
        written = []
        for append in (plan.append_k, plan.append_v):
            if append is not None:
                exprs += [append.past, append.new, i64(append.start)]
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


def _static(dim: Any, what: str, expr: Any) -> int:
    if isinstance(dim, tirx.IntImm):
        return int(dim.value)
    raise fail(f"the {what} is not known at compile time: {dim}", expr)
