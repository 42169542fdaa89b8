"""What an implementation emitted for a composite, repeated for calls of the same program.

The layers of a model call composites with one and the same body, on arguments of the same types.
Building the kernel again for each costs more than everything else about lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm_ffi import structural_equal

from .cloning import Clone
from .expressions import VAR_TYPES

__all__ = ["Emitted", "emission_key"]


def emission_key(name: str, args: Sequence[Any], dataflow: bool) -> tuple[Any, ...] | None:
    """Return what two calls of a composite must have in common to be emitted alike.

    That is also which arguments are the same variable. None for a call with a constant among its
    arguments: what is emitted may depend on its value.
    """
    if not all(type(a) in VAR_TYPES for a in args):
        return None
    first = {arg: i for i, arg in reversed(list(enumerate(args)))}
    return (name, dataflow, tuple(first[arg] for arg in args))


@dataclass
class Emitted:
    """The bindings and the result for one call.

    Attributes
    ----------
    args : list of Var
        The call's arguments.
    bindings : list of Binding
        What stands before the result.
    result : Expr
        What takes the call's place.
    """

    args: list[Any]
    bindings: list[Any]
    result: Any

    def fits(self, args: Sequence[Any], ty: Any) -> bool:
        """Whether a call has the same types, in the same symbolic sizes."""
        return structural_equal(self.result.ty, ty) and all(
            structural_equal(a.ty, b.ty) for a, b in zip(self.args, args, strict=True)
        )

    def again(self, args: Sequence[Any], var: Any) -> list[Any]:
        """Return the bindings for other arguments, with `var` bound to the result."""
        clone = Clone(dict(zip(self.args, args, strict=True)), {})
        bindings = [clone.binding(b) for b in self.bindings]
        return [*bindings, relax.VarBinding(var, clone.expr(self.result))]
