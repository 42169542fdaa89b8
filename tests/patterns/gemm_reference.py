"""What the graphs of gemm_cases compute, in float64, by numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm.ir import Op

from ..interpreter import Interpreter
from .gemm_cases import Case

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_OPERATORS = {
    "relax.divide": np.divide,
    "relax.erf": _erf,
    "relax.nn.gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "relax.nn.gelu_tanh": _gelu_tanh,
    "relax.nn.silu": lambda x: x / (1 + np.exp(-x)),
    "relax.power": np.power,
    "relax.square": np.square,
}


class Double(Interpreter):
    """The interpreter with the operators of the cases, for float64 modules."""

    def _op(self, call: Any, env: dict) -> Any:
        name = call.op.name if isinstance(call.op, Op) else ""
        values = lambda: [self._expr(a, env) for a in call.args[:]]  # noqa: E731
        if name in _OPERATORS:
            return _OPERATORS[name](*values())
        if name in ("relax.expand_dims", "relax.squeeze"):
            return values()[0].reshape([int(self._prim(d, env)) for d in call.ty.shape.values[:]])
        if name == "relax.astype":
            return values()[0]  # the reference does not round
        return super()._op(call, env)


def reference(case: Case, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a case for inputs of any dtype, computed in float64."""
    result = Double(case.module("float64")).run("main", [a.astype("float64") for a in arrays])
    return list(result) if isinstance(result, tuple) else [result]
