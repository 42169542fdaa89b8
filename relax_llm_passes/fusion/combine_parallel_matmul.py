"""CombineParallelMatmul: products of one left operand become one product, then a split.

before                                   after
    q = matmul(x, wq)                        w = concat((wq, wk, wv), axis=1)
    k = matmul(x, wk)                        qkv = matmul(x, w)
    v = matmul(x, wv)                        parts = split(qkv, [...], axis=-1)
                                             q = parts[0]; k = parts[1]; v = parts[2]

Weights are (K, N_i), or (N_i, K) behind a transpose; when all are transposed they are concatenated
as they are stored and one transpose stays. Branches of one group have the same K, operand dtype and
result dtype. What reads a branch (a bias of any shape, an epilogue) is not touched.

Where it pays: few rows, where three small products each start threads or a kernel. Where it does
not: weights that are parameters are concatenated, hence copied, in every call, unless TVM's
LiftTransformParams moves that to load time. Constants are concatenated here. `split` is a copy of
the result too. And a group gives up the epilogues that PartitionGemm would put into its branches,
which is why no default pipeline runs this pass.

Left alone, with the reason where two or more products share an operand: vectors, batched weights,
unknown shapes or dtypes, symbolic widths, other dtypes, products outside dataflow blocks or in
different ones, branches that depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, Tuple, TupleGetItem, TupleType, Var
from tvm.relax import Binding, DataflowVar, Expr, Function, SeqExpr, TensorType, VarBinding

from ..cloning import set_type
from ..dataflow import FunctionView, is_var
from ..patterns.shapes import dims, dtype_of, same_dim, same_dims, static
from ..regions import Scope
from ..registry import PassRun, register_pass
from ..rewriting import Draft, Item, Writer, draft_scope, paused_gc, replace_functions
from ..rewriting import write_function as write
from .canonicalize_bindings import noop_operator

__all__ = ["CombineParallelMatmul", "CombineParallelMatmulOptions"]

KIND = "parallel_matmul"


@dataclass(frozen=True)
class CombineParallelMatmulOptions:
    """Options of CombineParallelMatmul.

    Attributes
    ----------
    min_branches : int
        How many different weights one left operand must have. 2 or more.
    """

    min_branches: int = 2


@dataclass(frozen=True)
class _Branch:
    """One product: where it is, what it reads, and what it must have in common with others."""

    row: int
    root: Expr
    swapped: bool
    columns: int
    common: tuple[str, ...]

    @property
    def weight(self) -> tuple[Expr, bool]:
        return self.root, self.swapped


def _left_key(view: FunctionView, expr: Expr) -> Any:
    """Return what is the same for two spellings of one left operand."""
    found = view.resolve(expr)
    made = view.value(found)
    if type(made) is TupleGetItem:  # two variables for one field of a tuple parameter
        return view.resolve(made.tuple_value), int(made.index)
    return found


def _groups(view: FunctionView) -> list[list[int]]:
    """Return the rows of products by left operand, where there are several."""
    found: dict[Any, list[int]] = {}
    for row, binding in enumerate(view.bindings):
        if view.is_alias(binding.var) or view.call(binding.var, "relax.matmul") is None:
            continue
        if type(binding) is VarBinding:
            found.setdefault(_left_key(view, binding.value.args[0]), []).append(row)
    return [rows for rows in found.values() if len(rows) > 1]


def _weight(view: FunctionView, expr: Expr) -> tuple[Expr, bool]:
    """Return a matrix behind its transposes, and whether they swap its axes."""
    root, swapped = view.resolve(expr), False
    while (call := view.call(root, "relax.permute_dims")) is not None:
        axes = call.attrs.axes
        shape = dims(call.args[0])
        if shape is None or len(shape) != 2:
            break
        if axes is None or [int(a) % 2 for a in axes] == [1, 0]:
            swapped = not swapped
        root = view.resolve(call.args[0])
    return root, swapped


def _branch(view: FunctionView, row: int) -> _Branch | str:
    """Return the branch that a product is, or why it cannot be one."""
    call = view.bindings[row].value
    left, right = call.args
    a, b, out = dims(left), dims(right), dims(view.bindings[row].var)
    if a is None or b is None or out is None:
        return "the shape of an operand is not known"
    if len(a) < 2 or len(b) < 2:
        side = "left" if len(a) < 2 else "right"
        return f"the {side} operand has {min(len(a), len(b))} axis; expected a matrix"
    if len(b) != 2:
        return f"the right operand is a batch of matrices ({len(b)} axes); expected 2 axes"
    if not same_dim(a[-1], b[0]):
        return f"the summed axes are not provably equal: {a[-1]} and {b[0]}"
    if not same_dims(a[:-1], out[:-1]):
        return "the result's rows are not provably those of the left operand"
    columns = static(b[1])
    if not columns:
        return f"the weight has {b[1]} columns; expected a number known when compiling"
    types = [dtype_of(left), dtype_of(right), dtype_of(call)]
    if not all(types):
        return "the dtype of an operand is not known"
    root, swapped = _weight(view, right)
    shape = dims(root)
    if shape is None or len(shape) != 2:
        root, swapped = view.resolve(right), False
    devices = [str(getattr(e.ty, "vdevice", None)) for e in (root, call)]
    return _Branch(row, root, swapped, columns, (*types, *devices))


class _Planner:
    """Plans the groups of one function's outermost scope."""

    def __init__(self, view: FunctionView, run: PassRun) -> None:
        self.view = view
        self.run = run
        self.scope = Scope(view)
        self.accepted: list[list[_Branch]] = []
        self.refused: dict[int, str] = {}

    def refuse(self, row: int, reason: str) -> None:
        """Note the first reason; a branch may still find its place in a later group."""
        self.refused.setdefault(row, reason)

    def record(self) -> None:
        """Write what was found to the pass record."""
        view, record = self.view, self.run.record
        combined = {b.row for branches in self.accepted for b in branches}
        for row, reason in sorted(self.refused.items()):
            if row not in combined:
                record.refuse(reason, KIND, view.name, self.name(row))
        for branches in self.accepted:
            name = self.name(branches[0].row)
            record.match("group", 1, view.name, name)
            record.match("branch", len(branches), view.name)
            if not all(isinstance(b.root, GenericConst) for b in branches):
                record.note(
                    f"{view.name}: the weights of {name} and {len(branches) - 1} more are "
                    "concatenated in every call unless LiftTransformParams moves that to load time"
                )

    def name(self, row: int) -> str:
        return self.view.bindings[row].var.name

    def plan(self, rows: list[int]) -> None:
        """Combine what can be combined of the products of one left operand."""
        parts: dict[Any, list[_Branch]] = {}
        for row in rows:
            branch = _branch(self.view, row)
            if isinstance(branch, str):
                self.refuse(row, branch)
            elif not self.view.in_dataflow(row):
                self.refuse(row, "it is not in a dataflow block")
            else:
                key = (self.view.block(row), branch.common)
                parts.setdefault(key, []).append(branch)
        several = len(parts) > 1
        for part in parts.values():
            waiting = part
            while waiting:
                waiting = self.combine(waiting, several)

    def combine(self, branches: list[_Branch], several: bool) -> list[_Branch]:
        """Accept or refuse the first independent branches; return those that need them."""
        kept, dependent = self.independent(branches)
        wanted = max(2, self.run.options.min_branches)
        while len({b.weight for b in kept}) >= wanted:
            path = self.scope.order.contract(self.scope.node[b.row] for b in kept)
            if path is None:
                self.accepted.append(kept)
                return dependent
            # The last of the path needs the first of it, by way of what is between.
            last = self.scope.rows[path[-1]]
            text = " -> ".join(self.scope.name(n) for n in path)
            self.refuse(last, f"it depends on another branch ({text})")
            dependent = sorted(
                [*dependent, *(b for b in kept if b.row == last)], key=lambda b: b.row
            )
            kept = [b for b in kept if b.row != last]
        found = len({b.weight for b in kept})
        for branch in kept:
            if found == 1 and len(kept) > 1:
                reason = "the same product several times: eliminate common subexpressions first"
            elif several:
                reason = (
                    f"{found} of the products of this operand have the same block, dtypes and "
                    f"device; expected {wanted}"
                )
            else:
                reason = f"{found} independent products of this operand; expected {wanted}"
            self.refuse(branch.row, reason)
        return dependent

    def independent(self, branches: list[_Branch]) -> tuple[list[_Branch], list[_Branch]]:
        """Put aside the branches that read the result of another one themselves."""
        kept: list[_Branch] = []
        dependent: list[_Branch] = []
        results: dict[Var, None] = {}
        for branch in branches:
            reads = self.scope.reads[self.scope.node[branch.row]]
            source = next((v for v in results if v in reads), None)
            if source is None:
                kept.append(branch)
                results[self.view.bindings[branch.row].var] = None
            else:
                dependent.append(branch)
                self.refuse(branch.row, f"it reads the result of another branch, {source.name}")
        return kept, dependent

    def draft(self) -> Draft:
        """Return the draft in which each accepted group is one item."""
        view = self.view
        draft = draft_scope(view)
        single = {item.rows[0]: item for item in draft.items}
        groups = {b.row: branches for branches in self.accepted for b in branches}
        items: list[Item] = []
        for nodes in self.scope.order.order():
            rows = [self.scope.rows[n] for n in nodes]
            branches = groups.get(rows[0])
            if branches is None:
                items.append(single[rows[0]])
                continue
            reads: dict[Var, None] = {}
            first = view.bindings[branches[0].row].value
            for expr in (view.resolve(first.args[0]), *(b.root for b in branches)):
                if is_var(expr):
                    reads[expr] = None
            outputs = [view.bindings[b.row].var for b in branches]
            items.append(
                Item(
                    [b.row for b in branches],
                    view.block(branches[0].row),
                    _Combiner(view, branches).write,
                    outputs,
                    reads,
                )
            )
        items.sort(key=lambda item: item.block)  # stable: a group never leaves its block
        gone = self.unread(items)
        draft.items = [item for item in items if item.rows[0] not in gone]
        draft.changed = True
        return draft

    def unread(self, items: list[Item]) -> set[int]:
        """Return the rows of transposes that only products which are gone now have read."""
        view = self.view
        gone: set[int] = set()
        needed: set[Var] = set()
        for item in reversed(items):
            var = view.bindings[item.rows[0]].var
            if (
                item.replace is None
                and view.call(var, "relax.permute_dims") is not None
                and view.users(var)
                and var not in needed
                and not view.is_output(var)
            ):
                gone.add(item.rows[0])
            else:
                needed.update(item.reads)
        return gone


class _Combiner:
    """Writes one group."""

    def __init__(self, view: FunctionView, branches: list[_Branch]) -> None:
        self.view = view
        self.branches = branches
        # Two branches with one weight read the same part.
        self.weights: dict[tuple[Expr, bool], int] = {}
        for branch in branches:
            self.weights.setdefault(branch.weight, branch.columns)

    def write(self, rewritten: list[Binding], writer: Writer, dataflow: bool) -> list[Binding]:
        """Return the bindings that stand for the group's products."""
        result: list[Binding] = []
        name = rewritten[0].var.name
        kind = DataflowVar if dataflow else Var

        def emit(value: Expr, suffix: str, ty: Any = None) -> Var:
            if ty is not None:
                set_type(value, ty)
            var = kind(f"{name}_{suffix}", value.ty)
            result.append(VarBinding(var, value))
            return var

        first = self.view.bindings[self.branches[0].row]
        lhs = writer.expr(self.view, first.value.args[0])
        weight = self.weight(writer, emit)
        ty = writer.type(first.var.ty)
        rows = dims(first.var)
        assert rows is not None

        def part(columns: int) -> TensorType:
            shape = relax.ShapeExpr([*rows[:-1], columns])
            return writer.type(TensorType(shape, ty.dtype, ty.vdevice))

        total = sum(self.weights.values())
        product = Call(first.value.op, [lhs, weight], first.value.attrs)
        whole = emit(product, "combined", part(total))
        ends = np.cumsum(list(self.weights.values()))[:-1].tolist()
        parts = emit(
            relax.op.split(whole, ends, axis=-1),
            "parts",
            TupleType([part(n) for n in self.weights.values()]),
        )
        places = {weight: i for i, weight in enumerate(self.weights)}
        for old, branch in zip(rewritten, self.branches, strict=True):
            value = TupleGetItem(parts, places[branch.weight])
            result.append(VarBinding(old.var, value, old.span))
        return result

    def weight(self, writer: Writer, emit: Any) -> Expr:
        """Return the concatenated weights as (K, N)."""
        view = self.view
        swapped = all(s for _, s in self.weights)
        axis = 0 if swapped else 1
        total = sum(self.weights.values())
        constants = [view.constant(root) for root, _ in self.weights]
        type_of = next(iter(self.weights))[0].ty
        summed = dims(view.bindings[self.branches[0].row].value.args[1])
        assert summed is not None
        k = summed[0]

        def matrix(rows: Any, columns: Any) -> TensorType:
            shape = relax.ShapeExpr([rows, columns])
            return writer.type(TensorType(shape, type_of.dtype, type_of.vdevice))

        if type_of.vdevice is None and all(c is not None for c in constants):
            arrays = [
                c.T if s and not swapped else c
                for c, (_, s) in zip(constants, self.weights, strict=True)
                if c is not None
            ]
            array = np.ascontiguousarray(np.concatenate(arrays, axis=axis))
            joined: Expr = relax.const(array, dtype_of(self.branches[0].root))
        else:
            pieces = []
            for i, ((root, turned), columns) in enumerate(self.weights.items()):
                piece = writer.expr(view, root)
                if turned and not swapped:
                    piece = emit(relax.op.permute_dims(piece), f"weight{i}", matrix(k, columns))
                pieces.append(piece)
            shape = matrix(total, k) if swapped else matrix(k, total)
            joined = emit(relax.op.concat(Tuple(pieces), axis=axis), "weights", shape)
        if not swapped:
            return joined
        return emit(relax.op.permute_dims(joined), "weight", matrix(k, total))


def _refuse_inside(view: FunctionView, run: PassRun) -> None:
    """Report what is left alone in If branches and local functions."""
    for scope in view.scopes():
        if scope is view:
            continue
        for rows in _groups(scope):
            for row in rows:
                run.record.refuse(
                    "it is inside an If branch or a local function",
                    KIND,
                    view.name,
                    scope.bindings[row].var.name,
                )


@register_pass(
    "CombineParallelMatmul", stage="optional", options=CombineParallelMatmulOptions, fuses=True
)
@paused_gc()
def CombineParallelMatmul(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Make one matmul of several that read the same left operand (QKV, gate and up).

    Weights that are parameters are concatenated, so copied, in every call: use this only with
    constant weights, which are concatenated here, or together with LiftTransformParams.
    """
    changed: dict[tvm.ir.GlobalVar, Function] = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, Function) or not isinstance(func.body, SeqExpr):
            continue
        if func.attrs and any(a in func.attrs for a in ("Composite", "Codegen", "Primitive")):
            continue
        view = FunctionView(mod, gvar, noop_operator)
        _refuse_inside(view, run)
        found = _groups(view)
        if not found:
            continue
        planner = _Planner(view, run)
        for rows in found:
            planner.plan(rows)
        planner.record()
        if planner.accepted:
            changed[gvar] = write(planner.draft())
    return replace_functions(mod, changed, {}, set()) if changed else mod
