"""Vector exp, tanh, sigmoid, erf for CPU kernels.

LLVM turns a vector `exp` into one library call a lane, about 10 ns each: a GELU after a product
would cost as much as the product. These are polynomials on whole vectors, within 2e-7 of the true
value (relative for exp, absolute for the others). The coefficients are minimax fits made for this
file: exp(r) = 1 + r + r^2 P(r) on |r| <= ln(2)/2, tanh(x) = x + x z P(z) and erf(x) = x P(z) with
z = x^2 near 0, log(erfc(x)) as a polynomial on [0.9, 4] away from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from .cpu_build import keep, splat

__all__ = ["erf", "exp", "gelu_erf", "gelu_tanh", "sigmoid", "silu", "tanh"]

_EXP = (
    0.5000000028585575,
    0.16666573359536882,
    0.04166636344940291,
    0.008363776390259281,
    0.0013942161401958762,
)
_TANH = (
    -0.33333329249814525,
    0.13332794551122548,
    -0.053854069692594986,
    0.021010079862559903,
    -0.006113188371861932,
)
_ERF = (
    1.1283791659138949,
    -0.37612627136307547,
    0.11283600178495523,
    -0.026854444651367184,
    0.005189535409323558,
    -0.0008020841604876741,
    7.889119805640221e-05,
)
_LOG_ERFC = (
    0.00015054555012739002,
    -1.1294029910789292,
    -0.6335632639619169,
    -0.10805447415650926,
    0.024982526010792337,
    -0.004122787153007593,
    0.0004253138726644001,
    -2.037721565533201e-05,
)
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4


def _polynomial(x: Any, coefficients: Sequence[float], lanes: int) -> Any:
    value = splat(coefficients[-1], lanes)
    for c in reversed(coefficients[:-1]):
        # Bound at every step: TVM's simplifiers take exponential time on deep products.
        value = keep(value * x + splat(c, lanes), lanes)
    return value


def _abs(x: Any, lanes: int) -> Any:
    bits = tirx.reinterpret(_type("int32", lanes), x)
    return tirx.reinterpret(_type("float32", lanes), bits & splat(0x7FFFFFFF, lanes, "int32"))


def _keep_nan(x: Any, result: Any, lanes: int) -> Any:
    """Return `result`, and x where x is NaN. By its bits: TVM simplifies `x != x` to false."""
    bits = tirx.reinterpret(_type("int32", lanes), x) & splat(0x7FFFFFFF, lanes, "int32")
    number = bits <= splat(0x7F800000, lanes, "int32")
    return keep(tirx.Select(number, result, x), lanes)


def _type(dtype: str, lanes: int) -> str:
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def exp(x: Any, lanes: int) -> Any:
    """Return e^x of fp32 vectors; 0 below -87.33, infinity above 88.37, NaN stays."""
    clamped = keep(tirx.min(tirx.max(x, splat(-87.33, lanes)), splat(88.37, lanes)), lanes)
    n = keep(tirx.floor(clamped * splat(1.4426950408889634, lanes) + splat(0.5, lanes)), lanes)
    r = keep(clamped - n * splat(_LN2_HIGH, lanes) - n * splat(_LN2_LOW, lanes), lanes)
    value = _polynomial(r, _EXP, lanes) * (r * r) + r + splat(1.0, lanes)
    exponent = tirx.Cast(_type("int32", lanes), n) + splat(127, lanes, "int32")
    two_n = tirx.reinterpret(_type("float32", lanes), exponent << splat(23, lanes, "int32"))
    result = keep(value * two_n, lanes)
    result = keep(tirx.Select(x < splat(-87.33, lanes), splat(0.0, lanes), result), lanes)
    result = keep(tirx.Select(x > splat(88.37, lanes), splat(float("inf"), lanes), result), lanes)
    return _keep_nan(x, result, lanes)


def sigmoid(x: Any, lanes: int) -> Any:
    """Return 1 / (1 + e^-x)."""
    return keep(splat(1.0, lanes) / (splat(1.0, lanes) + exp(keep(-x, lanes), lanes)), lanes)


def silu(x: Any, lanes: int) -> Any:
    """Return x / (1 + e^-x)."""
    return keep(x / (splat(1.0, lanes) + exp(keep(-x, lanes), lanes)), lanes)


def tanh(x: Any, lanes: int) -> Any:
    """Return the hyperbolic tangent."""
    size = keep(_abs(x, lanes), lanes)
    e = exp(keep(size * splat(-2.0, lanes), lanes), lanes)
    far = keep((splat(1.0, lanes) - e) / (splat(1.0, lanes) + e), lanes)
    far = keep(tirx.Select(x < splat(0.0, lanes), -far, far), lanes)
    z = keep(x * x, lanes)
    near = x + x * z * _polynomial(z, _TANH, lanes)
    return keep(tirx.Select(size < splat(0.625, lanes), near, far), lanes)


def erf(x: Any, lanes: int) -> Any:
    """Return the error function."""
    size = keep(_abs(x, lanes), lanes)
    inside = keep(tirx.min(size, splat(4.0, lanes)), lanes)
    far = keep(
        splat(1.0, lanes) - exp(keep(_polynomial(inside, _LOG_ERFC, lanes), lanes), lanes), lanes
    )
    far = keep(tirx.Select(x < splat(0.0, lanes), -far, far), lanes)
    near = x * _polynomial(keep(x * x, lanes), _ERF, lanes)
    return _keep_nan(x, tirx.Select(size < splat(1.0, lanes), near, far), lanes)


def gelu_erf(x: Any, lanes: int) -> Any:
    """Return x Phi(x), Phi the normal distribution function."""
    half = keep(x * splat(0.5, lanes), lanes)
    return keep(half + half * erf(keep(x * splat(0.7071067811865476, lanes), lanes), lanes), lanes)


def gelu_tanh(x: Any, lanes: int) -> Any:
    """Return x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written as x sigmoid(2 ...)."""
    cubic = keep(x + keep(x * x, lanes) * x * splat(0.044715, lanes), lanes)
    return keep(x * sigmoid(keep(cubic * splat(1.5957691216057308, lanes), lanes), lanes), lanes)
