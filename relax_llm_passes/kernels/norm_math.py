"""Elementary functions as expressions: the intrinsic on CUDA, a vectorisable form on the CPU.

LLVM turns `exp` of a vector into one library call per lane. The CPU form is a polynomial after
reduction by ln 2 (the scheme and coefficients of the Cephes library's `expf`); its relative error
is below 2e-7 over the float32 range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

__all__ = ["CPU", "CUDA", "Functions", "functions_for"]

_EXP_POLY = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def _exp_vector(x: Any) -> Any:
    if str(x.ty.dtype) != "float32":
        return tirx.exp(x)

    def const(v: float) -> Any:
        return tirx.const(v, "float32")

    n = tirx.floor(x * const(1.44269504088896341) + const(0.5))
    r = x - n * const(0.693359375) - n * const(-2.12194440e-4)
    y = const(_EXP_POLY[0])
    for c in _EXP_POLY[1:]:
        y = y * r + const(c)
    y = y * r * r + r + const(1.0)
    # 2**n in two factors: n reaches 128, whose single power of two is infinite.
    i = tirx.Cast("int32", n)
    half = tirx.shift_right(i, tirx.const(1, "int32"))

    def pow2(k: Any) -> Any:
        bits = tirx.shift_left(k + tirx.const(127, "int32"), tirx.const(23, "int32"))
        return tirx.reinterpret("float32", bits)

    y = y * pow2(half) * pow2(i - half)
    # Outside, the integer conversion above is meaningless; NaN passes through both selections.
    y = tirx.Select(x < const(-103.9), const(0.0), y)
    return tirx.Select(x > const(88.7228394), tirx.const(float("inf"), "float32"), y)


def _exp_intrinsic(x: Any) -> Any:
    return tirx.exp(x)


@dataclass(frozen=True)
class Functions:
    """exp and what follows from it, for one kind of target."""

    exp: Callable[[Any], Any]

    def sigmoid(self, x: Any) -> Any:
        """Return 1 / (1 + exp(-x))."""
        one = tirx.const(1, x.ty.dtype)
        return one / (one + self.exp(tirx.const(0, x.ty.dtype) - x))

    def silu(self, x: Any) -> Any:
        """Return x * sigmoid(x)."""
        one = tirx.const(1, x.ty.dtype)
        return x / (one + self.exp(tirx.const(0, x.ty.dtype) - x))


CUDA = Functions(_exp_intrinsic)
CPU = Functions(_exp_vector)


def functions_for(target: tvm.target.Target | None) -> Functions:
    """Return the forms to use on `target`."""
    return CPU if target is not None and target.kind.name == "llvm" else CUDA
