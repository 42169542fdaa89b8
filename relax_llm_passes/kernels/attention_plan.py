"""What an attention kernel has to compute, as scalar expressions over canonical indices.

A plan says how one element of the query, the key, the value, the score and the output is found
from the buffers, whatever the graph's layouts, masks and rotary form are. Recognisers make plans
from graphs (`patterns/attention.py`), `attention_standard.py` and `attention_cached.py` make them
from parameters; the kernels only read plans. So masks and ALiBi are computed from positions when
the graph does so, and no layout needs a copy.

Axes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, E value
head dim. `batch` holds one (variable, extent) per batch axis, usually B and H.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from .scalar_expr import TensorLoad, bound_analyzer, depends_on, i64, rewrite, substitute

__all__ = ["Append", "AttentionPlan", "grouped", "shares_keys"]


@dataclass
class Append:
    """A functional cache append that the attention kernel does on its way.

    `concat(past, new)`, or new rows that replace some of a cache of fixed capacity (a slice update
    or a scatter): then old rows follow behind the new ones.

    Attributes
    ----------
    past : expression over batch, key, depth
        An element of the cache that came in.
    new : expression over batch, key, depth
        An element of the new rows (rotary included); `key` counts from 0 at the first new row.
    start : int64 expression over batch
        Where the first new row goes. For a fixed capacity it may come from memory, and differ
        between the rows of a batch; new rows outside of the cache are not written.
    rows : int64 expression
        How many new rows there are.
    cache : tirx.Buffer
        The output.
    index : list of expressions over batch, key, depth
        Where an element goes.
    grows : bool
        The cache ends behind the new rows (a concat).
    in_place : bool
        The cache is one of the plan's inputs and only the new rows are written to it (by a kernel
        called in place); its fixed capacity makes `grows` False.
    """

    past: Any
    new: Any
    start: Any
    rows: Any
    cache: Any
    index: list[Any]
    grows: bool = True
    in_place: bool = False


@dataclass
class AttentionPlan:
    """One attention: out = softmax(score(q k^T)) v. See the module for the axes.

    Attributes
    ----------
    batch : list of (tirx.Var, extent)
    s, t, d, e : tirx.Var
        Query, key, depth and value-depth index (int64).
    S, T : expressions; D, E : int
    x : tirx.Var
        Stands for the float32 product q.k in `score`.
    q, k, v : float32 expressions over (batch, s, d), (batch, t, d), (batch, t, e)
    score : float32 expression over (x, batch, s, t)
    inputs : list[tirx.Buffer]
        Every buffer that the expressions load from, in the order of the kernel's parameters.
    out : tirx.Buffer; out_index : list of expressions over (batch, s, e)
    group : int
        Consecutive values of the last batch variable that share keys and values.
    key_begin, key_end : expressions over s
        Keys outside have no weight in any row of s, and at least one key inside is not masked.
    sink : float32 expression over batch, or None
        One more logit in the softmax's denominator.
    zero_if_masked : bool
        A row whose scores are all -inf gives 0 (a safe softmax), not NaN.
    append_k, append_v : Append or None
        Set together; then `k` and `v` read the appended caches.
    tir_vars : list[tirx.Var]
        Symbolic sizes that no buffer's shape defines by itself.
    """

    batch: list[tuple[Any, Any]]
    s: Any
    t: Any
    d: Any
    e: Any
    x: Any
    S: Any
    T: Any
    D: int
    E: int
    q: Any
    k: Any
    v: Any
    score: Any
    inputs: list[Any]
    out: Any
    out_index: list[Any]
    group: int = 1
    key_begin: Any = None
    key_end: Any = None
    sink: Any = None
    zero_if_masked: bool = False
    append_k: Append | None = None
    append_v: Append | None = None
    tir_vars: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.key_begin is None:
            self.key_begin = i64(0)
        if self.key_end is None:
            self.key_end = i64(self.T)

    @property
    def ranges(self) -> dict[Any, Any]:
        """Index variables with their extents."""
        found = {var: extent for var, extent in self.batch}
        found.update({self.s: self.S, self.t: self.T, self.d: self.D, self.e: self.E})
        return found

    @property
    def outputs(self) -> list[Any]:
        """Buffers that the kernel writes: the output, then the caches."""
        appends = [
            a.cache for a in (self.append_k, self.append_v) if a is not None and not a.in_place
        ]
        return [self.out, *appends]

    def past_rows(self) -> tuple[Any, Any]:
        """Return `k` and `v` of the old rows, read from the caches that came in.

        What the graph does to the appended cache (a scale that is split over q and k, say) is
        done to what is read from the old one.
        """
        found = []
        for expr, append in ((self.k, self.append_k), (self.v, self.append_v)):
            assert append is not None

            def put(node: Any, append: Append = append) -> Any:
                inner = node.value if isinstance(node, tirx.Cast) else node
                if isinstance(inner, TensorLoad) and inner.source.same_as(append.cache):
                    return append.past
                return None

            found.append(rewrite(expr, put))
        return found[0], found[1]

    def simplified(self, expr: Any) -> Any:
        """Return `expr` simplified within the ranges of the index variables."""
        return bound_analyzer(self.ranges).simplify(expr)


def grouped(plan: AttentionPlan, expr: Any, member: Any) -> Any:
    """Return `expr` with the last batch variable h as h * group + member, simplified.

    The variable then counts groups: its extent is that of the plan divided by `group`.
    """
    if plan.group == 1 or not plan.batch:
        return expr
    var, extent = plan.batch[-1]
    ranges = {**plan.ranges, var: tirx.floordiv(i64(extent), i64(plan.group))}
    new = substitute(expr, {var: var * i64(plan.group) + i64(member)})
    return bound_analyzer(ranges).simplify(new)


def shares_keys(plan: AttentionPlan, group: int) -> bool:
    """Tell whether `group` consecutive values of the last batch variable read the same k and v."""
    if not plan.batch:
        return False
    var, extent = plan.batch[-1]
    inner, outer = tirx.Var("inner", "int64"), tirx.Var("outer", "int64")
    count = tirx.floordiv(i64(extent), i64(group))
    ranges = {**plan.ranges, inner: group, outer: count}
    analyzer = bound_analyzer(ranges)
    if not analyzer.can_prove_equal(count * group, i64(extent)):
        return False
    for expr in (plan.k, plan.v):
        new = analyzer.simplify(substitute(expr, {var: outer * i64(group) + inner}))
        if depends_on(new, inner):
            return False
    return True
