"""ExpandRotaryKernels: a module's own rotary PrimFunc becomes operators that fuse.

Before: `q, k, v = R.call_tir(cls.fused_rope, (qkv, positions))`, whose sines are computed for every
head and stay apart from the attention. After: two small tables (rows, rotary dim) in float32, made
once for all layers with the same positions, and slices, products and sums, which the fusions take
into their kernels.

What is recognised and refused is said in `patterns.rotary_primfunc`.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..cloning import with_functions
from ..kernels.scalar_expr import TensorLoad, buffer_loads, i64, rewrite, substitute
from ..patterns.rotary_primfunc import RotaryKernel, RotaryOutput, find_rotary_primfunc
from ..registry import PassRun, register_pass
from ..report import Refusal

__all__ = ["ExpandRotaryKernels"]


def _table(kernel: RotaryKernel, func: tirx.PrimFunc, which: str) -> tirx.PrimFunc:
    """Return the PrimFunc of a table: which(angle) * factor for every row and turned depth."""
    width = max(o.rotary.rotary_dim for o in kernel.outputs if o.rotary is not None)
    axes = [a for i, a in enumerate(kernel.axes) if i != kernel.head_axis]
    sizes: dict[Any, Any] = {}

    def size(dim: Any) -> Any:
        if isinstance(dim, tirx.IntImm):
            return i64(dim)
        return sizes.setdefault(dim, tirx.Var(f"n{len(sizes)}", "int64"))

    renamed: dict[Any, Any] = {}
    for number in kernel.inputs:
        old = func.params[number]
        renamed[old] = tirx.decl_buffer(
            [size(d) for d in old.ty.shape], str(old.ty.dtype), name=f"positions{len(renamed)}"
        )
    shaped = func.params[kernel.outputs[0].param].ty.shape
    shape = [size(d) for i, d in enumerate(shaped) if i != kernel.head_axis]
    shape[-1] = i64(width)
    out = tirx.decl_buffer(shape, "float32", name="table")
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("rotary_table")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8})
        for buffer in renamed.values():
            T.arg(buffer.name, buffer)
        T.arg("table", out)
        with T.grid(*shape) as loops, T.sblock("rotary_table"):
            index = [T.axis.spatial(n, v) for n, v in zip(shape, loops, strict=True)]
            moved = {
                a: v if str(a.ty.dtype) == "int64" else tirx.Cast(str(a.ty.dtype), v)
                for a, v in zip(axes, index, strict=True)
            }

            def reread(node: Any) -> Any:
                if isinstance(node, TensorLoad) and node.source in renamed:
                    return renamed[node.source][tuple(i64(rewrite(i, reread))
                                                      for i in node.indices)]  # fmt: skip
                return None

            angle = rewrite(substitute(kernel.angle, moved), reread)
            T.reads(*[b[tuple(load.indices)] for load in buffer_loads(angle)
                      for b in renamed.values() if load.source.same_as(b)])  # fmt: skip
            T.writes(out[tuple(index)])
            value = (tirx.cos if which == "cos" else tirx.sin)(angle)
            if kernel.factor != 1.0:
                value = value * tirx.FloatImm("float32", kernel.factor)
            T.buffer_store(out, value, index)
    return builder.get().without_attr("global_symbol")  # one for each table: private


@relax.expr_functor.mutator
class _Mutator(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, found: dict[Any, RotaryKernel], run: PassRun) -> None:
        super().__init__(mod)
        self.mod, self.found, self.run = mod, found, run
        self.function = ""
        self.tables: dict[Any, list[Any]] = {}

    def visit_dataflow_block_(self, block: Any) -> Any:
        self.tables = {}  # its variables are not seen outside
        return super().visit_dataflow_block_(block)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.call_tir") or len(call.args) != 2:
            return call
        kernel = self.found.get(call.args[0])
        if kernel is None or not isinstance(call.args[1], relax.Tuple):
            return call
        operands = list(call.args[1].fields)
        sources = [operands[o.source] for o in kernel.outputs]
        if any(not isinstance(s.ty, relax.TensorType) or s.ty.shape is None for s in sources):
            return call
        self.run.record.match("rotary", 1, self.function)
        types = [call.ty] if isinstance(call.ty, relax.TensorType) else list(call.ty.fields)
        tables = self._tables(call.args[0], kernel, operands, types[0])
        made = [
            self._output(kernel, o, operands[o.source], tables, ty)
            for o, ty in zip(kernel.outputs, types, strict=True)
        ]
        return made[0] if isinstance(call.ty, relax.TensorType) else relax.Tuple(made)

    def _emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder_.emit(expr)

    def _tables(self, gvar: Any, kernel: RotaryKernel, operands: list[Any], ty: Any) -> list[Any]:
        inputs = [operands[i] for i in kernel.inputs]
        key = (gvar, *inputs)
        if key not in self.tables:
            width = max(o.rotary.rotary_dim for o in kernel.outputs if o.rotary is not None)
            shape = [d for i, d in enumerate(ty.shape.values) if i != kernel.head_axis]
            shape[-1] = width
            made = []
            for which in ("cos", "sin"):
                prim = _table(kernel, self.mod[gvar], which)
                table = self.builder_.add_func(prim, f"rotary_{which}")
                wanted = relax.TensorType(shape, "float32")
                one = self._emit(relax.call_tir(table, inputs, wanted))
                made.append(self._emit(relax.op.expand_dims(one, [kernel.head_axis])))
            self.tables[key] = made
        return self.tables[key]

    def _output(
        self, kernel: RotaryKernel, output: RotaryOutput, x: Any, tables: list[Any], ty: Any
    ) -> relax.Expr:
        emit, last = self._emit, kernel.rank - 1
        if output.first is not None and output.count is not None:
            end = output.first + output.count
            x = emit(relax.op.strided_slice(x, [kernel.head_axis], [output.first], [end], [1]))
        dtype = str(ty.dtype)
        if output.rotary is None:
            return x if str(x.ty.dtype) == dtype else emit(relax.op.astype(x, dtype))
        if str(x.ty.dtype) != "float32":
            x = emit(relax.op.astype(x, "float32"))
        width, size = output.rotary.rotary_dim, output.rotary.head_dim

        def part(source: Any, begin: int, end: int, step: int = 1) -> Any:
            return emit(relax.op.strided_slice(source, [last], [begin], [end], [step]))

        turned = x if width == size else part(x, 0, width)
        if output.rotary.style == "half":
            low, high = part(turned, 0, width // 2), part(turned, width // 2, width)
            other = emit(relax.op.concat([emit(relax.op.negative(high)), low], axis=last))
        else:
            low, high = part(turned, 0, width, 2), part(turned, 1, width, 2)
            pair = emit(relax.op.stack([emit(relax.op.negative(high)), low], axis=last + 1))
            other = emit(relax.op.reshape(pair, turned.ty.shape))
        cos, sin = tables
        one, two = emit(relax.op.multiply(turned, cos)), emit(relax.op.multiply(other, sin))
        new = emit(relax.op.add(one, two))
        if width < size:
            new = emit(relax.op.concat([new, part(x, width, size)], axis=last))
        return new if dtype == "float32" else emit(relax.op.astype(new, dtype))


def _called(func: Any) -> list[Any]:
    found: list[Any] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, tvm.ir.GlobalVar):
            found.append(expr)

    if isinstance(func, relax.Function):
        relax.analysis.post_order_visit(func, visit)
    return found


@register_pass("ExpandRotaryKernels", stage="clean")
def ExpandRotaryKernels(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Write a module's own rotary PrimFuncs out as tables and operators that fuse."""
    found = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        kernel = find_rotary_primfunc(func, gvar.name_hint)
        if isinstance(kernel, Refusal):
            run.record.refuse(kernel)
        elif kernel is not None:
            found[gvar] = kernel
    if not found:
        return mod
    mutator = _Mutator(mod, found, run)
    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function) and any(g in found for g in _called(func)):
            mutator.function = gvar.name_hint
            mutator.builder_.update_func(gvar, mutator.visit_expr(func))
    result = mutator.builder_.get()
    used = {g.name_hint for func in result.functions.values() for g in _called(func)}
    gone = {g.name_hint for g in found if g.name_hint not in used}
    kept = {g: f for g, f in result.functions.items() if g.name_hint not in gone}
    return with_functions(mod, kept)
