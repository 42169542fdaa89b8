"""Bytes that the CUDA decode kernel moves, counted while its code runs on the CPU."""

from __future__ import annotations

import pytest

from relax_llm_passes.cuda_on_cpu import run_primfunc, why_not
from relax_llm_passes.kernels.attention_decode_cuda import attention_decode_cuda
from relax_llm_passes.targets import parse_target

from .attention_reference import make_case

TARGET = parse_target("cuda -arch=sm_80")


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.parametrize(
    ("options", "splits"),
    [
        (dict(B=1, H=2, K=2, S=1, T=512, D=64, causal="bottom_right", alibi="mpt"), 1),
        (dict(B=1, H=2, K=1, S=1, T=2047, D=64, causal="bottom_right", append=True,
              dtype="float16", rotary="half", position=2047), 2),
    ],
    ids=["read", "append-gqa-split"],
)  # fmt: skip
def test_decode_moves_little_more_than_it_has_to(options: dict, splits: int) -> None:
    case = make_case(decode=True, **options)
    arguments = [*case.inputs, *case.outputs]
    func = attention_decode_cuda(case.plan, splits=splits)
    result = run_primfunc(func, arguments, len(case.outputs), TARGET, orders=1)
    case.check(list(result.outputs))
    least = sum(a.nbytes for a in arguments)
    # Whole sectors of 32 bytes, once for each access of a warp. Beside keys, values and caches
    # there are the query, the tables and the parts that a split leaves to the combining kernel.
    moved = sum(32 * (x.global_read_sectors + x.global_write_sectors) for x in result.stats)
    assert moved <= 1.1 * least, f"{moved / least:.3f} times {least} bytes"
