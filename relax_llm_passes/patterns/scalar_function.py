"""Name the scalar function that a few elementwise bindings compute together.

GELU has a dozen spellings. Instead of one pattern for each, the bindings between one value and the
next one that depends on nothing else are executed with numpy on sample points, in float64, and the
result is compared with the functions that epilogues know. The order of operands, how constants are
written and which operators are used make no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax

from .shapes import dims, same_dims

__all__ = ["ScalarGraph", "grow_scalar_graph", "name_function", "scalar_constant"]

_MAX_BINDINGS = 24  # the longest spelling seen (tanh GELU with a cast on every step) has 17

_vector_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _gelu_erf(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + _vector_erf(x / math.sqrt(2.0)))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "relax.abs": np.abs,
    "relax.add": np.add,
    "relax.clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "relax.divide": np.divide,
    "relax.equal": np.equal,
    "relax.erf": lambda x: _vector_erf(x),
    "relax.exp": np.exp,
    "relax.greater": np.greater,
    "relax.greater_equal": np.greater_equal,
    "relax.less": np.less,
    "relax.less_equal": np.less_equal,
    "relax.log": np.log,
    "relax.maximum": np.maximum,
    "relax.minimum": np.minimum,
    "relax.multiply": np.multiply,
    "relax.negative": np.negative,
    "relax.nn.gelu": _gelu_erf,
    "relax.nn.gelu_tanh": _gelu_tanh,
    "relax.nn.relu": lambda x: np.maximum(x, 0.0),
    "relax.nn.silu": lambda x: x * _sigmoid(x),
    "relax.nn.softplus": _softplus,
    "relax.power": np.power,
    "relax.rsqrt": lambda x: 1.0 / np.sqrt(x),
    "relax.sigmoid": _sigmoid,
    "relax.sqrt": np.sqrt,
    "relax.square": np.square,
    "relax.subtract": np.subtract,
    "relax.tanh": np.tanh,
    "relax.where": np.where,
}
_CAST = "relax.astype"
_SAME_NUMBER = (_CAST, "relax.expand_dims", "relax.reshape", "relax.broadcast_to")

_NAMED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu_squared": lambda x: np.maximum(x, 0.0) ** 2,
    "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}

_SAMPLES = np.concatenate(
    [
        np.linspace(-6.0, 6.0, 97),
        np.array([-40.0, -11.0, -1e-3, -1e-5, 1e-5, 1e-3, 11.0, 40.0]),
        np.random.default_rng(7).normal(scale=2.0, size=64),
    ]
)


@dataclass
class ScalarGraph:
    """Elementwise bindings between `source` and `result` that depend on nothing else.

    Attributes
    ----------
    source, result : relax.Var
        The one value that goes in and the one that comes out.
    variables : list[relax.Var]
        Variables of the bindings, in program order; the last is `result`.
    operators : set[str]
        Names of the operators used.
    """

    source: relax.Var
    result: relax.Var
    variables: list[relax.Var]
    operators: set[str] = field(default_factory=set)


def scalar_constant(view: Any, expr: relax.Expr) -> float | None:
    """Return the value of a constant with one element (through aliases and `full`), else None."""
    number = view.scalar(expr)
    if number is not None:
        return float(number)
    call = view.call(expr)
    if call is None:
        return None
    if call.op.name in ("relax.full", "relax.full_like"):
        return scalar_constant(view, call.args[1])
    if call.op.name in ("relax.zeros", "relax.zeros_like"):
        return 0.0
    if call.op.name in ("relax.ones", "relax.ones_like"):
        return 1.0
    if call.op.name in _SAME_NUMBER:
        return scalar_constant(view, call.args[0])
    return None


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype)


def _shape_is_kept(source: relax.Var, var: relax.Var) -> bool:
    before, after = dims(source), dims(var)
    return before is not None and after is not None and same_dims(before, after)


def _operands(view: Any, call: relax.Call, inside: Mapping[relax.Var, Any]) -> list[Any] | None:
    """Return, per argument, a variable of `inside` or a number; None if one is something else."""
    found: list[Any] = []
    for arg in call.args:
        var = view.resolve(arg)
        if isinstance(var, relax.Var) and var in inside:
            found.append(var)
            continue
        number = scalar_constant(view, arg)
        if number is None:
            return None
        found.append(number)
    return found


def grow_scalar_graph(view: Any, source: relax.Var) -> ScalarGraph | None:
    """Return the smallest graph of elementwise bindings through which all uses of `source` pass.

    Parameters
    ----------
    view : FunctionView
        The function.
    source : relax.Var
        A tensor, not an output of the function.

    Returns
    -------
    ScalarGraph or None
        None when some use is not elementwise, needs another tensor, or leaves the graph.
    """
    inside: dict[relax.Var, None] = {source: None}
    waiting: set[relax.Var] = {source}  # those with a use that is not inside yet
    order: list[relax.Var] = []
    operators: set[str] = set()
    while len(order) < _MAX_BINDINGS:
        if any(view.is_output(v) for v in waiting):
            return None
        pending = {b.var: b for v in waiting for b in view.users(v) if b.var not in inside}
        if not pending:
            return None
        binding = pending[min(pending, key=view.index)]
        call = binding.value
        name = getattr(getattr(call, "op", None), "name", "")
        if not isinstance(call, relax.Call) or (name not in _OPERATORS and name != _CAST):
            return None
        if name != _CAST and _operands(view, call, inside) is None:
            return None
        if not _shape_is_kept(source, binding.var):
            return None
        var = binding.var
        inside[var] = None
        order.append(var)
        operators.add(name)
        waiting = {v for v in waiting if any(b.var not in inside for b in view.users(v))}
        waiting.add(var)
        if len(waiting) == 1:
            return ScalarGraph(source, var, order, operators)
    return None


def _evaluate(view: Any, graph: ScalarGraph, samples: np.ndarray) -> np.ndarray | None:
    values: dict[relax.Var, Any] = {graph.source: samples}
    with np.errstate(all="ignore"):
        for var in graph.variables:
            call = view.value(var)
            if call.op.name == _CAST:
                source = view.resolve(call.args[0])
                if source not in values:
                    return None
                values[var] = np.asarray(values[source], dtype=np.float64)
                continue
            operands = _operands(view, call, values)
            if operands is None:
                return None
            arguments = [values[o] if isinstance(o, relax.Var) else o for o in operands]
            try:
                values[var] = _OPERATORS[call.op.name](*arguments)
            except (TypeError, ValueError):
                return None
    result = np.asarray(values[graph.result], dtype=np.float64)
    return result if result.shape == samples.shape else None


def _unit_roundoff(dtype: str) -> float:
    return {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 2.0**-24)


def _steps_before(operators: set[str]) -> Sequence[str]:
    # fp16 constants are too coarse to tell the two GELUs apart by value; the operators are not.
    if "relax.erf" in operators or "relax.nn.gelu" in operators:
        return [n for n in _NAMED if n != "gelu_tanh"]
    return [n for n in _NAMED if n != "gelu_erf"]


def name_function(view: Any, graph: ScalarGraph) -> dict[str, Any] | None:
    """Return the epilogue step that the graph computes.

    Returns
    -------
    dict or None
        `{"op": name}` for a function of one value, `{"op": "scale", "value": c}` for c*x,
        `{"op": "square"}` for x*x, `{"op": "identity"}`, `{"op": "cast", "dtype": d}` for a single
        astype; None for anything else. A constant may be off by half a unit in the last place of
        the dtype of the tensors, or by 5e-6 (constants are often written with six digits).
    """
    source, result = _dtype(graph.source), _dtype(graph.result)
    if graph.operators == {_CAST}:
        return {"op": "cast", "dtype": result} if len(graph.variables) == 1 else None
    if source != result:
        return None
    got = _evaluate(view, graph, _SAMPLES)
    if got is None or not np.isfinite(got).all():
        return None
    slack = max(_unit_roundoff(source), 5e-6) * (0.5 + np.abs(_SAMPLES))
    best: tuple[float, str] | None = None
    for name in _steps_before(graph.operators):
        want = _NAMED[name](_SAMPLES)
        excess = np.abs(got - want) / (slack * np.maximum(1.0, np.abs(want)))
        if excess.max() <= 1.0 and (best is None or excess.max() < best[0]):
            best = (float(excess.max()), name)
    if best is not None:
        return {"op": best[1]}
    if np.abs(got - _SAMPLES**2).max() <= 1e-9:
        return {"op": "square"}
    factor = float(got[np.argmax(_SAMPLES)] / _SAMPLES.max())
    if factor != 0.0 and np.abs(got - factor * _SAMPLES).max() <= 1e-9 * abs(factor) * 40:
        return {"op": "identity"} if factor == 1.0 else {"op": "scale", "value": factor}
    return None
