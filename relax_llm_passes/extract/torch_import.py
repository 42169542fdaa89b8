"""torch.export programs to Relax modules with weights as inputs."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .converters import fixed_converters
from .require import require

if TYPE_CHECKING:
    import tvm

__all__ = ["export_module", "import_exported", "load_pt2"]


def export_module(module: Any, args: tuple[Any, ...], dynamic_shapes: Any = None) -> Any:
    """``torch.export.export`` without gradients, in the mode that TVM's importer understands.

    Parameters
    ----------
    module : torch.nn.Module
        What to trace.
    args : tuple
        Example arguments: tensors, and nested tuples or lists of them.
    dynamic_shapes : optional
        As ``torch.export.export`` takes it.

    Returns
    -------
    torch.export.ExportedProgram

    Raises
    ------
    InputError
        When torch is missing or cannot trace the module.
    """
    torch = require("torch", "tracing a model")
    try:
        with torch.no_grad():
            return torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as err:  # torch raises a family of private types here
        raise InputError(
            f"torch.export cannot trace {type(module).__name__}: {type(err).__name__}: {err}"
        ) from err


def _decompose(program: Any, keep_attention: bool) -> Any:
    torch = require("torch", "importing an exported program")
    if not keep_attention:
        return program.run_decompositions()
    table = torch.export.default_decompositions()
    for overload in torch.ops.aten.scaled_dot_product_attention.overloads():
        table.pop(getattr(torch.ops.aten.scaled_dot_product_attention, overload), None)
    return program.run_decompositions(table)


def _bounds(program: Any) -> dict[str, tuple[int, int | None]]:
    """Ranges of the symbolic sizes, as torch.export proved them."""
    ranges: dict[str, tuple[int, int | None]] = {}
    for symbol, interval in program.range_constraints.items():
        upper = float(interval.upper)
        ranges[str(symbol)] = (int(interval.lower), None if math.isinf(upper) else int(upper))
    return ranges


def import_exported(
    program: Any,
    *,
    keep_attention: bool = False,
    keep_params_as_input: bool = True,
    unwrap_single: bool = True,
) -> tvm.IRModule:
    """Convert an exported program, working around the importer's known faults.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        From :func:`export_module` or :func:`load_pt2`.
    keep_attention : bool
        Keep ``scaled_dot_product_attention`` as one operator (``R.nn.attention*``) where the source
        calls it; otherwise it arrives as matmul, softmax and masks.
    keep_params_as_input : bool
        Weights become inputs, after the user's. Otherwise they are constants in the module.
    unwrap_single : bool
        A single output is returned as a tensor instead of a tuple of one.

    Returns
    -------
    tvm.IRModule
        With function ``main``.

    Raises
    ------
    InputError
        When torch is missing, or the program uses an operator that TVM does not convert.
    """
    require("torch", "importing an exported program")
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    decomposed = _decompose(program, keep_attention)
    try:
        mod = from_exported_program(
            decomposed,
            keep_params_as_input=keep_params_as_input,
            unwrap_unit_return_tuple=unwrap_single,
            custom_convert_map=fixed_converters(_bounds(decomposed)),
            run_ep_decomposition=False,
        )
    except Exception as err:  # asserts, ValueErrors and TVM's own errors
        raise InputError(
            f"TVM cannot import the exported program: {type(err).__name__}: {err}"
        ) from err
    if keep_params_as_input:
        mod, _ = relax.frontend.detach_params(mod)
    return mod


def load_pt2(path: str | os.PathLike[str], *, keep_attention: bool = False) -> tvm.IRModule:
    """Import a file that ``torch.export.save`` wrote.

    Raises
    ------
    InputError
        When the file is missing or no exported program, or cannot be imported.
    """
    torch = require("torch", "reading a .pt2 file")
    if not os.path.isfile(path):
        raise InputError(f"no such file: {os.fspath(path)}")
    try:
        program = torch.export.load(os.fspath(path))
    except Exception as err:
        raise InputError(
            f"{os.fspath(path)} is not an exported program of this torch version: {err}"
        ) from err
    return import_exported(program, keep_attention=keep_attention)
