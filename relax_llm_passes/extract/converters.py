"""Replacements for operator conversions that TVM's torch importer gets wrong or lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .complex_numbers import complex_converters

__all__ = ["fixed_converters"]

Converter = Callable[[Any, Any], Any]


def _select(node: Any, importer: Any) -> Any:
    """``x[:, i]``; a negative index counts from the end.

    TVM 0.27 passes it on to ``take``, whose default mode does not wrap: it reads before the row.
    """
    from tvm import relax

    source = importer.env[node.args[0]]
    axis, index = node.args[1], node.args[2]
    if not isinstance(index, int):
        index = importer.env[index]
    elif index < 0:
        index = source.ty.shape.values[axis] + index
        index = int(index.value) if hasattr(index, "value") else index
    if isinstance(index, int):
        return importer.block_builder.emit(relax.op.take(source, relax.const(index, "int64"), axis))
    # The index is an expression over symbolic sizes: slice one element and drop the axis.
    one = relax.op.strided_slice(source, [axis], [index], [index + 1])
    return importer.block_builder.emit(relax.op.squeeze(importer.block_builder.emit(one), [axis]))


def _matmul(node: Any, importer: Any) -> Any:
    """A matrix product in the type of its operands.

    TVM 0.27 writes ``out_dtype="float32"`` for every product, so a half or double model no longer
    type-checks.
    """
    from tvm import relax

    left, right = importer.env[node.args[0]], importer.env[node.args[1]]
    return importer.block_builder.emit(
        relax.op.matmul(left, right, out_dtype=str(left.ty.dtype.dtype))
    )


def _addmm(node: Any, importer: Any) -> Any:
    """``beta * bias + alpha * (a @ b)`` in the type of the operands (see :func:`_matmul`)."""
    from tvm import relax

    bias, left, right = (importer.env[arg] for arg in node.args[:3])
    dtype = str(left.ty.dtype.dtype)
    emit = importer.block_builder.emit
    product = emit(relax.op.matmul(left, right, out_dtype=dtype))
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if alpha != 1:
        product = emit(relax.op.multiply(product, relax.const(alpha, dtype)))
    if beta == 0:
        return product
    if beta != 1:
        bias = emit(relax.op.multiply(bias, relax.const(beta, dtype)))
    return emit(relax.op.add(bias, product))


def _analyzer(expressions: Any, bounds: Mapping[str, tuple[int, int | None]]) -> Any:
    """An analyzer that knows the ranges that torch.export proved for symbolic sizes."""
    import tvm
    from tvm.sym import Analyzer
    from tvm.tirx.analysis import undefined_vars

    analyzer = Analyzer()
    found = {
        variable.name: variable
        for expression in expressions
        if not isinstance(expression, int)
        for variable in undefined_vars(expression)
    }
    for name, variable in found.items():
        low, high = bounds.get(name, (0, None))
        if high is not None:
            analyzer.bind(variable, tvm.ir.Range(low, high + 1))
    return analyzer


def _extreme(which: str, bounds: Mapping[str, tuple[int, int | None]]) -> Converter:
    """``max(a, b)`` and ``min(a, b)`` of sizes, which TVM 0.27 does not convert."""

    def convert(node: Any, importer: Any) -> Any:
        from tvm import tirx

        left, right = (arg if isinstance(arg, int) else importer.env[arg] for arg in node.args)
        if isinstance(left, int) and isinstance(right, int):
            return max(left, right) if which == "max" else min(left, right)
        result = (tirx.max if which == "max" else tirx.min)(left, right)
        simple = _analyzer([result], bounds).simplify(result)
        # What stays an extreme only for the bounds' sake is kept: strided_slice then sees that it
        # is not negative.
        return int(simple.value) if hasattr(simple, "value") else result

    return convert


def _slice(bounds: Mapping[str, tuple[int, int | None]]) -> Converter:
    """``x[begin:end]`` whose length follows from the ranges of the symbolic sizes.

    TVM 0.27 keeps such a length as ``256 - max(255 - n, 0)``, cannot broadcast it with ``n + 1``,
    and loses the shape of everything after it; such operators are later not lowered at all.
    """

    def convert(node: Any, importer: Any) -> Any:
        import tvm
        from tvm import relax

        result = importer._slice(node)
        shape = result.ty.shape
        if shape is None or all(hasattr(extent, "value") for extent in shape.values):
            return result
        analyzer = _analyzer(shape.values, bounds)
        simple = [analyzer.simplify(extent) for extent in shape.values]
        if [str(e) for e in simple] == [str(e) for e in shape.values]:
            return result
        # A match_cast from an expression to a bare variable inside it sends TVM's
        # CanonicalizeBindings and KillAfterLastUse into endless substitution; a reshape states the
        # same.
        if any(isinstance(new, tvm.ir.Var) for new in simple if not hasattr(new, "value")):
            return importer.block_builder.emit(relax.op.reshape(result, simple))
        return importer.block_builder.match_cast(
            result, relax.TensorType(simple, str(result.ty.dtype.dtype))
        )

    return convert


def _index_put(node: Any, importer: Any) -> Any:
    """``x[:, :, index] = rows`` (``index_put``, ``index_copy``): one axis by a list of positions.

    TVM 0.27 gives every ``:`` before the index a shape that does not broadcast with the others, and
    asks for one index tensor an axis.
    """
    from tvm import relax

    data, indices, values = (importer.env.get(a, a) if _is_node(a) else a for a in node.args[:3])
    tensors = [(axis, importer.env[i]) for axis, i in enumerate(indices) if i is not None]
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    plain = len(tensors) == 1 and len(tensors[0][1].ty.shape.values) == 1 and not accumulate
    if not plain or str(tensors[0][1].ty.dtype) == "bool":
        return importer._index_put(node)
    emit = importer.block_builder.emit
    ((axis, index),) = tensors
    shape = list(data.ty.shape.values)
    shape[axis] = index.ty.shape.values[0]
    if [str(d) for d in values.ty.shape.values] != [str(d) for d in shape]:
        values = emit(relax.op.broadcast_to(values, shape))
    around = [shape[axis] if i == axis else 1 for i in range(len(shape))]
    wide = emit(relax.op.broadcast_to(emit(relax.op.reshape(index, around)), shape))
    return emit(relax.op.scatter_elements(data, wide, values, axis=axis))


def _is_node(value: Any) -> bool:
    return hasattr(value, "op") and hasattr(value, "target")


def fixed_converters(
    bounds: Mapping[str, tuple[int, int | None]] | None = None,
) -> dict[str, Converter]:
    """The ``custom_convert_map`` for ``tvm.relax.frontend.torch.from_exported_program``.

    Parameters
    ----------
    bounds : mapping, optional
        Smallest and largest value (or None) of each symbolic size, by name.
    """
    bounds = bounds or {}
    return {
        "select.int": _select,
        "slice.Tensor": _slice(bounds),
        "index_put.default": _index_put,
        **complex_converters(),
        "mm.default": _matmul,
        "bmm.default": _matmul,
        "matmul.default": _matmul,
        "addmm.default": _addmm,
        "sym_max": _extreme("max", bounds),
        "sym_min": _extreme("min", bounds),
    }
