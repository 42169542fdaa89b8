"""Recognise GEMMs: matmuls in any spelling, with transposes, views, quantised weights, epilogues.

The composite's contract::

    kind "gemm", one output "out"
    roles  lhs (..., M, K), rhs (K, N) or (N, K) or batched, epi0, epi1, ...
           rhs_packed and rhs_scale instead of rhs for group-quantised weights
    attrs  lhs_layout "MK"|"KM", rhs_layout "KN"|"NK", acc_dtype, out_dtype, epilogue, quant

With a right operand of two axes every leading axis of `lhs` counts rows (there may be none: a
vector), and the result has exactly `lhs`'s leading axes. A bias has N values; its shape is (N,)
or, where it is not a view of a vector, (1, ..., 1, N).

Refused, with the reason: unknown shapes, a vector on the right, mixed dtypes, sums in a dtype that
no GEMM library has (int8 sums in int8, fp16 in fp64), batches that broadcast on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from ..outline import Region
from ..report import Refusal
from .dequantize import Dequantize, find_dequantize
from .gemm_epilogue import Epilogue, grow_epilogue
from .gemm_operands import Operand, trace_matrix, trace_rows
from .shapes import dims, dtype_of, is_one, same_dim, same_dims

__all__ = ["GemmMatch", "find_gemm", "match_gemms"]

KIND = "gemm"

# Operand dtype to the dtypes its sums may have.
_SUMS = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "float64": ("float64",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32"),
    "float8_e5m2": ("float16", "bfloat16", "float32"),
    "int8": ("int32",),
}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass
class GemmMatch:
    """One recognised GEMM.

    Attributes
    ----------
    product : relax.Var
        The matmul's variable.
    region : Region
        What to outline.
    copies : list[relax.Var]
        Bindings of the region that others read too. They only move data about, so each region
        gets its own (see `fusion.partition_gemm.duplicate_views`) before it is outlined.
    """

    product: relax.Var
    region: Region
    copies: list[relax.Var] = field(default_factory=list)


class _Finder:
    def __init__(self, view: Any, copy_shared: bool) -> None:
        self.view = view
        self.copy_shared = copy_shared
        self.taken: set[relax.Var] = set()
        self.found: list[GemmMatch | Refusal] = []

    def refuse(self, var: relax.Var, reason: str) -> None:
        self.found.append(Refusal(reason, KIND, self.view.name, var.name))

    def run(self) -> list[GemmMatch | Refusal]:
        # From the last product to the first: where two could take the same step (the sum of two
        # products), the one whose operands are there last takes it, and nothing has to move.
        for binding in reversed(list(self.view.bindings)):
            if self.view.call(binding.var, "relax.matmul") is None:
                continue
            if self.view.resolve(binding.var).same_as(binding.var):
                self.product(binding.var)
        return self.found[::-1]

    def shared(self, path: list[relax.Var]) -> list[relax.Var]:
        """Return the variables of `path` that stay needed outside when it moves into a region."""
        for i, var in enumerate(path):
            if len(self.view.users(var)) != 1 or self.view.is_output(var) or var in self.taken:
                return path[i:]
        return []

    def movable(self, path: list[relax.Var]) -> bool:
        """Tell whether all of `path` can go into a region of this scope, or copies of it can.

        A step in a scope around this one (before an If, say) is an operand like any other.
        """
        if any(self.view.position(v) < 0 for v in path):
            return False
        return self.copy_shared or not self.shared(path)

    def choose(self, forms: Iterable[Operand], wanted: Callable[[Operand], bool]) -> Operand | None:
        """Return the wanted form that is furthest from the matmul."""
        best = None
        for form in forms:
            if wanted(form) and self.movable(form.variables):
                best = form
        return best

    def product(self, var: relax.Var) -> None:
        view = self.view
        call = view.call(var)
        lhs, rhs = call.args
        reason = _why_not(call)
        if reason is not None:
            self.refuse(var, reason)
            return

        def usable(expr: relax.Expr) -> bool:
            return _readable_at(view, expr, var)

        lhs_dims, rhs_dims = dims(lhs), dims(rhs)
        assert lhs_dims is not None and rhs_dims is not None
        batch = dims(var)[:-2] if len(lhs_dims) > 1 else []  # type: ignore[index]

        def rhs_fits(form: Operand) -> bool:
            # Without the broadcast, the left operand alone must give the batch axes.
            shape = dims(form.root)
            if shape is None or len(shape) == len(rhs_dims):
                return shape is not None
            return same_dims(lhs_dims[:-2], batch)

        right = self.choose(trace_matrix(view, rhs, usable), rhs_fits)
        assert right is not None
        flat = len(dims(right.root) or ()) == 2
        left_forms = (
            trace_matrix(view, lhs, usable) if len(lhs_dims) > 1 else [Operand(view.resolve(lhs))]
        )
        left = self.choose(
            left_forms, lambda f: len(dims(f.root) or ()) == len(lhs_dims) and f.swapped
        ) or Operand(view.resolve(lhs))
        rows: list[Operand] = []
        if flat and not left.swapped:
            rows = [f for f in trace_rows(view, lhs, usable) if self.movable(f.variables)]
        epilogue = grow_epilogue(view, var, rows, usable, lambda v: v in self.taken)
        for refusal in epilogue.refusals:
            self.found.append(refusal)
        if epilogue.rows is not None:
            left = epilogue.rows
        self.build(var, left, right, epilogue)

    def build(self, var: relax.Var, left: Operand, right: Operand, epilogue: Epilogue) -> None:
        view = self.view
        paths = [left.variables, right.variables]
        vector_paths = [p for p in epilogue.paths if self.movable(p)]
        for path in epilogue.paths:
            if path not in vector_paths:  # keep the view outside: the operand is what it gives
                for name, expr in epilogue.operands.items():
                    if view.resolve(view.value(path[-1]).args[0]).same_as(expr):
                        epilogue.operands[name] = path[0]
        paths += vector_paths
        roles: dict[str, relax.Expr] = {"lhs": left.root}
        quant = find_dequantize(view, right.root, right.swapped)
        if isinstance(quant, Dequantize) and self.movable([right.root]):
            roles |= {"rhs_packed": quant.packed, "rhs_scale": quant.scale}
            paths[1] = [*right.variables, right.root]
        else:
            if isinstance(quant, Refusal):
                self.found.append(quant)
            quant = None
            roles["rhs"] = right.root
        roles |= epilogue.operands
        copies = [v for p in paths for v in self.shared(p)]
        members = [v for p in paths for v in p] + [var, *epilogue.variables]
        unique: dict[relax.Var, None] = dict.fromkeys(members)
        self.taken.update(unique)
        attrs = {
            "lhs_layout": "KM" if left.swapped else "MK",
            "rhs_layout": "NK" if right.swapped else "KN",
            "acc_dtype": dtype_of(var),
            "out_dtype": dtype_of(epilogue.result),
            "epilogue": epilogue.steps,
            "quant": quant.attrs if quant else None,
        }
        region = Region(
            kind=KIND,
            bindings=list(unique),
            roles=roles,
            outputs={"out": epilogue.result},
            attrs=attrs,
        )
        self.found.append(GemmMatch(var, region, list(dict.fromkeys(copies))))


def _readable_at(view: Any, expr: relax.Expr, at: relax.Var) -> bool:
    """Tell whether a value upstream of the binding of `at` is in scope there.

    A dataflow variable is not visible outside its block, though what it was computed to is.
    """
    if not isinstance(expr, relax.DataflowVar):
        return True
    here, there = view.position(at), view.position(expr)
    return there >= 0 and view.block(there) == view.block(here)


def _why_not(call: relax.Call) -> str | None:
    """Return why a matmul is no GEMM, or None."""
    lhs, rhs = call.args
    a, b, out = dims(lhs), dims(rhs), dims(call)
    if a is None or b is None or out is None:
        return "the shape of an operand is not known"
    left, right, total = dtype_of(lhs), dtype_of(rhs), dtype_of(call)
    if not left or not right or not total:
        return "the dtype of an operand is not known"
    if len(b) < 2:
        return "the right operand is a vector: a product of a matrix and a vector has no columns"
    if left != right and not (left in _FLOAT8 and right in _FLOAT8):
        return f"operands of two dtypes, {left} and {right}"
    if left not in _SUMS:
        return f"no GEMM for {left}"
    if total not in _SUMS[left]:
        return f"{left} operands with sums in {total}; expected {' or '.join(_SUMS[left])}"
    if not same_dim(a[-1], b[-2]):
        return f"the summed axes are not provably equal: {a[-1]} and {b[-2]}"
    left_batch, right_batch = a[:-2], b[:-2]
    if len(a) == 1 and right_batch:
        return "a vector times a batch of matrices"
    if all(is_one(d) for d in right_batch) or same_dims(left_batch, right_batch):
        return None
    if all(is_one(d) for d in left_batch):
        return None
    return (
        f"batches ({', '.join(map(str, left_batch))}) and ({', '.join(map(str, right_batch))}) "
        "broadcast against each other, or are not provably equal"
    )


def match_gemms(view: Any, copy_shared: bool = False) -> list[GemmMatch | Refusal]:
    """Return the GEMMs of a function with their shared bindings, and near misses.

    Parameters
    ----------
    view : FunctionView
        The function.
    copy_shared : bool
        Whether a region may hold transposes and views that others read too; they are listed in
        `GemmMatch.copies` and must be duplicated before outlining.
    """
    return _Finder(view, copy_shared).run()


def find_gemm(view: Any) -> list[Region | Refusal]:
    """Return the GEMM regions of a function in program order, and near misses with reasons."""
    return [m if isinstance(m, Refusal) else m.region for m in match_gemms(view)]
