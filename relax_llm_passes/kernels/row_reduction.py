"""Reductions over rows with the arithmetic around them, as one kernel (see `patterns`).

The expressions of the recogniser become a row program (`norm_program`): what is loaded once, the
reductions in order, what is stored. Everything is in float32; a result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal

from ..dataflow import FunctionView
from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..patterns.row_reduction import RowMatch, find_row_reductions
from ..report import Refusal
from .flat_kernel import check_sizes, tensor_of
from .group_norm import result_type
from .norm import build
from .norm_math import Functions, functions_for
from .norm_ops import count_of
from .norm_program import Axis, Operand, RowProgram, Stage, Store, build_domain, row_major
from .scalar_expr import bound_analyzer, buffer_loads, call_name, i64, rewrite, substitute

__all__ = ["RowReduction", "match_of", "row_program"]


def match_of(composite: Composite) -> RowMatch:
    """Return the match that is a composite's body.

    Raises
    ------
    InputError
        When it is none.
    """
    mod = tvm.IRModule({"f": composite.func.with_attr("global_symbol", "f")})
    found = find_row_reductions(FunctionView(mod, "f"))
    matches = [m for m in found if isinstance(m, RowMatch)]
    if len(matches) != 1:
        reasons = "; ".join(m.reason for m in found if isinstance(m, Refusal))
        raise InputError(reasons or f"{len(matches)} reductions in one composite")
    return matches[0]


def row_program(composite: Composite, functions: Functions) -> tuple[RowProgram, list[Any]]:
    """Return the row program of a composite, and the leaf that each of its inputs stands for."""
    match = match_of(composite)
    leaves = list(match.leaves)
    inputs = [tensor_of(f"x{i}", leaf.ty) for i, leaf in enumerate(leaves)]
    out = tensor_of("y", composite.result_ty)
    check_sizes(inputs, [out])
    tensors = [*inputs, out]
    exprs = [*(s.value for s in match.stages), match.value]
    loads = _distinct([ld for e in exprs for ld in buffer_loads(e)])
    symbols = [*match.rows, match.column]
    place = [_place(match, leaves, ld) for ld in loads]
    operands = [Operand(t, _strides(match, tensors[t], ld, symbols))
                for t, ld in zip(place, loads, strict=True)]  # fmt: skip
    shape = match.shape
    if match.per_row:
        strides = (*row_major(shape[:-1]), 0) if len(shape) > 1 else (0,)
    else:
        strides = tuple(row_major(shape))
    operands.append(Operand(len(inputs), strides))
    domain = [Axis(e, False) for e in shape[:-1]] + [Axis(shape[-1], True)]
    axes, reads, width = build_domain(domain, operands)
    early = [i for i, ld in enumerate(loads)
             if any(_reads(e, ld) for e in exprs[:-1])]  # fmt: skip
    late = [i for i in range(len(loads)) if i not in early]
    values = [tirx.Var(f"v{i}", "float32") for i in range(len(loads))]

    def plain(expr: Any) -> Any:
        def replace(node: Any) -> Any:
            if hasattr(node, "indices"):
                return next(
                    v for v, ld in zip(values, loads, strict=True) if structural_equal(ld, node)
                )
            if isinstance(node, tirx.Cast) and str(node.ty.dtype) == "float32":
                if hasattr(node.value, "indices"):
                    return replace(node.value)  # row programs load in float32
            return None

        return rewrite(expr, replace)

    bodies = [plain(e) for e in exprs]

    def evaluate(expr: Any, kept: list[Any], rest: list[Any], scalars: list[Any]) -> Any:
        known = {values[i]: x for i, x in zip(early, kept, strict=False)}
        known |= {values[i]: x for i, x in zip(late, rest, strict=False)}
        known |= dict(zip(match.results, scalars, strict=False))
        return _with_functions(substitute(expr, known), functions)

    program = RowProgram(
        "row_" + "_".join(s.combine for s in match.stages),
        tensors,
        axes,
        [reads[i] for i in early],
        lambda raw: list(raw),
        [],
        [],
        [reads[i] for i in late],
        width,
    )
    count = count_of(program.length, "float32")

    def stage(combine: str, expr: Any) -> Stage:
        op = "sum" if combine == "mean" else combine
        return Stage(
            (op,),
            lambda kept, scalars: [evaluate(expr, kept, [], scalars)],
            lambda r, scalars: [r[0] / count if combine == "mean" else r[0]],
        )

    program.stages = [stage(s.combine, e) for s, e in zip(match.stages, bodies, strict=False)]
    store = reads[-1]
    if match.per_row:
        program.stores = [
            Store(store.tensor, store.index, lambda s: evaluate(bodies[-1], [], [], s), True)
        ]
        if late:
            raise InputError("a result of one element a row reads a tensor")
    else:

        def value(kept: list[Any], rest: list[Any], scalars: list[Any]) -> Any:
            return evaluate(bodies[-1], kept, rest, scalars)

        program.stores = [Store(store.tensor, store.index, value)]
    return program, leaves


def _reads(expr: Any, load: Any) -> bool:
    return any(structural_equal(ld, load) for ld in buffer_loads(expr))


def _distinct(loads: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for load in loads:
        if not any(structural_equal(load, f) for f in found):
            found.append(load)
    return found


def _place(match: RowMatch, leaves: Sequence[Any], load: Any) -> int:
    return next(i for i, v in enumerate(leaves) if match.leaves[v].same_as(load.source))


def _strides(match: RowMatch, tensor: Any, load: Any, symbols: Sequence[Any]) -> tuple[Any, ...]:
    """Return by how many elements a load moves along each axis of the domain."""
    flat: Any = i64(0)
    for at, step in zip(load.indices, row_major(tensor.shape), strict=True):
        flat = flat + at * i64(step)
    analyzer = bound_analyzer(dict(zip(symbols, map(i64, match.shape), strict=True)))
    zero = substitute(flat, {v: i64(0) for v in symbols})
    if not analyzer.can_prove_equal(zero, i64(0)):
        raise InputError("a tensor is read from the middle on")
    strides = []
    total: Any = i64(0)
    for var in symbols:
        step = analyzer.simplify(substitute(flat, {v: i64(int(v is var)) for v in symbols}))
        total = total + var * step
        strides.append(int(step.value) if isinstance(step, tirx.IntImm) else step)
    if not analyzer.can_prove_equal(flat, total):
        raise InputError("a tensor is not read at even steps")
    return tuple(strides)


def _with_functions(expr: Any, functions: Functions) -> Any:
    """Write exp and what follows from it in the target's form."""

    def replace(node: Any) -> Any:
        name = call_name(node)
        if name == "exp":
            return functions.exp(_with_functions(node.args[0], functions))
        if name == "tanh":
            # 1 - 2 / (1 + exp(2x)): exact at both ends, where exp overflows or vanishes.
            one, two = tirx.FloatImm("float32", 1.0), tirx.FloatImm("float32", 2.0)
            return one - two / (one + functions.exp(_with_functions(node.args[0], functions) * two))
        return None

    return rewrite(expr, replace)


@register_implementation("row_reduction", priority=10)
class RowReduction:
    """Reductions of rows and what surrounds them, in one kernel."""

    name = "row_reduction.fused"
    kind = "row_reduction"
    targets = ("cuda", "llvm")

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take float tensors whose sizes follow from the operands', read at even steps."""
        try:
            row_program(composite, functions_for(target))
        except InputError as error:
            return Refusal(str(error), composite.kind)
        return Accept()

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir."""
        program, leaves = row_program(composite, functions_for(target))
        func = build(program, target)
        gvar = bb.add_func(func, program.name)
        params = list(composite.func.params)
        operands = []
        for leaf in leaves:
            at = next((i for i, p in enumerate(params) if p.same_as(leaf)), None)
            operands.append(leaf if at is None else args[at])
        return relax.call_tir(gvar, operands, result_type(composite, args))
