"""Rotary recognition: style and width by meaning, and what is no rotary."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
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
