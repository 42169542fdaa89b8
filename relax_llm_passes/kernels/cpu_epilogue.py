"""What a CPU matrix kernel does with a sum before it stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ..errors import InputError
from . import cpu_math
from .cpu_build import TensorSpec, let, load, splat, store

__all__ = ["OPERAND_OPS", "Epilogue", "EpilogueOp"]

OPERAND_OPS = ("bias", "residual", "multiply")
_ACTIVATIONS = {
    "gelu_erf": cpu_math.gelu_erf,
    "gelu_tanh": cpu_math.gelu_tanh,
    "silu": cpu_math.silu,
    "sigmoid": cpu_math.sigmoid,
    "tanh": cpu_math.tanh,
}
_SIMPLE = ("relu", "relu_squared", "scale", "cast")
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class EpilogueOp:
    """One step: its name, the operand's role and dtype if it has one, or its number.

    `bias` adds a vector over the columns, `residual` adds and `multiply` multiplies by a tensor of
    the result's shape; `scale` multiplies by `value`. `cast` is kept for the record only: sums
    stay in fp32 until the end, which rounds once where the graph rounds at every step.
    """

    op: str
    operand: str = ""
    dtype: str = "float32"
    value: float = 1.0


@dataclass(frozen=True)
class Epilogue:
    """The steps in the order of the program."""

    ops: tuple[EpilogueOp, ...] = ()

    @staticmethod
    def parse(steps: Sequence[Mapping[str, Any]], dtypes: Mapping[str, str]) -> Epilogue:
        """Read the composite's list of steps.

        Parameters
        ----------
        steps : sequence of mappings
            `{"op": "bias", "operand": "epi0"}`, `{"op": "scale", "value": 0.5}`, ...
        dtypes : mapping
            Dtype of each operand by role.

        Raises
        ------
        InputError
            For a step, or an operand's dtype, that CPU kernels do not have.
        """
        ops = []
        for step in steps:
            op = str(step["op"])
            if op in OPERAND_OPS:
                role = str(step["operand"])
                dtype = dtypes[role]
                if dtype not in _FLOATS:
                    raise InputError(f"epilogue {op}: operand {role} is {dtype}, not a float")
                ops.append(EpilogueOp(op, role, dtype))
            elif op in _ACTIVATIONS or op in _SIMPLE:
                dtype = str(step.get("dtype", "float32"))
                if dtype not in _FLOATS:
                    raise InputError(f"epilogue {op} to {dtype}: CPU kernels round to floats only")
                ops.append(EpilogueOp(op, "", dtype, float(step.get("value", 1.0))))
            else:
                raise InputError(f"epilogue step {op!r} is unknown to the CPU kernels")
        return Epilogue(tuple(ops))

    def tensors(self, out_shape: Sequence[int | str], n: int | str) -> list[TensorSpec]:
        """Return the operands in the order of their first use."""
        found: dict[str, TensorSpec] = {}
        for op in self.ops:
            if op.operand:
                shape = (n,) if op.op == "bias" else tuple(out_shape)
                found.setdefault(op.operand, TensorSpec(op.operand, shape, op.dtype))
        return list(found.values())

    def finish(
        self, buffers: Mapping[str, Any], value: Any, row_start: Any, column: Any, lanes: int
    ) -> None:
        """Apply the steps to a vector of sums and store it.

        Parameters
        ----------
        buffers : mapping
            Flat buffers by name; the result's is "out".
        value : Expr
            fp32 vector of neighbouring columns of one row.
        row_start : Expr
            Offset of the row in the result.
        column : Expr
            First column.
        lanes : int
            Width of the vector.
        """
        for op in self.ops:
            value = let(self._step(op, buffers, value, row_start, column, lanes))
        store(buffers["out"], value, row_start + column, lanes)

    @staticmethod
    def _step(
        op: EpilogueOp, buffers: Mapping[str, Any], value: Any, start: Any, column: Any, lanes: int
    ) -> Any:
        if op.op == "bias":
            return value + load(buffers[op.operand], column, lanes)
        if op.op == "residual":
            return value + load(buffers[op.operand], start + column, lanes)
        if op.op == "multiply":
            return value * load(buffers[op.operand], start + column, lanes)
        if op.op == "scale":
            return value * splat(op.value, lanes)
        if op.op == "cast":
            return value
        if op.op in ("relu", "relu_squared"):
            # Written so that NaN stays NaN.
            zero = splat(0.0, lanes)
            positive = let(tirx.Select(value < zero, zero, value))
            return positive if op.op == "relu" else positive * positive
        return _ACTIVATIONS[op.op](value, lanes)
