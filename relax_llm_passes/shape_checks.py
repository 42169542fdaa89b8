"""The shapes that a composite's match_casts assert, checked where its kernel is called.

    y = match_cast(x, Tensor((n + 1, 4)))       x: Tensor((256 - max(255 - n, 0), 4))

A kernel that reads x in place of y is right as long as the shapes agree, which only the run can
tell. The call is then preceded by the same check on the shapes alone:

    match_cast(shape([256 - max(255 - n, 0), 4]), Shape([n + 1, 4]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import PrimType
from tvm_ffi import structural_equal

from .cloning import map_prim
from .expressions import VAR_TYPES
from .kernels.scalar_expr import any_node

__all__ = ["ShapeChecks", "asserted_shapes", "caller_sizes"]

Shapes = list[tuple[list[Any], list[Any]]]


def asserted_shapes(func: relax.Function, args: Sequence[Any]) -> Shapes | None:
    """Return (shape, asserted shape) of the tensors that match_casts in a composite's body assert.

    Parameters
    ----------
    func : relax.Function
        The composite.
    args : sequence of Expr
        Arguments of the call: the shapes are in terms of the caller's sizes.

    Returns
    -------
    list of pairs or None
        Without those that always hold. None when a shape cannot be told in the caller's sizes.
    """
    pairs = list(_in_body(func))
    if not pairs:
        return []
    sizes = caller_sizes(func.params, args)
    analyzer = tvm.sym.Analyzer()
    found: Shapes = []
    for have, want in pairs:
        shapes = []
        for dims in (have, want):
            mapped = [map_prim(d, sizes) for d in dims]
            if any(_unknown(d, sizes) for d in dims):
                return None
            shapes.append(mapped)
        if not all(analyzer.can_prove_equal(a, b) for a, b in zip(*shapes, strict=True)):
            found.append((shapes[0], shapes[1]))
    return found


def _in_body(func: relax.Function) -> Any:
    for block in func.body.blocks:
        for binding in block.bindings:
            if isinstance(binding, relax.MatchCast):
                have = getattr(getattr(binding.value.ty, "shape", None), "values", None)
                want = getattr(getattr(binding.ty, "shape", None), "values", None)
                if have is not None and want is not None and len(have) == len(want):
                    yield list(have), list(want)


def caller_sizes(params: Sequence[Any], args: Sequence[Any]) -> dict[Any, Any]:
    """Return the caller's expression for each symbolic size that a parameter's type names."""
    sizes: dict[Any, Any] = {}

    def match(param: Any, arg: Any) -> None:
        if isinstance(param.ty, PrimType):
            sizes[param] = arg
            return
        theirs = getattr(param.ty, "shape", param.ty)
        ours = arg if isinstance(arg, relax.ShapeExpr) else getattr(arg.ty, "shape", arg.ty)
        pairs = zip(
            getattr(theirs, "values", ()) or (), getattr(ours, "values", ()) or (), strict=False
        )
        for dim, value in pairs:
            if type(dim) in VAR_TYPES:
                sizes.setdefault(dim, value)

    for param, arg in zip(params, args, strict=True):
        match(param, arg)
    return sizes


def _unknown(dim: Any, sizes: dict[Any, Any]) -> bool:
    return any_node(dim, lambda node: type(node) in VAR_TYPES and node not in sizes)


class ShapeChecks:
    """Writes each check once for the code that it is seen by."""

    def __init__(self) -> None:
        self._done: list[tuple[list[Any], list[Any]]] = []

    def mark(self) -> int:
        """Return what `forget` takes back to: checks made inside a branch are not seen outside."""
        return len(self._done)

    def forget(self, mark: int) -> None:
        """Forget the checks made since."""
        del self._done[mark:]

    def bindings(self, shapes: Shapes, dataflow: bool) -> list[Any]:
        """Return the match_casts for these shapes, without those made already."""
        made = []
        for have, want in shapes:
            if any(_same(have, h) and _same(want, w) for h, w in self._done):
                continue
            self._done.append((have, want))
            ty = relax.ShapeType(want)
            make = relax.DataflowVar if dataflow else relax.Var
            # In a variable: VMShapeLower does not see the sizes of a shape inside a match_cast.
            shape = relax.ShapeExpr(have)
            held = make("shape", shape.ty)
            made.append(relax.VarBinding(held, shape))
            made.append(relax.MatchCast(make("checked", ty), held, ty))
        return made


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(structural_equal, left, right))
