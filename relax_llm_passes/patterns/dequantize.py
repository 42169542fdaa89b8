"""Recognise group-wise dequantisation by what its TIR function computes.

The formats differ in bits, group size, zero point, storage type and packed axis, and every exporter
writes the arithmetic its own way. So sizes are read off the shapes, and the function's expression
is evaluated at sampled positions on random storage words and compared with

    weight[k, n] = (word[k // per_word, n] >> bits * (k % per_word) & mask) - max_int)
                   * scale[k // group, n]

(or the same with the axes exchanged). Any function that gives these values is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..report import Refusal
from .shapes import dims, dtype_of, same_dim, static

__all__ = ["Dequantize", "find_dequantize"]

_SAMPLES = 512
_WORD_BITS = {"uint32": 32, "uint16": 16, "uint8": 8, "int8": 8, "int32": 32}


@dataclass
class Dequantize:
    """A weight that is unpacked from words and scales.

    Attributes
    ----------
    packed, scale : relax.Expr
        Storage words and group scales.
    attrs : dict[str, Any]
        The composite's `quant` attribute.
    """

    packed: relax.Expr
    scale: relax.Expr
    attrs: dict[str, Any]


class _NotElementwise(Exception):
    """The function holds something that the evaluator does not follow."""


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_CALLS = {
    "shift_right": "RShift",
    "shift_left": "LShift",
    "bitwise_and": "BitwiseAnd",
    "bitwise_or": "BitwiseOr",
    "bitwise_xor": "BitwiseXor",
}


def _is_float(dtype: str) -> bool:
    return "float" in dtype


class _Elementwise:
    """The value of a scheduled-free PrimFunc at given output positions, in float64 and int64."""

    def __init__(self, func: tvm.tirx.PrimFunc, inputs: list[np.ndarray]) -> None:
        self.arrays = {p: a for p, a in zip(list(func.params)[: len(inputs)], inputs, strict=True)}
        self.stores: dict[Any, tuple[list[Any], Any]] = {}
        self.output = list(func.params)[-1]
        self.collect(func.body)

    def collect(self, stmt: Any) -> None:
        kind = type(stmt).__name__
        if kind == "SBlockRealize":
            self.block(stmt)
        elif kind == "SeqStmt":
            for inner in stmt.seq:
                self.collect(inner)
        elif kind == "For":
            self.collect(stmt.body)
        elif kind != "AllocBuffer":
            raise _NotElementwise(kind)

    def block(self, realize: Any) -> None:
        block = realize.block
        if block.init is not None:
            raise _NotElementwise("reduction")
        body = block.body
        if type(body).__name__ != "BufferStore":
            self.collect(body)
            return
        if any(int(v.iter_type) != 0 for v in block.iter_vars):
            raise _NotElementwise("reduction")
        target = getattr(body.buffer, "data", body.buffer)
        for key in {id(body.buffer): body.buffer, id(target): target}.values():
            if key in self.stores:
                raise _NotElementwise("a buffer is written twice")
            self.stores[key] = (list(body.indices), body.value)

    def at(self, source: Any, position: list[np.ndarray]) -> np.ndarray:
        if source in self.arrays:
            array = self.arrays[source]
            index = tuple(np.asarray(p, dtype=np.int64) for p in position)
            for i, size in zip(index, array.shape, strict=True):
                if (i < 0).any() or (i >= size).any():
                    raise _NotElementwise("a read out of bounds")
            return array[index]
        if source not in self.stores:
            raise _NotElementwise("a buffer without a value")
        indices, value = self.stores[source]
        if not all(isinstance(i, tvm.tirx.Var) for i in indices):
            raise _NotElementwise("a store that is not one element per iteration")
        return self.value(value, dict(zip(indices, position, strict=True)))

    def value(self, node: Any, env: dict[Any, Any]) -> Any:
        kind = type(node).__name__
        if kind in ("IntImm", "FloatImm"):
            return node.value
        if kind == "Var":
            if node in env:
                return env[node]
            raise _NotElementwise(f"variable {node}")
        if kind == "Cast":
            inner = self.value(node.value, env)
            dtype = str(node.ty)
            return np.asarray(inner, np.float64) if _is_float(dtype) else self.wrap(inner, dtype)
        if kind in _BINARY:
            return _BINARY[kind](self.value(node.a, env), self.value(node.b, env))
        if kind == "Div":
            if not _is_float(str(node.ty)):
                raise _NotElementwise("integer division that truncates")
            return self.value(node.a, env) / self.value(node.b, env)
        if kind == "Select":
            return np.where(
                self.value(node.condition, env),
                self.value(node.true_value, env),
                self.value(node.false_value, env),
            )
        if kind == "Let":
            return self.value(node.body, {**env, node.var: self.value(node.value, env)})
        if kind == "TensorLoad":
            return self.at(node.source, [self.value(i, env) for i in node.indices])
        if kind == "Call":
            name = str(getattr(node.op, "name", "")).rpartition(".")[2]
            if name in _CALLS:
                a, b = (self.value(x, env) for x in node.args)
                return _BINARY[_CALLS[name]](a, b)
            if name == "if_then_else":
                c, a, b = (self.value(x, env) for x in node.args)
                return np.where(c, a, b)
        raise _NotElementwise(kind)

    @staticmethod
    def wrap(value: Any, dtype: str) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = np.trunc(array)
        array = array.astype(np.int64)
        if dtype in ("int64", "uint64"):
            return array
        return array.astype(dtype).astype(np.int64)


def _formula(
    words: np.ndarray, scales: np.ndarray, k: np.ndarray, n: np.ndarray, axis: int, q: dict
) -> np.ndarray:
    word_k, group_k = k // q["per_word"], k // q["group"]
    first = (word_k, n) if axis == 0 else (n, word_k)
    second = (group_k, n) if axis == 0 else (n, group_k)
    if q["signed"]:
        value = words[first]
    else:
        value = (words[first] >> (q["bits"] * (k % q["per_word"]))) & ((1 << q["bits"]) - 1)
    return (value - q["max_int"]) * scales[second]


def _lengths(length: int, parts: int) -> list[int]:
    """Return the lengths of equal parts (the last may be short) that make `parts` of `length`."""
    shortest = -(-length // parts)
    longest = (length - 1) // (parts - 1) if parts > 1 else max(length, 32)
    # Exporters use round sizes, so those are tried first where several fit.
    sizes = range(shortest, min(longest, shortest + 64) + 1)
    return sorted(sizes, key=lambda n: (n % 32 != 0, n % 8 != 0, n))[:16]


def _plans(
    full: list[int], packed: list[int], scale: list[int], word: str, axis: int
) -> list[dict]:
    """Return the formats whose sizes fit the shapes, packed along `axis`."""
    other = 1 - axis
    if packed[other] != full[other] or scale[other] != full[other]:
        return []
    length, width = full[axis], _WORD_BITS[word]
    plans = []
    for per_word in _lengths(length, packed[axis]):
        if per_word > width:
            continue
        signed = word == "int8" and per_word == 1
        for group in _lengths(length, scale[axis]):
            for bits in range(width // per_word, 0, -1):
                plans.append({"per_word": per_word, "group": group, "signed": signed, "bits": bits})
                if signed:
                    break
    return plans


# Stands for a symbolic size of the axis that is not packed.
_ANY_SIZE = 40


def _size(dim: Any) -> int:
    size = static(dim)
    return _ANY_SIZE if size is None else size


def _identify(func: Any, full: list[int], packed: Any, scale: Any) -> tuple[int, dict] | str:
    """Return (packed axis, sizes) of the format, or what was found instead."""
    word = dtype_of(packed)
    shapes = [[_size(d) for d in dims(t) or ()] for t in (packed, scale)]
    generator = np.random.default_rng(20)
    bits = _WORD_BITS[word]
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if word[0] == "i" else (0, 1 << bits)
    words = generator.integers(low, high, size=shapes[0], dtype=np.int64)
    scales = generator.uniform(0.5, 2.0, size=shapes[1])
    try:
        function = _Elementwise(func, [words, scales])
        zeros = _Elementwise(func, [np.zeros_like(words), np.ones_like(scales)])
        edge = [np.array([0, d - 1]) for d in full]
        rows = np.concatenate([edge[0], generator.integers(0, full[0], _SAMPLES)])
        columns = np.concatenate([edge[1], generator.integers(0, full[1], _SAMPLES)])
        got = np.asarray(function.at(function.output, [rows, columns]), np.float64)
        offset = np.asarray(zeros.at(zeros.output, [rows, columns]), np.float64)
    except _NotElementwise as error:
        return f"the function is not a plain unpacking ({error})"
    if np.ptp(offset) != 0 or offset.flat[0] != np.round(offset.flat[0]):
        return "the zero point is not one integer"
    for axis in (1, 0):
        for q in _plans(full, shapes[0], shapes[1], word, axis):  # type: ignore[arg-type]
            q["max_int"] = int(-offset.flat[0])
            k, n = (rows, columns) if axis == 0 else (columns, rows)
            if np.allclose(got, _formula(words, scales, k, n, axis, q), rtol=1e-9, atol=1e-9):
                return axis, q
    return "the values are not (field of a word - constant) * scale of a group"


_CACHE: dict[Any, tuple[int, dict] | str] = {}


def find_dequantize(view: Any, expr: relax.Expr, transposed: bool) -> Dequantize | Refusal | None:
    """Return the packed form of a weight, a Refusal for a near miss, or None for anything else.

    Parameters
    ----------
    view : FunctionView
        The function; `view.mod` holds the PrimFunc.
    expr : relax.Expr
        The right operand's root.
    transposed : bool
        Whether it is (N, K) instead of (K, N).
    """
    call = view.value(expr)
    if not isinstance(call, relax.Call) or getattr(call.op, "name", "") != "relax.call_tir":
        return None
    func = view.mod[call.args[0]] if call.args[0] in view.mod.functions else None
    fields = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else []
    if not isinstance(func, tvm.tirx.PrimFunc) or len(fields) != 2 or len(call.args) > 2:
        return None
    shape = dims(call)
    if shape is None or len(shape) != 2 or dtype_of(fields[0]) not in _WORD_BITS:
        return None
    if not _is_float(dtype_of(fields[1])):
        return None

    def refuse(reason: str) -> Refusal:
        return Refusal(f"dequantised weight: {reason}", "gemm", view.name, str(expr))

    symbolic = [d for t in (call, *fields) for d in dims(t) or () if static(d) is None]
    summed = shape[1 if transposed else 0]
    if static(summed) is None or not all(same_dim(d, symbolic[0]) for d in symbolic):
        return refuse("symbolic sizes of the weight")
    full = [_size(d) for d in shape]
    key = (func, tuple(map(str, (fields[0].ty, fields[1].ty))))
    if key not in _CACHE:
        if len(_CACHE) > 64:
            _CACHE.clear()
        _CACHE[key] = _identify(func, full, *fields)
    found = _CACHE[key]
    if isinstance(found, str):
        return refuse(found)
    axis, q = found
    if axis != (1 if transposed else 0):
        return refuse("packed along the columns, not along the summed axis")
    attrs = {
        "bits": q["bits"],
        "group": q["group"],
        "scale_dtype": dtype_of(fields[1]),
        "packed_dtype": dtype_of(fields[0]),
        "max_int": q["max_int"],
        "layout": "NK" if transposed else "KN",
    }
    return Dequantize(view.resolve(fields[0]), view.resolve(fields[1]), attrs)
