"""Finds what TVM's torch importer is known to get wrong, in any module (no torch needed)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

__all__ = ["find_importer_faults"]


def _constant_indices(expr: Any, defined: dict[Any, Any]) -> Any | None:
    """The numpy array behind an index argument, or None when it is not constant."""
    import tvm
    from tvm import relax

    for _ in range(len(defined) + 1):
        if isinstance(expr, tvm.ir.GenericConst):
            return expr.value.numpy()
        if isinstance(expr, tvm.tirx.IntImm):
            return expr.value
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            # Conversions and reshapes do not change what is indexed.
            if expr.op.name not in ("relax.astype", "relax.reshape", "relax.expand_dims"):
                return None
            expr = expr.args[0]
        elif expr in defined:
            expr = defined[expr]
        else:
            return None
    return None


def _out_of_bounds(call: Any, defined: dict[Any, Any]) -> str | None:
    """What is wrong with a ``take``, if something is."""
    import numpy as np

    source, axis = call.args[0], call.attrs.axis
    mode = str(call.attrs.mode)
    if mode in ("wrap", "clip"):  # defined for every index
        return None
    shape = getattr(source.ty, "shape", None)
    if shape is None or not hasattr(shape, "values"):
        return None
    indices = _constant_indices(call.args[1], defined)
    if indices is None:
        return None
    indices = np.asarray(indices)
    if indices.size == 0:
        return None
    axis = 0 if axis is None else int(axis)
    extent = shape.values[axis]
    low, high = int(indices.min()), int(indices.max())
    problem = None
    if low < 0:
        problem = f"index {low}"
    elif hasattr(extent, "value") and high >= int(extent.value):
        problem = f"index {high}"
    if problem is None:
        return None
    extent = int(extent.value) if hasattr(extent, "value") else extent
    return (
        f"take reads {problem} on axis {axis} of extent {extent} in mode {mode!r}, which "
        f"does not check: "
        "it reads outside the tensor"
    )


def find_importer_faults(mod: tvm.IRModule) -> list[str]:
    """Places where a module reads wrong data in silence, as an importer is known to write.

    Today: ``take`` with a constant index below zero or past the end in a mode that does not check.
    TVM's torch importer makes it of ``x[:, -1]``; :func:`relax_llm_passes.extract.import_exported`
    does not.

    Parameters
    ----------
    mod : tvm.IRModule
        Any module; only its Relax functions are looked at. Linear in the number of bindings.

    Returns
    -------
    list of str
        One text per fault, with function and binding; empty when none is known.
    """
    import tvm
    from tvm import relax

    found: list[str] = []
    for name, function in mod.functions.items():
        if not isinstance(function, relax.Function):
            continue
        defined: dict[Any, Any] = {}

        def visit(binding: Any, label: str, defined: dict[Any, Any] = defined) -> None:
            value = getattr(binding, "value", None)
            if value is None:
                return
            defined[binding.var] = value
            if isinstance(value, relax.If):
                for branch in (value.true_branch, value.false_branch):
                    walk(branch, label)
            if isinstance(value, relax.Function):
                walk(value.body, label)
            if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
                if value.op.name == "relax.take":
                    problem = _out_of_bounds(value, defined)
                    if problem:
                        found.append(f"{label}, binding {binding.var.name}: {problem}")

        def walk(body: Any, label: str, visit: Any = visit) -> None:
            if isinstance(body, relax.SeqExpr):
                for block in body.blocks:
                    for binding in block.bindings:
                        visit(binding, label)

        walk(function.body, f"function {name.name_hint}")
    return found
