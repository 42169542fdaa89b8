"""Trees of loads as expressions: a value that a kernel reads, with what happens to it on the way.

The form is that of `patterns.affine.to_plain`, with expressions allowed for strides::

    {"load": role, "at": {"h": 64, "n": 1, "": 128}}    one element, in float32
    {"value": 0.5}                                      a constant
    {"op": "exp", "args": [tree]}                       an operator, or "cast:float16"
    {"op": "shift:t", "args": [first, rest]}            first where t is 0, rest elsewhere
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

from ..errors import InputError
from .norm_math import Functions

__all__ = ["Plain", "address", "depends_on", "evaluate", "loaded"]

Plain = Mapping[str, Any]


def _f32(x: float) -> Any:
    return tirx.const(x, "float32")


def _apply(op: str, args: list[Any], f: Functions) -> Any:
    if op.startswith("cast:"):
        dtype = op[5:]
        return tirx.Cast("float32", tirx.Cast(dtype, args[0]))
    x = args[0]
    if len(args) == 2:
        y = args[1]
        binary: dict[str, Callable[[], Any]] = {
            "add": lambda: x + y,
            "subtract": lambda: x - y,
            "multiply": lambda: x * y,
            "divide": lambda: x / y,
            "maximum": lambda: tirx.max(x, y),
            "minimum": lambda: tirx.min(x, y),
        }
        if op in binary:
            return binary[op]()
    unary: dict[str, Callable[[], Any]] = {
        "negative": lambda: _f32(0) - x,
        "exp": lambda: f.exp(x),
        "sigmoid": lambda: f.sigmoid(x),
        "silu": lambda: f.silu(x),
        # 1 - 2 / (1 + exp(2x)): exact at both ends, where exp overflows or vanishes.
        "tanh": lambda: _f32(1) - _f32(2) / (_f32(1) + f.exp(x * _f32(2))),
        "sqrt": lambda: tirx.sqrt(x),
        "square": lambda: x * x,
        "relu": lambda: tirx.max(x, _f32(0)),
    }
    if op not in unary:
        raise InputError(f"operator {op!r} in an operand is not known")
    return unary[op]()


def address(at: Mapping[str, Any], symbols: Mapping[str, Any]) -> Any:
    """Return the flat index for values of the loop symbols."""
    total: Any = at.get("", 0)
    for name, step in at.items():
        if name:
            total = total + symbols[name] * step
    return total


def evaluate(
    tree: Plain,
    symbols: Mapping[str, Any],
    read: Callable[[str, Any], Any],
    functions: Functions,
) -> Any:
    """Return a tree's value in float32.

    Parameters
    ----------
    tree : mapping
        See the module.
    symbols : mapping
        Values of the loop symbols.
    read : callable
        `read(role, index)`: a float32 element of a role's tensor.
    functions : Functions
        exp and what follows from it.
    """
    if "load" in tree:
        return read(tree["load"], address(tree["at"], symbols))
    if "value" in tree:
        return _f32(tree["value"])
    args = [evaluate(a, symbols, read, functions) for a in tree["args"]]
    if tree["op"].startswith("shift:"):
        # Lazy: before the first position there is nothing to read.
        return tirx.if_then_else(symbols[tree["op"][6:]] == 0, args[0], args[1])
    return _apply(tree["op"], args, functions)


def loaded(tree: Plain) -> list[Plain]:
    """Return the loads of a tree."""
    if "load" in tree:
        return [tree]
    return [ld for a in tree.get("args", ()) for ld in loaded(a)]


def depends_on(tree: Plain, symbol: str) -> bool:
    """Whether the value changes with a loop symbol."""
    return any(
        not (isinstance(step, int) and step == 0)
        for ld in loaded(tree)
        for name, step in ld["at"].items()
        if name == symbol
    )
