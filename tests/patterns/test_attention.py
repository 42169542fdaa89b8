"""The attention recogniser: what it reads from a graph, and every reason to refuse one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op as R

from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.kernels.scalar_expr import any_node, call_name
from relax_llm_passes.patterns.attention import AttentionMatch, find_attention
from relax_llm_passes.report import Refusal
from tests.fusion.attention_graphs import Graph

B, H, S, D = 2, 3, 5, 8


class Spelled:
    """q, k, v, some parameters more, and hooks between the products."""

    def __init__(self, *, keys: Any = S, values: Any = D, **shapes: tuple[Any, ...]) -> None:
        self.bb = relax.BlockBuilder()
        self.T = keys
        self.vars = {
            name: relax.Var(name, relax.TensorType(shape, "float32"))
            for name, shape in {
                "q": (B, H, S, D), "k": (B, H, keys, D), "v": (B, H, keys, values), **shapes,
            }.items()
        }  # fmt: skip

    def find(
        self,
        scores: Callable[..., Any] = lambda e, x, v: x,
        probabilities: Callable[..., Any] = lambda e, p, v, x: p,
        also: Callable[..., Any] | None = None,
    ) -> list[Any]:
        """Build `matmul(probabilities(softmax(scores(q k^T))), v)` and look for attention."""
        with self.bb.function("main", list(self.vars.values())):
            with self.bb.dataflow():
                emit, v = self.bb.emit, self.vars
                x = emit(R.matmul(v["q"], emit(R.permute_dims(v["k"], [0, 1, 3, 2]))))
                rows = scores(emit, x, v)
                p = emit(R.nn.softmax(rows, axis=-1))
                out = emit(R.matmul(probabilities(emit, p, v, rows), v["v"]))
                more = also(emit, x, p) if also else None
                result = self.bb.emit_output(out if more is None else relax.Tuple([out, more]))
            self.bb.emit_func_output(result)
        mod = self.bb.get()
        relax.analysis.well_formed(mod)
        return find_attention(FunctionView(mod, "main"))


def const(value: float) -> relax.Expr:
    return relax.const(np.float32(value), "float32")


def refused(found: list[Any]) -> Refusal:
    (refusal,) = found
    assert isinstance(refusal, Refusal) and refusal.kind == "attention"
    assert refusal.binding and refusal.function == "main"
    return refusal


# What is read


@pytest.mark.parametrize(
    ("options", "group", "append"),
    [
        (dict(), 2, True),
        (dict(heads=6, kv_heads=2, new=3, mask="added"), 3, True),
        (dict(kv_heads=1, past=False, new=7), 4, False),
        (dict(kv_heads=4, new=9, rotary=None), 1, False),
        (dict(dtype="float16", split="heads"), 2, True),
    ],
)
def test_sizes_groups_and_appends(options: dict, group: int, append: bool) -> None:
    graph = Graph(**options)
    (match,) = find_attention(FunctionView(graph.mod, "main"))
    assert isinstance(match, AttentionMatch)
    plan = match.plan
    assert (plan.D, plan.E, plan.group) == (8, 8, group)
    assert (plan.append_k is not None) == (plan.append_v is not None) == append
    assert len(match.caches) == (2 if append else 0)
    assert len(plan.inputs) == len(match.leaves) == len(match.facts["roles"])
    assert len(set(match.facts["roles"])) == len(match.leaves)


def test_a_soft_cap_is_in_the_score() -> None:
    def capped(emit: Any, x: Any, _: Any) -> Any:
        return emit(R.multiply(emit(R.tanh(emit(R.divide(x, const(30.0))))), const(30.0)))

    (match,) = Spelled().find(capped)
    assert any_node(match.plan.score, lambda n: call_name(n) == "tanh")


def column(emit: Any, sink: Any, shape: tuple[int, ...] = (1, H, 1, 1)) -> Any:
    return emit(R.broadcast_to(emit(R.reshape(sink, shape)), (B, H, S, 1)))


def cut(emit: Any, p: Any, first: int) -> Any:
    return emit(R.strided_slice(p, [3], [first], [first + S], [1]))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shift", ["none", "max", "topk"])
def test_an_extra_logit_is_a_sink(first: bool, shift: str) -> None:
    def with_sink(emit: Any, x: Any, v: Any) -> Any:
        parts = [column(emit, v["sink"]), x] if first else [x, column(emit, v["sink"])]
        wide = emit(R.concat(parts, axis=3))
        if shift == "none":
            return wide
        if shift == "max":
            top = emit(R.max(wide, axis=-1, keepdims=True))
        else:
            both = emit(R.topk(wide, k=1, axis=-1, ret_type="both", largest=True))
            top = emit(relax.TupleGetItem(both, 0))
        return emit(R.subtract(wide, top))

    (match,) = Spelled(sink=(H,)).find(
        with_sink, lambda emit, p, v, x: cut(emit, p, 1 if first else 0)
    )
    assert isinstance(match, AttentionMatch) and match.facts["sink"]
    assert match.plan.sink is not None and "sink" in match.facts["roles"]


def test_rows_without_keys_are_zero_where_the_graph_says_so() -> None:
    def guarded(emit: Any, p: Any, v: Any, rows: Any) -> Any:
        gone = emit(R.equal(rows, const(-np.inf)))
        kept = emit(R.astype(emit(R.logical_not(gone)), "int8"))
        some = emit(R.max(kept, axis=-1, keepdims=True))
        none = emit(R.logical_not(emit(R.astype(some, "bool"))))
        return emit(R.where(none, const(0.0), p))

    (match,) = Spelled(mask=(S, S)).find(lambda emit, x, v: emit(R.add(x, v["mask"])), guarded)
    assert isinstance(match, AttentionMatch) and match.plan.zero_if_masked


def test_tables_gathered_by_position_ids_are_inputs() -> None:
    """cos and sin taken by positions from memory: the rotary is read, the gather stays outside."""
    bb = relax.BlockBuilder()
    q, k, v = (relax.Var(n, relax.TensorType((B, H, S, D), "float32")) for n in "qkv")
    ids = relax.Var("ids", relax.TensorType((S,), "int64"))
    tables = [relax.Var(n, relax.TensorType((64, D), "float32")) for n in ("cos", "sin")]
    with bb.function("main", [q, k, v, ids, *tables]):
        with bb.dataflow():
            emit = bb.emit
            cos, sin = (emit(R.take(t, ids, axis=0)) for t in tables)
            low, high = (emit(R.strided_slice(q, [3], [i], [i + 4], [1])) for i in (0, 4))
            other = emit(R.concat([emit(R.negative(high)), low], axis=3))
            turned = emit(R.add(emit(R.multiply(q, cos)), emit(R.multiply(other, sin))))
            x = emit(R.matmul(turned, emit(R.permute_dims(k, [0, 1, 3, 2]))))
            out = bb.emit_output(R.matmul(emit(R.nn.softmax(x, axis=-1)), v))
        bb.emit_func_output(out)
    (match,) = find_attention(FunctionView(bb.get(), "main"))
    assert match.facts["rotary"] == {"style": "half", "rotary_dim": D, "head_dim": D}
    names = {getattr(leaf, "name", "") for leaf in match.leaves}
    assert not names & {"cos", "sin", "ids"}


def test_no_attention_is_no_refusal() -> None:
    x = relax.Var("x", relax.TensorType((4, 7), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(R.nn.softmax(x, axis=-1))
        bb.emit_func_output(out)
    assert find_attention(FunctionView(bb.get(), "main")) == []


# What is refused


def _times(emit: Any, p: Any, v: Any, rows: Any) -> Any:
    return emit(R.astype(emit(R.astype(p, "int32")), "float32"))


def _sum_is_zero(emit: Any, p: Any, v: Any, rows: Any) -> Any:
    some = emit(R.sum(rows, axis=-1, keepdims=True))
    return emit(R.where(emit(R.equal(some, const(0.0))), const(0.0), p))


PROBABILITIES = {
    "mixed": (lambda e, p, v, x: e(R.where(v["flag"], p, const(1.0))), "mixed with something"),
    "whole numbers": (_times, "changed before the product"),
    "transposed": (lambda e, p, v, x: e(R.permute_dims(p, [0, 1, 3, 2])), "the softmax's axis"),
    "a mask of its own": (lambda e, p, v, x: e(R.where(v["flag"], p, const(0.0))),
                          "no reduction of its scores"),
    "two conditions": (lambda e, p, v, x: e(R.where(e(R.logical_and(v["flag"], v["flag2"])), p,
                                                    const(0.0))), "not understood"),
    "a sum of zero": (_sum_is_zero, "'every score is -inf'"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBABILITIES)
def test_changed_probabilities_are_refused(name: str) -> None:
    change, message = PROBABILITIES[name]
    spelled = Spelled()
    for flag in ("flag", "flag2"):
        spelled.vars[flag] = relax.Var(flag, relax.TensorType((B, H, S, S), "bool"))
    assert message in refused(spelled.find(probabilities=change)).reason


def _two_products(emit: Any, x: Any, v: Any) -> Any:
    other = emit(R.matmul(v["q2"], emit(R.permute_dims(v["k"], [0, 1, 3, 2]))))
    return emit(R.add(x, other))


SCORES = {
    "not from a product": (lambda e, x, v: v["given"], "no product of queries and keys"),
    "two products": (_two_products, "more than one product"),
    "mixed elements": (lambda e, x, v: e(R.add(x, e(R.permute_dims(x, [0, 1, 3, 2])))),
                       "mix elements"),
    "transposed": (lambda e, x, v: e(R.permute_dims(x, [0, 1, 3, 2])), "last axis is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_other_scores_are_refused(name: str) -> None:
    change, message = SCORES[name]
    spelled = Spelled(q2=(B, H, S, D), given=(B, H, S, S))
    assert message in refused(spelled.find(change)).reason


def _shifted_keys_only(emit: Any, x: Any, v: Any) -> Any:
    top = emit(R.max(x, axis=-1, keepdims=True))
    return emit(R.concat([emit(R.subtract(x, top)), column(emit, v["sink"])], axis=3))


COLUMNS = {
    "two": (lambda e, x, v: e(R.concat([x, *[column(e, v["sink"])] * 2], axis=3)),
            f"softmax over {S + 2} scores"),
    "one a query": (lambda e, x, v: e(R.concat([x, column(e, v["row"], (1, 1, S, 1))], axis=3)),
                    "differs between the queries"),
    "a score": (lambda e, x, v: e(R.concat([x, e(R.strided_slice(x, [3], [0], [1], [1]))],
                                           axis=3)), "from the product"),
    "shifted apart": (_shifted_keys_only, "shifted by something else"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_other_extra_columns_are_refused(name: str) -> None:
    change, message = COLUMNS[name]
    spelled = Spelled(sink=(H,), row=(S,))
    found = spelled.find(change, lambda emit, p, v, x: cut(emit, p, 0))
    assert message in refused(found).reason


@pytest.mark.parametrize(
    ("also", "message"),
    [
        (lambda emit, x, p: x, "scores are also used elsewhere"),
        (lambda emit, x, p: p, "probabilities are also used elsewhere"),
        (lambda emit, x, p: emit(R.sum(p)), "probabilities are also used elsewhere"),
    ],
)
def test_what_others_read_is_refused(also: Any, message: str) -> None:
    assert message in refused(Spelled().find(also=also)).reason


def test_sizes_that_are_not_known_are_refused() -> None:
    size = tirx.Var("size", "int64")
    assert "value head dim" in refused(Spelled(values=size).find()).reason


def test_a_product_of_vectors_is_refused() -> None:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((S,), "float32"))
    v = relax.Var("v", relax.TensorType((S, D), "float32"))
    with bb.function("main", [x, v]):
        with bb.dataflow():
            out = bb.emit_output(R.matmul(bb.emit(R.nn.softmax(x, axis=-1)), v))
        bb.emit_func_output(out)
    assert "vectors" in refused(find_attention(FunctionView(bb.get(), "main"))).reason


def test_attention_of_a_paged_cache_object_is_reported_and_kept() -> None:
    bb = relax.BlockBuilder()
    cache = relax.Var("cache", relax.ObjectType())
    qkv = relax.Var("qkv", relax.TensorType((1, 3, 12, 16), "float16"))
    with bb.function("main", [cache, qkv]):
        with bb.dataflow():
            out = bb.emit(
                relax.call_dps_packed(
                    "vm.builtin.attention_kv_cache_attention_with_fused_qkv",
                    [cache, relax.prim_value(0), qkv],
                    out_ty=relax.TensorType((1, 3, 4, 16), "float16"),
                )
            )
            gv = bb.emit_output(out)
        bb.emit_func_output(gv)
    found = find_attention(FunctionView(bb.get(), "main"))
    assert len(found) == 1 and "paged cache object" in found[0].reason
