"""Rotary recognition: style and width by meaning, and what is no rotary."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op as R

from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.patterns.rotary import Rotary, RotaryMatch, find_rotary
from tests.fusion.attention_graphs import Graph


@pytest.mark.parametrize(
    ("options", "style", "width"),
    [
        (dict(), "half", 8),
        (dict(split="slice", rotary_dim=4), "half", 4),
        (dict(split="heads", rotary="interleaved"), "interleaved", 8),
        (dict(rotary="interleaved", rotary_dim=6, alias=True), "interleaved", 6),
        (dict(dtype="float16", batch=1, new=5, past=False), "half", 8),
    ],
)
def test_every_spelling_gives_style_and_width(options: dict, style: str, width: int) -> None:
    found = find_rotary(FunctionView(Graph(**options).mod, "main"))
    assert [m.rotary for m in found if isinstance(m, RotaryMatch)] == [Rotary(style, width, 8)] * 2
    assert len(found) == 2


def test_no_rotary_is_found_where_there_is_none() -> None:
    assert find_rotary(FunctionView(Graph(rotary=None).mod, "main")) == []


def _pairs(partner: list[int], signs: list[float]) -> list:
    """x * cos + signs * x[partner] * sin over the last axis."""
    size = len(partner)
    x = relax.Var("x", relax.TensorType((1, 4, 3, size), "float32"))
    angle = relax.Var("angle", relax.TensorType((3, size), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, angle]):
        with bb.dataflow():
            cos, sin = bb.emit(R.cos(angle)), bb.emit(R.sin(angle))
            parts = []
            for p, sign in zip(partner, signs, strict=True):
                part = bb.emit(R.strided_slice(x, [3], [p], [p + 1], [1]))
                factor = relax.const(np.float32(sign), "float32")
                parts.append(bb.emit(R.multiply(part, factor)))
            other = bb.emit(R.concat(parts, axis=3))
            left, right = bb.emit(R.multiply(x, cos)), bb.emit(R.multiply(other, sin))
            out = bb.emit_output(R.add(left, right))
        bb.emit_func_output(out)
    return find_rotary(FunctionView(bb.get(), "main"))


def test_single_elements_put_together_are_a_rotary_too() -> None:
    (match,) = _pairs([2, 3, 0, 1], [-1, -1, 1, 1])
    assert isinstance(match, RotaryMatch) and match.rotary == Rotary("half", 4, 4)


@pytest.mark.parametrize(
    ("partner", "signs"),
    [
        ([2, 3, 0, 1], [1, 1, -1, -1]),  # turns the other way
        ([3, 2, 1, 0], [-1, -1, 1, 1]),  # pairs from both ends
        ([2, 3, 0, 1], [-1, -1, -1, 1]),  # one wrong sign
    ],
)
def test_other_pairings_are_refused_with_a_reason(partner: list[int], signs: list[float]) -> None:
    (refusal,) = _pairs(partner, signs)
    assert not refusal
    assert refusal.kind == "rotary" and refusal.binding and "no rotary" in refusal.reason


def _turned(tables, spelling: str = "stack"):
    """Rotate x (1, 4, n, 8) by tables made of the position's angles (n, 4)."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((1, 4, n, 8), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            emit = bb.emit
            cos, sin = tables(emit, n)
            if spelling == "stack":  # even and odd elements, put together again
                a, b = (emit(R.strided_slice(x, [3], [i], [8], [2])) for i in (0, 1))
            else:  # pairs on an axis of their own: what complex numbers become as two reals
                pairs = emit(R.reshape(x, (1, 4, n, 4, 2)))
                a, b = (emit(R.take(pairs, relax.const(i, "int64"), axis=4)) for i in (0, 1))
            real = emit(R.subtract(emit(R.multiply(a, cos)), emit(R.multiply(b, sin))))
            imaginary = emit(R.add(emit(R.multiply(a, sin)), emit(R.multiply(b, cos))))
            both = emit(R.stack([real, imaginary], axis=4))
            out = bb.emit_output(R.reshape(both, (1, 4, n, 8)))
        bb.emit_func_output(out)
    return find_rotary(FunctionView(bb.get(), "main"))


def _plain(emit, n):
    places = emit(R.astype(emit(R.expand_dims(emit(R.arange(0, n, 1, "int64")), 1)), "float32"))
    steps = relax.const((10000.0 ** (-np.arange(4) / 4)).astype("float32"), "float32")
    angles = emit(R.multiply(places, steps))
    return emit(R.cos(angles)), emit(R.sin(angles))


def _dynamic_ntk(emit, n):
    """The base grows with the length: base * (4 n / 64 - 3) ^ (8 / 6), computed in the graph."""

    def number(value: float):
        return relax.const(np.float32(value), "float32")

    length = emit(R.astype(emit(R.arange(n, n + 1, 1, "int64")), "float32"))
    ratio = emit(R.subtract(emit(R.multiply(length, number(4 / 64))), number(3.0)))
    ratio = emit(R.maximum(ratio, number(1.0)))
    base = emit(R.multiply(emit(R.power(ratio, number(8 / 6))), number(10000.0)))
    exponents = relax.const((-np.arange(4) / 4).astype("float32"), "float32")
    steps = emit(R.power(base, exponents))
    places = emit(R.astype(emit(R.expand_dims(emit(R.arange(0, n, 1, "int64")), 1)), "float32"))
    angles = emit(R.multiply(places, steps))
    scale = number(1.1)
    return tuple(emit(R.multiply(emit(f(angles)), scale)) for f in (R.cos, R.sin))


@pytest.mark.parametrize("spelling", ["stack", "pairs"])
@pytest.mark.parametrize("tables", [_plain, _dynamic_ntk])
def test_stacked_and_complex_forms_with_any_tables(tables, spelling: str) -> None:
    (match,) = _turned(tables, spelling)
    assert isinstance(match, RotaryMatch) and match.rotary == Rotary("interleaved", 8, 8)
    assert match.source.name == "x" and len(match.tables) == 2
