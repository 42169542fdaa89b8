"""Bytes that the CUDA decode kernel moves, counted while its code runs on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_llm_passes.cuda_on_cpu import run_primfunc, why_not
from relax_llm_passes.kernels.attention import _cuda_decode_plan, _cuda_splits
from relax_llm_passes.kernels.attention_decode_cuda import attention_decode_cuda, decode_lanes
from relax_llm_passes.targets import parse_target

from .attention_reference import make_case

TARGET = parse_target("cuda -arch=sm_80")


def _moved(options: dict, splits: int) -> tuple[float, object]:
    """Return bytes moved over the least possible, and the launches."""
    case = make_case(decode=True, **options)
    arguments = [*case.inputs, *case.outputs]
    func = attention_decode_cuda(case.plan, splits=splits)
    result = run_primfunc(func, arguments, len(case.outputs), TARGET, orders=1)
    case.check(list(result.outputs))
    least = sum(a.nbytes for a in arguments)
    # Whole sectors of 32 bytes, once for each access of a warp. Beside keys, values and caches
    # there are the query, the tables and the parts that a split leaves to the combining kernel.
    moved = sum(32 * (x.global_read_sectors + x.global_write_sectors) for x in result.stats)
    return moved / least, result.stats


HALF = dict(B=1, S=1, D=64, dtype="float16", causal="bottom_right")
SHAPES = {
    "read": (dict(B=1, H=2, K=2, S=1, T=512, D=64, causal="bottom_right", alibi="mpt"), 1),
    "append-gqa-split": (
        dict(HALF, H=2, K=1, T=2047, append=True, rotary="half", position=2047),
        2,
    ),
}
MORE = {
    "gqa-1000-half": (dict(HALF, H=4, K=2, T=1000), 1),
    "append-333-half": (dict(HALF, H=2, K=2, T=333, append=True), 1),
    "mqa-1024-half": (dict(HALF, H=8, K=1, T=1024), 2),
    "append-mqa-513-bf16": (dict(HALF, H=4, K=1, T=513, append=True) | {"dtype": "bfloat16"}, 1),
    "mha-4096-half": (dict(HALF, H=1, K=1, T=4096), 4),
}  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.parametrize("name", SHAPES)
def test_decode_moves_little_more_than_it_has_to(name: str) -> None:
    ratio, _ = _moved(*SHAPES[name])
    assert ratio <= 1.1


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.parametrize("name", MORE)
def test_decode_of_other_lengths_and_groups(name: str) -> None:
    ratio, _ = _moved(*MORE[name])
    assert ratio <= 1.1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "blocks"), [(32, 32, 128), (32, 8, 128), (32, 4, 128), (32, 1, 128)]
)
def test_a_long_context_of_one_sequence_fills_the_machine(heads, kv_heads, blocks) -> None:
    case = make_case(decode=True, B=1, H=heads, K=kv_heads, S=1, T=4, D=64, dtype="float16")
    plan = case.plan
    plan = replace(plan, batch=[(plan.batch[0][0], 1), plan.batch[1]])
    decode = _cuda_decode_plan(plan)
    assert decode is not None and decode.group <= 8
    assert heads // decode.group * _cuda_splits(decode) >= blocks


def test_rows_are_read_16_bytes_at_once() -> None:
    for size in (64, 128, 256):
        assert decode_lanes(size, 16)[1] == 8
    assert decode_lanes(128, 32)[1] == 4
