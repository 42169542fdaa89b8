"""Dot products of pairs of bfloat16: one instruction where the processor has it (avx512-bf16).

`vdpbf16ps` adds the two products of a pair to an fp32 sum: twice the multiply-adds of fp32, and
nothing to unpack. Its numbers differ a little from fp32 arithmetic: denormal inputs count as zero,
denormal results become zero, and each of its two additions rounds to nearest.

TVM turns bfloat16 values into fp32 before code generation, so that the intrinsic cannot be called
with its own types. A few lines of LLVM's language that take pairs as int32 are imported instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from .cpu_build import T, i64

__all__ = ["AVX512_BF16", "PAIRS", "bf16_dot", "bf16_dot_source", "load_pairs", "with_source"]

_NAME = "relax_llm_dot_bf16"
# The dtype that a spec has when its operands are read as pairs and its K counts them.
PAIRS = "bfloat16 pairs"

AVX512_BF16 = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define linkonce_odr <16 x float> @{_NAME}(<16 x float> %sum, <16 x i32> %a, <16 x i32> %b)
    alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
      <16 x float> %sum, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
"""


def bf16_dot_source(target: tvm.target.Target, lanes: int) -> str:
    """Return LLVM's text of the product for a target that has the instruction, or ""."""
    has = tvm.get_global_func("target.target_has_feature", allow_missing=True)
    if lanes != 16 or has is None or not has("avx512bf16", target):
        return ""
    return AVX512_BF16


def bf16_dot(total: Any, a: Any, b: Any, lanes: int) -> Any:
    """Return `total` plus both products of each pair; `a` and `b` are int32 vectors of pairs."""
    return tirx.call_pure_extern(f"float32x{lanes}", _NAME, total, a, b)


def load_pairs(buffer: Any, pair: Any, lanes: int = 1) -> Any:
    """Load neighbouring pairs of a flat bfloat16 buffer as int32."""
    both = tirx.BufferLoad(buffer, [tirx.Ramp(i64(pair * 2), i64(1), 2 * lanes)])
    return tirx.reinterpret(f"int32x{lanes}" if lanes > 1 else "int32", both)


def with_source(source: str, body: Callable[[], None]) -> None:
    """Emit `body` with `source` imported; nothing is imported for ""."""
    if not source:
        body()
        return
    with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", source):
        body()
