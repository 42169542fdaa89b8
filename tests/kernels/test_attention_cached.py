"""Decode on caches of fixed capacity: ragged batches, page tables, in place or not."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_llm_passes.cuda_on_cpu import run_primfunc, why_not
from relax_llm_passes.errors import InputError
from relax_llm_passes.kernels.attention_cached import cached_plan
from relax_llm_passes.kernels.attention_decode_cpu import attention_decode_cpu
from relax_llm_passes.kernels.attention_decode_cuda import attention_decode_cuda
from relax_llm_passes.targets import parse_target, vector_lanes

from .cached_reference import CachedCase, make_cached

TARGET = parse_target("native")
LANES = vector_lanes(TARGET, "float32")
CUDA = parse_target("cuda -arch=sm_80")

# Lengths from an empty cache to a full one; heads of a group that is no power of two.
CASES = {
    "ragged": (dict(lengths=[0, 7, 23], new=1, H=4, K=2, D=16, rotary="half"), 1),
    "ragged-split": (dict(lengths=[130, 3], new=1, H=6, K=2, D=32, capacity=150, alibi=True), 3),
    "paged-fp16": (dict(lengths=[5, 16, 0], new=2, H=4, K=1, D=16, page_size=8,
                        dtype="float16"), 1),
    "paged-split": (dict(lengths=[90, 31], new=1, H=3, K=1, D=16, page_size=16, capacity=96,
                         rotary="interleaved", sink=True, softcap=3.0), 2),
    "bf16-window": (dict(lengths=[20, 9], new=1, H=2, K=2, D=16, dtype="bfloat16", window=4), 1),
    "anew": (dict(lengths=[11, 0], new=3, H=4, K=2, D=16, in_place=False), 2),
    "rows-first": (dict(lengths=[11, 4], new=1, H=4, K=4, D=8, kv_layout="SBHD"), 1),
}  # fmt: skip


def _run_cpu(case: CachedCase, splits: int) -> None:
    func = attention_decode_cpu(case.plan, LANES, splits=splits)
    module = tvm.compile(tvm.IRModule({"attention": func}), target=TARGET)
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in case.inputs + case.outputs]
    module["attention"](*arguments)
    case.check([arguments[i].numpy() for i in case.changed])


@pytest.mark.parametrize("name", CASES)
def test_cpu(name: str) -> None:
    options, splits = CASES[name]
    _run_cpu(make_cached(**options), splits)


def test_rows_behind_a_full_cache_are_not_written() -> None:
    _run_cpu(make_cached(lengths=[24, 23], new=2, H=2, K=2, D=8, window=6), 1)


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
@pytest.mark.parametrize(
    "name",
    ["paged-fp16", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "paged-fp16")],
)
def test_cuda(name: str) -> None:
    options, splits = CASES[name]
    case = make_cached(**options)
    func = attention_decode_cuda(case.plan, splits=splits)
    # In place, a second order of threads would start from caches that are written already; that
    # gives the same rows, as every order writes the same.
    result = run_primfunc(func, [*case.inputs, *case.outputs], case.changed, CUDA, orders=2)
    case.check(list(result.outputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(heads=6, kv_heads=4), "does not divide"),
        (dict(page_size=8), "expected both"),
        (dict(page_size=7, pages=3), "no multiple of page_size"),
        (dict(page_size=8, pages=3, in_place=False), "in place only"),
        (dict(rotary="neox"), "rotary='neox'"),
        (dict(rotary="half"), "needs positions"),
        (dict(window=0), "at least 1"),
    ],
)
def test_what_a_plan_refuses(change: dict, message: str) -> None:
    sizes = dict(batch=2, new=1, capacity=24, heads=4, kv_heads=4, head_dim=8)
    with pytest.raises(InputError, match=message):
        cached_plan(**{**sizes, **change})
