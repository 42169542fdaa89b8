"""CPU attention kernels against float64: every option, odd sizes, fp32, fp16 and bf16."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_llm_passes.errors import InputError
from relax_llm_passes.kernels.attention_decode_cpu import attention_decode_cpu
from relax_llm_passes.kernels.attention_prefill_cpu import attention_prefill_cpu
from relax_llm_passes.kernels.attention_standard import alibi_slopes, standard_plan
from relax_llm_passes.targets import parse_target, vector_lanes

from .attention_reference import Case, make_case

TARGET = parse_target("native")
LANES = vector_lanes(TARGET, "float32")


def run(case: Case, func: tvm.tirx.PrimFunc) -> None:
    module = tvm.compile(tvm.IRModule({"attention": func}), target=TARGET)
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in case.inputs + case.outputs]
    module["attention"](*arguments)
    case.check([a.numpy() for a in arguments[len(case.inputs) :]])


DECODE = {
    "mha": (dict(B=2, H=3, K=3, S=1, T=77, D=40, causal="bottom_right"), 1),
    "gqa-split": (dict(B=1, H=6, K=2, S=1, T=150, D=64, causal="bottom_right"), 3),
    "mpt-append": (dict(B=2, H=6, K=6, S=1, T=7, D=32, alibi="mpt", append=True,
                        causal="bottom_right"), 1),
    "bloom-split-append": (dict(B=1, H=4, K=2, S=1, T=130, D=32, alibi="bloom", append=True,
                                causal="bottom_right"), 4),
    "window-append": (dict(B=1, H=4, K=1, S=1, T=133, D=48, window=20, append=True,
                           causal="bottom_right"), 1),
    "three-new": (dict(B=1, H=4, K=2, S=3, T=7, D=32, append=True, causal="bottom_right",
                       rotary="half", position=7), 1),
    "rotary-far": (dict(B=1, H=4, K=4, S=1, T=65, D=64, append=True, causal="bottom_right",
                        rotary="half", position=100_000), 1),
    "partial-interleaved-fp16": (dict(B=2, H=4, K=2, S=1, T=33, D=80, append=True, dtype="float16",
                                      rotary="interleaved", rotary_dim=32,
                                      causal="bottom_right"), 1),
    "bf16-keys-transposed": (dict(B=1, H=4, K=4, S=2, T=70, D=32, append=True, dtype="bfloat16",
                                  layouts=("BSHD", "BHDS", "BSHD"), causal="bottom_right"), 1),
    "softcap-sink-mask": (dict(B=1, H=4, K=2, S=2, T=70, D=20, E=12, softcap=5.0, sink=True,
                               mask=True), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str) -> None:
    options, splits = DECODE[name]
    case = make_case(decode=True, **options)
    run(case, attention_decode_cpu(case.plan, LANES, splits=splits))


PREFILL = {
    "causal": dict(B=2, H=3, K=1, S=70, T=70, D=32, causal="bottom_right"),
    "past": dict(B=1, H=2, K=2, S=33, T=101, D=80, causal="bottom_right", alibi="distance",
                 dtype="bfloat16"),
    "window-rows-without-keys": dict(B=1, H=3, K=3, S=50, T=33, D=20, causal="bottom_right",
                                     window=7, dtype="float16"),
    "top-left-rotary": dict(B=1, H=2, K=2, S=37, T=50, D=24, causal="top_left", rotary="half",
                            rotary_dim=12),
    "softcap-sink-mask": dict(B=2, H=2, K=1, S=45, T=67, D=16, E=40, softcap=3.0, sink=True,
                              mask=True, layouts=("BSHD", "BSHD", "BSHD")),
    "mpt-long-bias": dict(B=1, H=2, K=2, S=512, T=512, D=16, causal="bottom_right", alibi="mpt"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name: str) -> None:
    case = make_case(decode=False, **PREFILL[name])
    run(case, attention_prefill_cpu(case.plan, LANES))


def test_rows_without_keys_are_zero_and_not_nan() -> None:
    case = make_case(B=1, H=1, K=1, S=1, T=9, D=8, decode=True, mask=True)
    assert (case.want == 0).all()
    run(case, attention_decode_cpu(case.plan, LANES))


@pytest.mark.parametrize(
    ("heads", "first", "last"), [(8, 2**-1, 2**-8), (6, 2**-2, 2**-3), (12, 2**-1, 2**-3.5)]
)
def test_slopes_of_head_counts_that_are_no_power_of_two(
    heads: int, first: float, last: float
) -> None:
    slopes = alibi_slopes(heads)
    assert len(slopes) == heads
    assert slopes[0] == pytest.approx(first)
    assert slopes[-1] == pytest.approx(last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(heads=6, kv_heads=4), "does not divide"),
        (dict(window=4), "window needs causal"),
        (dict(window=0, causal="top_left"), "at least 1"),
        (dict(causal="left"), "causal='left'"),
        (dict(alibi="t5"), "alibi='t5'"),
        (dict(rotary="neox"), "rotary='neox'"),
    ],
)
def test_what_a_plan_refuses(change: dict, message: str) -> None:
    sizes = dict(batch=1, query_length=1, key_length=4, heads=4, kv_heads=4, head_dim=8)
    with pytest.raises(InputError, match=message):
        standard_plan(**{**sizes, **change})
