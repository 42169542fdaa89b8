"""Complex tensors of a torch program as real ones with a last axis of 2, as rotary code uses them.

TVM 0.27's importer knows no complex dtype. Covered: `view_as_complex`, `view_as_real`, `polar`,
`complex`, products, and reshapes of complex tensors; slices and new axes counted from the front
need nothing. Anything else on a complex tensor is reported by the importer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = ["complex_converters"]


def _is_complex(node: Any) -> bool:
    value = getattr(node, "meta", {}).get("val")
    return value is not None and hasattr(value, "is_complex") and bool(value.is_complex())


def _same(node: Any, importer: Any) -> Any:
    return importer.env[node.args[0]]


def _pair(importer: Any, real: Any, imaginary: Any) -> Any:
    from tvm import relax

    return importer.block_builder.emit(relax.op.stack([real, imaginary], axis=-1))


def _polar(node: Any, importer: Any) -> Any:
    """``polar(size, angle)``."""
    from tvm import relax

    emit = importer.block_builder.emit
    size, angle = (importer.env[a] for a in node.args[:2])
    parts = [emit(relax.op.multiply(size, emit(f(angle)))) for f in (relax.op.cos, relax.op.sin)]
    return _pair(importer, *parts)


def _complex(node: Any, importer: Any) -> Any:
    """``complex(real, imaginary)``."""
    return _pair(importer, *(importer.env[a] for a in node.args[:2]))


def _multiply(node: Any, importer: Any) -> Any:
    """A product, of complex numbers where the program has them."""
    from tvm import relax

    if not _is_complex(node):
        return importer._binary_op(relax.op.multiply, operator.mul)(node)
    emit = importer.block_builder.emit

    def parts(value: Any) -> tuple[Any, Any]:
        if not hasattr(value, "meta"):
            return relax.const(float(value), "float32"), None
        tensor = importer.env[value]
        if not _is_complex(value):
            return tensor, None
        last = len(tensor.ty.shape.values) - 1
        real, imaginary = (
            emit(relax.op.take(tensor, relax.const(i, "int64"), axis=last)) for i in (0, 1)
        )
        return real, imaginary

    (a, b), (c, d) = parts(node.args[0]), parts(node.args[1])

    def times(x: Any, y: Any) -> Any:
        return emit(relax.op.multiply(x, y))

    if b is None or d is None:  # one of them is real
        (a, b), c = ((a, b), c) if d is None else ((c, d), a)
        return _pair(importer, times(a, c), times(b, c))
    real = emit(relax.op.subtract(times(a, c), times(b, d)))
    return _pair(importer, real, emit(relax.op.add(times(a, d), times(b, c))))


def _reshape(node: Any, importer: Any) -> Any:
    """A reshape; a complex tensor keeps its pairs."""
    from tvm import relax

    if not _is_complex(node):
        return importer._reshape(node)
    shape = [d if isinstance(d, int) else importer.env.get(d, d) for d in node.args[1]]
    return importer.block_builder.emit(relax.op.reshape(importer.env[node.args[0]], [*shape, 2]))


def complex_converters() -> dict[str, Callable[[Any, Any], Any]]:
    """The ``custom_convert_map`` entries for complex tensors."""
    return {
        "view_as_complex.default": _same,
        "view_as_real.default": _same,
        "polar.default": _polar,
        "complex.default": _complex,
        "mul.Tensor": _multiply,
        "view.default": _reshape,
        "reshape.default": _reshape,
    }
