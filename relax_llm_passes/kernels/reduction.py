"""Reads a row program out of a PrimFunc that LegalizeOps, FuseOps and FuseTIR made.

The PrimFunc is a sequence of loop nests with one block each: element-wise blocks, and reductions
that all run over the same axes of the same rows. Element-wise blocks are inlined into their
readers, so what remains per reduction is an expression of parameters and of earlier reductions'
results; the output is another. That is a row program, which the norm kernels know how to lay out.
Reading is by structure: names play no part, and whatever does not fit is declined with the reason.

A joint reduction of x and x*x, from which the variance is taken as E[x*x] - E[x]**2, is replaced by
the two-pass form of `norm_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.sym import Analyzer
from tvm_ffi import structural_equal

from .linear_index import polynomial
from .norm_math import Functions
from .norm_program import Axis, Operand, RowProgram, Store, Tensor, build_domain
from .reduction_nest import Nest, Unreadable, is_one, read_nests
from .scalar_expr import rewrite, substitute

__all__ = ["Unreadable", "read_program"]


@dataclass
class _Row:
    """The domain: variables of the outer and reduced axes."""

    outer: list[Any]
    reduced: list[Any]
    extents: dict[Any, Any]
    order: list[Any] = field(default_factory=list)


class _Reader:
    def __init__(self, func: tirx.PrimFunc, functions: Functions) -> None:
        self.func = func
        self.functions = functions
        self.params = list(func.params)
        self.blocks = read_nests(func)
        self.inline: dict[Any, Nest] = {}
        self.reduced: dict[Any, tuple[Nest, int]] = {}
        self.outputs: list[Nest] = []
        for p in self.params:
            if not isinstance(p.ty, tirx.BufferType):
                raise Unreadable("a parameter is no buffer")
        params = set(self.params)
        written: set[Any] = set()
        for b in self.blocks:
            for k, buf in enumerate(b.buffers):
                if buf in written:
                    raise Unreadable("a buffer is written twice")
                written.add(buf)
                if b.combine:
                    self.reduced[buf] = (b, k)
                elif buf in params:
                    self.outputs.append(b)
                    self.inline[buf] = b
                else:
                    self.inline[buf] = b
        self.written = written
        self.stages = [b for b in self.blocks if b.combine]
        if not self.stages:
            raise Unreadable("nothing is reduced")
        self.row = self._domain(self.stages[0])
        self.analyzer = Analyzer()
        self.names: list[Any] = []
        for v, e in self.row.extents.items():
            self.analyzer.bind(v, tvm.ir.Range(tirx.IntImm(str(e.ty.dtype), 0), e))
        self.scalar_vars: dict[Any, Any] = {}

    def _domain(self, first: Nest) -> _Row:
        outer = [v for v in first.iters if not is_one(first.extents[v])]
        reduced = [v for v in first.reduce if not is_one(first.extents[v])]
        reduced = reduced or first.reduce[-1:]
        extents = {v: first.extents[v] for v in outer + reduced}
        return _Row(outer, reduced, extents)

    # Expanding

    def to_row(self, block: Nest) -> dict[Any, Any]:
        """Map a reduction block's axes to the row's."""
        got = [v for v in block.iters if not is_one(block.extents[v])]
        red = [v for v in block.reduce if not is_one(block.extents[v])]
        red = red or block.reduce[-1:]
        out = {v: tirx.IntImm(v.ty.dtype, 0) for v in block.iters + block.reduce}
        for mine, theirs in ((got, self.row.outer), (red, self.row.reduced)):
            if len(mine) != len(theirs):
                raise Unreadable("reductions over different axes")
            for a, b in zip(mine, theirs, strict=True):
                if not self._same(block.extents[a], self.row.extents[b]):
                    raise Unreadable("reductions over different extents")
                out[a] = b
        return out

    def _same(self, a: Any, b: Any) -> bool:
        return bool(structural_equal(a, b)) or self.analyzer.can_prove_equal(a, b)

    def simplify(self, expr: Any) -> Any:
        """Simplify an index; quotients by symbolic sizes are carried out."""
        if not hasattr(expr, "ty"):
            return expr
        found = polynomial(expr, self.names, self.row.extents)
        if found is not None:
            return found.expression(str(expr.ty.dtype))
        return self.analyzer.simplify(expr)

    def expand(self, expr: Any) -> Any:
        """Inline element-wise buffers; results of reductions become row scalars."""

        def step(e: Any) -> Any | None:
            if not isinstance(e, TensorLoad):
                return None
            source = e.source
            indices = [self.simplify(rewrite(i, step)) for i in e.indices]
            if source in self.reduced:
                block, k = self.reduced[source]
                at = self.to_row(block)
                wanted = [substitute(i, at) for i in block.indices[k]]
                for a, b in zip(indices, wanted, strict=True):
                    if not self._same(self.simplify(a), self.simplify(b)):
                        raise Unreadable("a row reads another row's result")
                return self._scalar(source)
            if source in self.inline:
                block = self.inline[source]
                values: dict[Any, Any] = {}
                for own, given in zip(block.indices[0], indices, strict=True):
                    if isinstance(own, tirx.Var) and own in block.extents:
                        values[own] = given
                    elif not (isinstance(own, tirx.IntImm)):
                        raise Unreadable("an element-wise block writes out of order")
                for v in block.iters:
                    if v not in values:
                        if not is_one(block.extents[v]):
                            raise Unreadable("an element-wise block repeats its writes")
                        values[v] = tirx.IntImm(v.ty.dtype, 0)
                return rewrite(substitute(block.values[0], values), step)
            return tirx.BufferLoad(source, indices)

        return rewrite(expr, step)

    def _scalar(self, buf: Any) -> Any:
        if buf not in self.scalar_vars:
            self.scalar_vars[buf] = tirx.Var(f"s{len(self.scalar_vars)}", str(buf.ty.dtype))
        return self.scalar_vars[buf]

    # Outputs

    def output_map(self, block: Nest) -> tuple[dict[Any, Any], bool]:
        """Map an output block's axes to the row's; says whether it is one value per row."""
        axes = [v for v in block.iters if not is_one(block.extents[v])]
        zero = {v: tirx.IntImm(v.ty.dtype, 0) for v in block.iters}
        order = self.row.order
        extents = [self.row.extents[v] for v in order]
        for domain, per_row in ((order, False), ([v for v in order if v in self.row.outer], True)):
            if len(axes) == len(domain) and all(
                self._same(block.extents[a], self.row.extents[d])
                for a, d in zip(axes, domain, strict=True)
            ):
                return {**zero, **dict(zip(axes, domain, strict=True))}, per_row
        # The same elements in another shape: go through the row-major position.
        flat: Any = tirx.IntImm("int64", 0)
        for v, e in zip(order, extents, strict=True):
            flat = flat * e + v
        total: Any = tirx.IntImm("int64", 1)
        for e in extents:
            total = total * e
        mine: Any = tirx.IntImm("int64", 1)
        for a in axes:
            mine = mine * block.extents[a]
        if not self._same(self.analyzer.simplify(total), self.analyzer.simplify(mine)):
            raise Unreadable("the result has other elements than the rows")
        out = dict(zero)
        out.update(self._split(axes, [block.extents[a] for a in axes], order, extents))
        return out, False

    def _split(
        self, axes: list[Any], sizes: list[Any], order: list[Any], extents: list[Any]
    ) -> dict[Any, Any]:
        """Match axes against runs of the row's axes whose extents multiply to the same size."""
        out: dict[Any, Any] = {}
        i = 0
        for a, size in zip(axes, sizes, strict=True):
            run: Any = tirx.IntImm("int64", 1)
            index: Any = tirx.IntImm("int64", 0)
            while i < len(order):
                index = index * extents[i] + order[i]
                run = self.analyzer.simplify(run * extents[i])
                i += 1
                if self._same(run, size):
                    break
            else:
                raise Unreadable("the result splits the rows' axes")
            out[a] = self.analyzer.simplify(index)
        if i != len(order):
            raise Unreadable("the result splits the rows' axes")
        return out

    # Addresses

    def strides(self, buf: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
        """Strides of an access along the row's axes; the access must be linear and start at 0."""
        flat: Any = tirx.IntImm("int64", 0)
        for i, d in zip(indices, buf.ty.shape, strict=True):
            flat = flat * d + i
        flat = self.simplify(flat)
        order = self.row.order
        nought = {v: tirx.IntImm(v.ty.dtype, 0) for v in order}
        base = self.analyzer.simplify(substitute(flat, nought))
        if not (isinstance(base, tirx.IntImm) and int(base.value) == 0):
            raise Unreadable("an access that does not start at the first element")
        out: list[Any] = []
        total: Any = tirx.IntImm("int64", 0)
        for v in order:
            unit = substitute(flat, {**nought, v: tirx.IntImm(v.ty.dtype, 1)})
            step = self.analyzer.simplify(unit)
            total = total + v * step
            out.append(int(step.value) if isinstance(step, tirx.IntImm) else step)
        if not self._same(flat, self.analyzer.simplify(total)):
            raise Unreadable("an access that is not linear in the rows' axes")
        return tuple(out)

    def find_order(self, expr: Any) -> None:
        """Sort the row's axes by how far apart an input's neighbours are."""
        best: Any = None
        for load in _loads(expr):
            used = sum(1 for v in self.row.extents if _mentions(load, v))
            if best is None or used > best[0]:
                best = (used, load)
        axes = [*self.row.outer, *self.row.reduced]
        if best is None or best[0] < len(axes):
            self.row.order = axes
            return
        load = best[1]
        self.row.order = axes
        strides = dict(zip(axes, self.strides(load.source, load.indices), strict=True))
        if all(isinstance(s, int) for s in strides.values()):
            self.row.order = sorted(axes, key=lambda v: -strides[v])
            return
        # Symbolic sizes: by the dimension of the buffer in which the axis appears.
        place = {}
        for v in axes:
            for k, i in enumerate(load.indices):
                if _mentions(i, v):
                    inner = strides[v] if isinstance(strides[v], int) else 0
                    place[v] = (k, -inner)
        self.row.order = sorted(axes, key=lambda v: place[v])

    # Assembly

    def program(self) -> RowProgram:
        stage_values = []
        for block in self.stages:
            at = self.to_row(block)
            stage_values.append([self.expand(substitute(v, at)) for v in block.values])
        for values in stage_values:
            for value in values:
                self.refuse_contraction(value)
        self.find_order_all(stage_values)
        stages = self.two_pass(stage_values)
        results = self.results()
        return _assemble(self, stages, results)

    def refuse_contraction(self, value: Any) -> None:
        """Decline products of matrices and vectors: other rules are made for those."""
        axes = [*self.row.outer, *self.row.reduced]
        loads = _loads(value)
        spans = [[v for v in axes if _mentions(load, v)] for load in loads]
        if not any(len(s) == len(axes) for s in spans):
            raise Unreadable("no tensor has all the axes: a contraction")
        while isinstance(value, tirx.Cast):
            value = value.value
        if isinstance(value, tirx.Mul):
            sources = {load.source for load in loads}
            if len(sources) > 1 and any(len(s) < len(axes) for s in spans):
                raise Unreadable("a product of a matrix and a vector")

    def find_order_all(self, stage_values: list[list[Any]]) -> None:
        for values in stage_values:
            for value in values:
                self.find_order(value)
                return

    def results(self) -> list[tuple[Any, tuple[Any, ...], Any, bool]]:
        """Return (buffer, strides, value, per row) of each output."""
        out = []
        for block in self.outputs:
            at, per_row = self.output_map(block)
            indices = [self.simplify(substitute(i, at)) for i in block.indices[0]]
            value = self.expand(substitute(block.values[0], at))
            if per_row and any(_mentions(value, v) for v in self.row.reduced):
                raise Unreadable("a value per row depends on the element")
            out.append((block.buffers[0], self.strides(block.buffers[0], indices), value, per_row))
        params = set(self.params)
        for block in self.stages:
            for k, buf in enumerate(block.buffers):
                if buf in params:
                    at = self.to_row(block)
                    indices = [self.simplify(substitute(i, at)) for i in block.indices[k]]
                    out.append((buf, self.strides(buf, indices), self._scalar(buf), True))
        if not out:
            raise Unreadable("nothing is written")
        return out

    def two_pass(self, stage_values: list[list[Any]]) -> list[tuple[Any, ...]]:
        """Return (combine, values, buffers, kind) per stage; kind "moments" marks x and x*x."""
        out = []
        for block, values in zip(self.stages, stage_values, strict=True):
            kind = ""
            if block.combine == ("sum", "sum") and _is_square(values[1], values[0]):
                kind = "moments"
            out.append((block.combine, values, block.buffers, kind))
        return out


def _is_square(expr: Any, x: Any) -> bool:
    if isinstance(expr, tirx.Mul):
        return bool(structural_equal(expr.a, x)) and bool(structural_equal(expr.b, x))
    if isinstance(expr, Call) and getattr(expr.op, "name", "") in ("tirx.pow", "tirx.power"):
        base, exponent = expr.args
        return bool(structural_equal(base, x)) and float(getattr(exponent, "value", 0)) == 2.0
    return False


def _loads(expr: Any) -> list[Any]:
    found: list[Any] = []

    def visit(e: Any) -> Any | None:
        if isinstance(e, TensorLoad):
            found.append(e)
            return e
        return None

    rewrite(expr, visit)
    return found


def _mentions(expr: Any, var: Any) -> bool:
    hit = False

    def visit(e: Any) -> Any | None:
        nonlocal hit
        if isinstance(e, TensorLoad):
            for i in e.indices:
                rewrite(i, visit)
            return e
        if isinstance(e, tirx.Var) and e.same_as(var):
            hit = True
        return None

    rewrite(expr, visit)
    return hit


def _assemble(
    reader: _Reader,
    stages: list[tuple[Any, ...]],
    results: list[tuple[Any, tuple[Any, ...], Any, bool]],
) -> RowProgram:
    from .reduction_value import Lowerer

    row = reader.row
    index = {p: i for i, p in enumerate(reader.params)}
    tensors = [
        Tensor(
            f"a{i}",
            tuple(int(d.value) if isinstance(d, tirx.IntImm) else d for d in p.ty.shape),
            str(p.ty.dtype),
        )
        for i, p in enumerate(reader.params)
    ]
    for t in tensors:
        for d in t.shape:
            if not isinstance(d, (int, tirx.Var)):
                raise Unreadable("a size is an expression")
    # Every distinct access is an operand: those of the reductions are kept, the rest is late.
    kept: list[tuple[Any, tuple[Any, ...]]] = []
    late: list[tuple[Any, tuple[Any, ...]]] = []

    def slot(load: Any, where: list[tuple[Any, tuple[Any, ...]]]) -> int:
        if load.source in reader.written:
            raise Unreadable("a result is read again")
        strides = reader.strides(load.source, load.indices)
        for i, (src, s) in enumerate(where):
            if src.same_as(load.source) and _equal_strides(s, strides):
                return i
        where.append((load.source, strides))
        return len(where) - 1

    for _, values, _, _ in stages:
        for v in values:
            for load in _loads(v):
                slot(load, kept)
    for _, _, value, per_row in results:
        for load in _loads(value):
            strides = reader.strides(load.source, load.indices)
            known = any(src.same_as(load.source) and _equal_strides(s, strides) for src, s in kept)
            if per_row:
                raise Unreadable("a value per row reads a tensor")
            if not known:
                slot(load, late)
    if not kept:
        raise Unreadable("the reductions read nothing")
    operands = [Operand(index[src], s) for src, s in kept + late]
    outs = [Operand(index[buf], s) for buf, s, _, _ in results]
    wide = [o for o, (_, _, _, per_row) in zip(outs, results, strict=True) if not per_row]
    narrow = [o for o, (_, _, _, per_row) in zip(outs, results, strict=True) if per_row]
    axes = [
        Axis(
            int(row.extents[v].value)
            if isinstance(row.extents[v], tirx.IntImm)
            else row.extents[v],
            v in row.reduced,
        )
        for v in row.order
    ]
    axes, loads, width = build_domain(axes, [*operands, *wide, *narrow])
    if narrow and not axes[-1].reduced:
        width = 1
    main, late_loads = loads[: len(kept)], loads[len(kept) : len(operands)]
    positions = iter(loads[len(operands) :])
    wide_at = [next(positions) for _ in wide]
    narrow_at = [next(positions) for _ in narrow]
    lower = Lowerer(reader, kept, late, row)
    program = RowProgram(
        "row_reduction", tensors, axes, main, lambda raw: list(raw), [], [], late_loads, width
    )
    program.stages = lower.stages(stages, program)
    for buf, _, value, per_row in results:
        load = narrow_at.pop(0) if per_row else wide_at.pop(0)
        program.stores.append(Store(index[buf], load.index, lower.result(value, per_row), per_row))
    return program


def _equal_strides(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(
        (x == y if isinstance(x, int) and isinstance(y, int) else bool(structural_equal(x, y)))
        if isinstance(x, int) == isinstance(y, int)
        else False
        for x, y in zip(a, b, strict=True)
    )


def read_program(func: tirx.PrimFunc, functions: Functions) -> RowProgram:
    """Return the row program that a PrimFunc computes.

    Raises
    ------
    Unreadable
        When it is none; says why.
    """
    return _Reader(func, functions).program()
