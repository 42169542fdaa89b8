"""CUDA prefill attention on tensor cores: against float64, its memory accesses, and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm

from relax_llm_passes.cuda_on_cpu import nvcc_check, nvcc_missing, run_primfunc, why_not
from relax_llm_passes.kernels.attention_prefill_mma import LIMITS, attention_prefill_mma
from relax_llm_passes.kernels.attention_tiles_mma import mma_dtype, mma_tile, supports_mma
from relax_llm_passes.targets import parse_target

from .attention_reference import Case, make_case

TARGET = parse_target("cuda -arch=sm_80")
on_cpu = pytest.mark.skipif(bool(why_not()), reason=why_not() or "")

CASES = {
    "80-mpt": dict(B=1, H=6, K=2, S=35, T=90, D=80, dtype="bfloat16", causal="bottom_right",
                   alibi="mpt"),
    "odd-no-mask": dict(B=2, H=3, K=3, S=33, T=47, D=20, E=10, dtype="float16"),
    "odd-values": dict(B=1, H=2, K=1, S=17, T=65, D=24, E=7, dtype="bfloat16", causal="top_left"),
    "96-window-sink": dict(B=1, H=2, K=2, S=70, T=150, D=96, dtype="float16", window=20, sink=True,
                           causal="bottom_right"),
    # The first row of the mask leaves no key.
    "128-mask": dict(B=1, H=2, K=1, S=20, T=70, D=128, dtype="float16", mask=True),
    "64-rotary-softcap": dict(B=1, H=2, K=1, S=40, T=40, D=64, dtype="float16", rotary="half",
                              causal="bottom_right", softcap=5.0),
    "rows-first": dict(B=2, H=4, K=2, S=40, T=40, D=64, dtype="bfloat16", rotary="interleaved",
                       causal="bottom_right", layouts=("BSHD", "BSHD", "BSHD")),
    "256": dict(B=1, H=2, K=1, S=40, T=75, D=256, dtype="bfloat16", causal="bottom_right"),
    "192-128": dict(B=1, H=2, K=1, S=40, T=75, D=192, E=128, dtype="float16",
                    causal="bottom_right"),
    # 9 rows of 8 heads of one key head are 72 rows of two tiles.
    "mqa-few-rows": dict(B=1, H=8, K=1, S=9, T=200, D=64, dtype="float16", causal="bottom_right"),
}  # fmt: skip


def _run(case: Case, orders: int):
    func = attention_prefill_mma(case.plan)
    arguments = [*case.inputs, *case.outputs]
    result = run_primfunc(func, arguments, 1, TARGET, orders=orders)
    # Weights are rounded like the output: at most twice what one rounding gives.
    case.check(list(result.outputs), roundings=2)
    return result.stats[0]


@pytest.mark.cuda
@on_cpu
def test_in_two_thread_orders_with_all_checks() -> None:
    assert not _run(make_case(decode=False, **CASES["80-mpt"]), orders=2).bank_conflicts


@pytest.mark.slow
@pytest.mark.cuda
@on_cpu
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    case = make_case(decode=False, **CASES[name])
    stats = _run(case, orders=3)
    if case.plan.D % 16 == 0 and case.plan.E % 16 == 0:
        assert stats.bank_conflicts == 0


@pytest.mark.slow
@pytest.mark.cuda
@on_cpu
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_keys_are_read_once_for_heads_that_share_them(kv_heads: int) -> None:
    case = make_case(decode=False, B=1, H=4, K=kv_heads, S=16, T=256, D=64, dtype="float16")
    stats = _run(case, orders=1)
    # All 64 rows of a group of four are one tile; each of four heads has its own otherwise.
    assert stats.blocks == kv_heads
    least = sum(a.nbytes for a in case.inputs)
    # 16 rows of a tile of 64: those beyond the last read that one again.
    assert 32 * stats.global_read_sectors < 1.05 * least


def test_which_plans_it_takes() -> None:
    def dtype(**options):
        case = make_case(decode=False, B=1, H=2, K=1, S=5, T=9, D=16, **options)
        return mma_dtype(case.plan)

    assert dtype(dtype="float16", rotary="half", mask=True) == "float16"
    assert dtype(dtype="bfloat16", alibi="mpt") == "bfloat16"
    assert dtype(dtype="float32") is None
    assert supports_mma(TARGET)
    assert not supports_mma(parse_target("cuda -arch=sm_75"))


@pytest.mark.slow
@pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing() or "")
@pytest.mark.parametrize(
    "options",
    [dict(D=64), dict(D=80), dict(D=96, alibi="mpt"), dict(D=128, alibi="bloom", softcap=5.0),
     dict(D=64, mask=True, alibi="mpt"), dict(D=128, mask=True, sink=True), dict(D=256)],
    ids=lambda o: "-".join(str(v) if k == "D" else k for k, v in o.items()),
)  # fmt: skip
def test_no_spills(options: dict) -> None:
    case = make_case(decode=False, B=1, H=4, K=2, S=70, T=131, causal="bottom_right",
                     dtype="bfloat16", **options)  # fmt: skip
    func = attention_prefill_mma(case.plan).with_attr("global_symbol", "main")
    for kernel in nvcc_check(tvm.IRModule({"main": func}), archs=("sm_80", "sm_90", "sm_100")):
        assert not kernel.within(LIMITS)


def test_a_tile_of_another_size_is_possible() -> None:
    plan = make_case(decode=False, B=1, H=2, K=1, S=5, T=9, D=16, dtype="float16").plan
    tile = replace(mma_tile(plan), warps=2, keys=32)
    assert (tile.rows, tile.threads) == (32, 64)
    assert attention_prefill_mma(plan, tile).attrs["tirx.is_scheduled"]
