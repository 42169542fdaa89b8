"""JoinRowProducts: products of one row that can run at the same time become one CUDA kernel.

Before: `q = call_tir(gemv, (x, wq)); k = call_tir(gemv, (x, wk)); v = call_tir(gemv, (x, wv))`.
After: `q, k, v = call_tir(gemv_join, (x, wq, x, wk, x, wv))`.

A decode step of a small model is bound by launches, and one product of few rows does not fill a
GPU. Weights are read where they are: nothing is concatenated. A product whose epilogue multiplies
by another's result (gate and up) joins it. It works on what `LowerComposites` chose, and takes the
kernels of `kernels.cuda_gemv`; on other targets there is nothing to do.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar, Tuple, TupleGetItem, Var
from tvm.relax import BindingBlock, DataflowBlock, DataflowVar, VarBinding

from ..cloning import new_seq, set_type, with_functions
from ..dataflow import op_name
from ..kernels.cuda_gemv import geometry_of, spec_of, tensors_of
from ..kernels.cuda_gemv_join import Member, joined_kernel
from ..registry import PassRun, register_pass

__all__ = ["JoinRowProducts"]

KIND = "row_products"
_MOST = 8  # products in one kernel


class _Product:
    """A binding that calls a kernel for one row."""

    def __init__(self, row: int, binding: Any, spec: Any) -> None:
        self.row, self.binding, self.spec = row, binding, spec
        self.args: list[Any] = list(binding.value.args[1].fields)
        self.names = [t[0] for t in tensors_of(spec)[:-1]]

    @property
    def var(self) -> Any:
        return self.binding.var


class _Group:
    """Products that become one call in the place of the first."""

    def __init__(self, first: _Product) -> None:
        self.members = [first]
        self.reads: list[dict[str, int]] = [{}]
        self.before: dict[int, None] = {}  # rows of views that move in front of the first

    def fits(self, product: _Product) -> bool:
        """Tell whether a product's blocks have as many threads."""
        mine, its = (geometry_of(p.spec) for p in (self.members[0], product))
        return mine.threads == its.threads

    def ready(self, arg: Any, bindings: list[Any], places: dict[Any, int]) -> list[int] | None:
        """Return the rows of the views to move so that `arg` is there before the first, or None."""
        moved: list[int] = []
        while True:
            row = places.get(arg, -1)
            if row < self.members[0].row or row in self.before:
                return moved[::-1]
            value = bindings[row].value
            if isinstance(value, TupleGetItem):
                arg = value.tuple_value
            elif op_name(value) in ("relax.reshape", "relax.expand_dims", "relax.squeeze"):
                arg = value.args[0]
            else:
                return None
            moved.append(row)

    def takes(self, product: _Product, bindings: list[Any], places: dict[Any, int]) -> bool:
        """Add a product if all that it reads is there before the first, or made by a member."""
        if len(self.members) >= _MOST or not self.fits(product):
            return False
        reads: dict[str, int] = {}
        before: dict[int, None] = {}
        for name, arg in zip(product.names, product.args, strict=True):
            made = next((i for i, m in enumerate(self.members) if m.var.same_as(arg)), None)
            if made is None:
                moved = self.ready(arg, bindings, places)
                if moved is None:
                    return False
                before |= dict.fromkeys(moved)
                continue
            other = self.members[made].spec
            alike = geometry_of(other) == geometry_of(product.spec)
            element = name not in ("lhs", "rhs") and all(
                op != "bias" for op, role, *_ in product.spec.steps if role == name
            )
            if not element or not alike or other.n != product.spec.n or self.reads[made]:
                return False
            reads[name] = made
        if len(set(reads.values())) > 1:
            return False
        self.members.append(product)
        self.reads.append(reads)
        self.before |= before
        return True


@register_pass("JoinRowProducts", stage="lower")
def JoinRowProducts(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Put products of one row that do not wait for each other into one kernel (CUDA)."""
    specs = {gv: s for gv, f in mod.functions.items() if (s := spec_of(f)) is not None}
    if not specs:
        return mod
    builder = relax.BlockBuilder(mod)
    changed: dict[GlobalVar, relax.Function] = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, relax.Function) or not isinstance(func.body, relax.SeqExpr):
            continue
        blocks, count = [], 0
        for block in func.body.blocks:
            new, joined = _block(block, specs, builder)
            blocks.append(new)
            count += joined
        if count:
            body = new_seq(blocks, func.body.body, func.body.ty)
            changed[gvar] = relax.Function(
                func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span
            )
            run.record.match(KIND, count, gvar.name_hint)
    if not changed:
        return mod
    new_mod = builder.get()
    for gvar, func in changed.items():
        new_mod.update_func(new_mod.get_global_var(gvar.name_hint), func)
    new_mod = _without_unused(new_mod, {gv.name_hint for gv in specs})
    return new_mod.with_attrs(dict(mod.attrs)) if mod.attrs else new_mod


def _block(block: Any, specs: dict[GlobalVar, Any], builder: relax.BlockBuilder) -> tuple[Any, int]:
    """Return a block with its products joined, and how many were."""
    bindings = list(block.bindings)
    places: dict[Any, int] = {b.var: i for i, b in enumerate(bindings)}
    groups: list[_Group] = []
    open_groups: list[_Group] = []
    for row, binding in enumerate(bindings):
        product = _product(row, binding, specs)
        if product is None:
            if _may_write(binding):
                open_groups = []  # what was read before may be another value behind it
            continue
        if any(group.takes(product, bindings, places) for group in open_groups):
            continue
        groups.append(_Group(product))
        open_groups = [groups[-1], *open_groups[:3]]
    groups = [g for g in groups if len(g.members) > 1]
    if not groups:
        return block, 0
    first = {g.members[0].row: g for g in groups}
    gone = {m.row for g in groups for m in g.members[1:]} | {r for g in groups for r in g.before}
    made: list[Any] = []
    dataflow = isinstance(block, DataflowBlock)
    for row, binding in enumerate(bindings):
        if row in first:
            made += [bindings[r] for r in first[row].before]
            made += _joined(first[row], builder, dataflow)
        elif row not in gone:
            made.append(binding)
    new = (DataflowBlock if dataflow else BindingBlock)(made)
    return new, sum(len(g.members) for g in groups)


def _product(row: int, binding: Any, specs: dict[GlobalVar, Any]) -> _Product | None:
    value = binding.value
    if not isinstance(binding, VarBinding) or op_name(value) != "relax.call_tir":
        return None
    spec = specs.get(value.args[0])
    if spec is None or len(value.args) != 2 or not isinstance(value.args[1], Tuple):
        return None
    return _Product(row, binding, spec)


def _may_write(binding: Any) -> bool:
    """Whether a binding may change a tensor in place."""
    value = binding.value
    if not isinstance(value, Call):
        return not isinstance(value, (Tuple, TupleGetItem, Var))
    name = op_name(value)
    return (
        not name
        or name in ("relax.call_tir_inplace", "relax.call_inplace_packed")
        or ("packed" in name or "call_py" in name)
    )


def _joined(group: _Group, builder: relax.BlockBuilder, dataflow: bool) -> list[Any]:
    """Return the bindings of a group: the call, and a name for each result."""
    members = [Member(m.spec, reads) for m, reads in zip(group.members, group.reads, strict=True)]
    kernel = joined_kernel(members)
    gvar = builder.add_func(kernel, "gemv_join")
    args = [
        arg
        for product, reads in zip(group.members, group.reads, strict=True)
        for name, arg in zip(product.names, product.args, strict=True)
        if name not in reads
    ]
    types = [m.var.ty for m in group.members]
    call = set_type(relax.call_tir(gvar, args, types), relax.TupleType(types))
    whole = (DataflowVar if dataflow else relax.Var)("products", call.ty)
    items: list[Any] = [VarBinding(whole, call)]
    for number, product in enumerate(group.members):
        item = set_type(TupleGetItem(whole, number), product.var.ty)
        items.append(VarBinding(product.var, item))
    return items


def _without_unused(mod: tvm.IRModule, names: set[str]) -> tvm.IRModule:
    """Drop kernels of one product that nothing calls any more."""
    used: set[str] = set()
    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(
                func, lambda e: used.add(e.name_hint) if isinstance(e, GlobalVar) else None
            )
    gone = {gv for gv in mod.functions if gv.name_hint in names - used}
    kept = {gv: f for gv, f in mod.functions.items() if gv not in gone}
    return with_functions(mod, kept)
