"""CUDA attention kernels, executed on the CPU against float64, and compiled without spills."""

from __future__ import annotations

import pytest
import tvm

from relax_llm_passes.cuda_on_cpu import nvcc_check, nvcc_missing, run_primfunc, why_not
from relax_llm_passes.kernels.attention_decode_cuda import attention_decode_cuda, decode_lanes
from relax_llm_passes.kernels.attention_pieces_cuda import LIMITS
from relax_llm_passes.kernels.attention_prefill_cuda import attention_prefill_cuda
from relax_llm_passes.targets import parse_target

from .attention_reference import make_case

TARGET = parse_target("cuda -arch=sm_80")

DECODE = {
    # A part takes 64 keys at least (16 groups of lanes, 4 in flight): here 64, 64 and 23.
    "append-gqa-fp16-split": (dict(B=2, H=4, K=2, S=1, T=150, D=40, alibi="bloom", append=True,
                                   dtype="float16", causal="bottom_right"), 3),
    # Three of the parts are without keys, and one of its keys is before the window.
    "sink-window-split": (dict(B=1, H=2, K=1, S=2, T=70, D=40, append=True, window=9, sink=True,
                               position=70, causal="bottom_right"), 5),
    "read-split": (dict(B=2, H=2, K=2, S=1, T=150, D=32, causal="bottom_right"), 4),
    "rotary-window": (dict(B=1, H=2, K=2, S=2, T=21, D=32, append=True, rotary="half", window=9,
                           position=21, causal="bottom_right"), 1),
    "bf16-sink": (dict(B=1, H=4, K=1, S=1, T=30, D=128, append=True, dtype="bfloat16", sink=True,
                       causal="bottom_right"), 1),
}  # fmt: skip
PREFILL = {
    "softcap-fp16": dict(B=1, H=2, K=1, S=35, T=50, D=24, softcap=5.0, dtype="float16",
                         causal="bottom_right"),
    "window-sink": dict(B=1, H=2, K=1, S=20, T=41, D=128, window=20, sink=True,
                        causal="bottom_right"),
}  # fmt: skip


def _run(case, func, orders: int) -> None:
    arguments = [*case.inputs, *case.outputs]
    result = run_primfunc(func, arguments, len(case.outputs), TARGET, orders=orders)
    case.check(list(result.outputs))


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_decode_in_two_thread_orders_with_all_checks() -> None:
    options, splits = DECODE["append-gqa-fp16-split"]
    case = make_case(decode=True, **options)
    _run(case, attention_decode_cuda(case.plan, splits=splits), orders=2)


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_parts_without_keys_read_nothing() -> None:
    case = make_case(decode=True, B=1, H=2, K=2, S=1, T=40, D=32, causal="bottom_right")
    arguments = [*case.inputs, *case.outputs]

    def launches(splits: int):
        func = attention_decode_cuda(case.plan, splits=splits)
        result = run_primfunc(func, arguments, len(case.outputs), TARGET, orders=2)
        case.check(list(result.outputs))
        return result.stats

    one, (split, combine) = launches(1)[0], launches(16)
    assert split.global_read == one.global_read and split.barriers == one.barriers
    # The sums of one part a head (32 and its 2), and the 2 of the others.
    assert split.global_written == 2 * 4 * (32 + 16 * 2)
    assert combine.global_read_unique == 2 * 4 * (32 + 16 * 2)


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str) -> None:
    options, splits = DECODE[name]
    case = make_case(decode=True, **options)
    _run(case, attention_decode_cuda(case.plan, splits=splits), orders=3)


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name: str) -> None:
    case = make_case(decode=False, **PREFILL[name])
    _run(case, attention_prefill_cuda(case.plan), orders=3)


@pytest.mark.slow
@pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing() or "")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_no_spills(dim: int, group: int) -> None:
    options = dict(B=1, H=4, K=4 // group, S=1, T=8, D=dim, append=True, dtype="float16",
                   causal="bottom_right", alibi="mpt")  # fmt: skip
    case = make_case(decode=True, **options)
    func = attention_decode_cuda(case.plan).with_attr("global_symbol", "main")
    for kernel in nvcc_check(tvm.IRModule({"main": func}), archs=("sm_80", "sm_90", "sm_100")):
        assert not kernel.within(LIMITS)


@pytest.mark.parametrize("size", [20, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [16, 32])
def test_lanes_share_a_row_without_rest(size: int, bits: int) -> None:
    lanes, vector = decode_lanes(size, bits)
    assert size % (lanes * vector) == 0
    assert lanes <= 32 and lanes & (lanes - 1) == 0
    assert vector * bits <= 128
