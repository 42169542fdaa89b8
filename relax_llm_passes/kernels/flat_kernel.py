"""What kernels of norms, recurrences and blends begin with: parameters as one-dimensional buffers.

`flat_kernel` writes the PrimFunc around a body; `tensor_of` reads a parameter's tensor off a
composite's types. Shapes are compact, so that an element is named by one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..errors import InputError
from .norm_program import Tensor

__all__ = [
    "FLOATS",
    "Typed",
    "check_sizes",
    "flat_kernel",
    "known_shape",
    "tensor_of",
    "too_large",
]

FLOATS = ("float16", "bfloat16", "float32")
# Element offsets are 32-bit where every extent is static.
MOST_ELEMENTS = 2**31 - 1


class Typed:
    """A type where an expression is expected (`known_shape` reads `.ty` only)."""

    def __init__(self, ty: Any) -> None:
        self.ty = ty


def known_shape(expr: relax.Expr) -> list[Any] | None:
    """Return the shape of a tensor-typed expression as ints and expressions, or None."""
    ty = getattr(expr, "ty", None)
    shape = getattr(ty, "shape", None)
    if shape is None:
        return None
    if isinstance(shape, relax.ShapeExpr):
        values = shape.values
    else:
        shape_ty = getattr(shape, "ty", None)
        values = getattr(shape_ty, "values", None)
    if values is None:
        return None
    return [int(v.value) if isinstance(v, tirx.IntImm) else v for v in values]


def too_large(shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether a static shape needs offsets beyond 32 bits, or has nothing to compute."""
    for shape in shapes:
        size = 1
        for d in shape:
            size *= d if isinstance(d, int) else 1
        if size > MOST_ELEMENTS or size == 0:
            return True
    return False


def tensor_of(name: str, ty: Any) -> Tensor:
    """Return the parameter `name` of a tensor type.

    Raises
    ------
    InputError
        When its shape is unknown, or its elements are no floats.
    """
    shape = known_shape(Typed(ty))
    if shape is None:
        raise InputError(f"the shape of {name} is unknown")
    if str(ty.dtype) not in FLOATS:
        raise InputError(f"{name} is {ty.dtype}, expected float16, bfloat16 or float32")
    return Tensor(name, tuple(shape), str(ty.dtype))


def check_sizes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Raise an InputError unless every size is a number or a size of an input."""
    every = [*inputs, *outputs]
    if too_large([t.shape for t in every]):
        raise InputError("a tensor is empty or beyond 2**31 elements")
    bound = {d for t in inputs for d in t.shape if isinstance(d, tirx.Var)}
    if any(not isinstance(d, int) and d not in bound for t in every for d in t.shape):
        raise InputError("a size is an expression")


def flat_kernel(
    name: str, tensors: Sequence[Tensor], body: Callable[[list[Any]], None]
) -> tirx.PrimFunc:
    """Return a scheduled PrimFunc.

    Parameters
    ----------
    name : str
        Base of its name.
    tensors : sequence of Tensor
        Its parameters, inputs first.
    body : callable
        `body(flat)` emits the statements; `flat` holds a one-dimensional buffer per parameter.
    """
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            handles = [T.arg(f"p_{t.name}", T.handle()) for t in tensors]
            buffers = [
                T.match_buffer(h, t.shape, t.dtype) for h, t in zip(handles, tensors, strict=True)
            ]
            with T.sblock("root"):
                T.reads()
                T.writes()
                flat = []
                for t, b in zip(tensors, buffers, strict=True):
                    size: Any = 1
                    for d in t.shape:
                        size = size * d
                    flat.append(T.decl_buffer((size,), t.dtype, data=b.data))
                body(flat)
    return builder.get()
