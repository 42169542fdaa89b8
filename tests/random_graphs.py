"""Random Relax modules with everything that makes moving bindings hard.

Aliases (to variables, parameters, constants, outputs), tuples built and taken apart, operators
that change nothing, diamonds, values read by several, results with several fields, match_cast
that defines sizes, sizes that are expressions, several dataflow blocks with other code between,
If, local functions, calls of other functions, calls with side effects.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar, Tuple, TupleGetItem, TupleType, Var
from tvm.relax import (
    BindingBlock,
    DataflowBlock,
    DataflowVar,
    Function,
    MatchCast,
    SeqExpr,
    ShapeExpr,
    ShapeType,
    TensorType,
    VarBinding,
    op,
)

from relax_llm_passes.cloning import new_if, new_seq, set_type
from relax_llm_passes.rewriting import set_function_type

COLUMNS = 4


@dataclass(frozen=True)
class Rows:
    """The row count of a tensor: a symbol times a factor, or a number."""

    symbol: Var | None
    factor: int = 1

    def expr(self) -> Any:
        if self.symbol is None:
            return self.factor
        return self.symbol if self.factor == 1 else self.symbol * self.factor


@dataclass(frozen=True)
class Kind:
    """What a value is: a tensor of (rows, columns), a tuple of kinds, or a shape."""

    rows: Rows | None = None
    columns: int = COLUMNS
    fields: tuple[Kind, ...] | None = None
    shape: bool = False

    def ty(self) -> Any:
        if self.fields is not None:
            return TupleType([f.ty() for f in self.fields])
        assert self.rows is not None
        if self.shape:
            return ShapeType([self.rows.expr(), self.columns])
        return TensorType([self.rows.expr(), self.columns], "float32")

    @property
    def is_tensor(self) -> bool:
        return self.fields is None and not self.shape


SQUARE = Kind(Rows(None, COLUMNS))
BOOL = TensorType([], "bool")


@dataclass
class Scope:
    """Values in sight while a scope is generated."""

    values: list[tuple[Any, Kind]]
    blocks: list[BindingBlock] = field(default_factory=list)
    current: list[Any] = field(default_factory=list)
    dataflow: bool = False
    hidden: set[Var] = field(default_factory=set)


class Generator:
    """Makes one module from a seed."""

    def __init__(self, seed: int, size: int = 24) -> None:
        self.rng = random.Random(seed)
        self.size = size
        self.count = 0
        self.helpers: list[tuple[GlobalVar, Function]] = []
        self.impure = False
        self.allow_impure = self.rng.random() < 0.25
        self.allow_control = self.rng.random() < 0.5
        self.cond: Var | None = None

    # Helpers

    def name(self) -> str:
        self.count += 1
        return self.rng.choice(["lv", "gv", "x", f"lv{self.count}", "matmul"])

    def emit(self, scope: Scope, value: Any, kind: Kind, cast: Any = None) -> Var:
        inner = scope.dataflow and self.rng.random() < 0.75
        ty = kind.ty() if cast is None else cast
        var = (DataflowVar if inner else Var)(self.name(), ty)
        binding = VarBinding(var, value) if cast is None else MatchCast(var, value, cast)
        scope.current.append(binding)
        scope.values.append((var, kind))
        if inner:
            scope.hidden.add(var)
        return var

    def pick(self, scope: Scope, test: Any) -> tuple[Any, Kind] | None:
        found = [v for v in scope.values if test(v[1])]
        if not found:
            return None
        # Recent values are taken more often, which makes chains as well as diamonds.
        return self.rng.choice(found[-6:]) if self.rng.random() < 0.7 else self.rng.choice(found)

    def tensor(self, scope: Scope, like: Kind | None = None) -> tuple[Any, Kind]:
        found = self.pick(scope, lambda k: k.is_tensor if like is None else k == like)
        assert found is not None
        return found

    def constant(self, kind: Kind) -> Any:
        rng = np.random.default_rng(self.rng.randrange(1 << 30))
        assert kind.rows is not None
        shape = (kind.rows.factor, kind.columns)
        return relax.const(rng.standard_normal(shape).astype("float32") / 2)

    # Bindings

    def step(self, scope: Scope, depth: int) -> None:
        choice = self.rng.random()
        steps: list[tuple[float, Any]] = [
            (0.16, self.unary),
            (0.20, self.binary),
            (0.14, self.matmul),
            (0.10, self.alias),
            (0.06, self.make_tuple),
            (0.07, self.take_apart),
            (0.06, self.noop),
            (0.04, self.split),
            (0.04, self.concat),
            (0.05, self.cast),
            (0.03, self.ones),
            (0.05, self.special),
        ]
        for share, step in steps:
            choice -= share
            if choice < 0:
                step(scope, depth) if step == self.special else step(scope)
                return
        self.unary(scope)

    def unary(self, scope: Scope) -> None:
        x, kind = self.tensor(scope)
        make = self.rng.choice([op.nn.relu, op.negative, op.tanh])
        self.emit(scope, set_type(make(x), kind.ty()), kind)

    def binary(self, scope: Scope) -> None:
        x, kind = self.tensor(scope)
        if kind == SQUARE and self.rng.random() < 0.2:
            y = self.constant(kind)
        else:
            y, _ = self.tensor(scope, kind)
        make = self.rng.choice([op.add, op.multiply, op.subtract])
        self.emit(scope, set_type(make(x, y), kind.ty()), kind)

    def matmul(self, scope: Scope) -> None:
        found = self.pick(scope, lambda k: k.is_tensor and k.columns == COLUMNS)
        assert found is not None
        x, kind = found
        w = self.constant(SQUARE) if self.rng.random() < 0.15 else self.tensor(scope, SQUARE)[0]
        self.emit(scope, set_type(op.matmul(x, w), kind.ty()), kind)

    def alias(self, scope: Scope) -> None:
        if self.rng.random() < 0.1:
            self.emit(scope, self.constant(SQUARE), SQUARE)
            return
        x, kind = self.rng.choice(scope.values[-8:])
        self.emit(scope, x, kind)

    def make_tuple(self, scope: Scope) -> None:
        parts = [self.rng.choice(scope.values) for _ in range(self.rng.choice([1, 2, 2, 3]))]
        kind = Kind(fields=tuple(k for _, k in parts))
        if _depth(kind) > 3:
            return
        self.emit(scope, Tuple([v for v, _ in parts]), kind)

    def take_apart(self, scope: Scope) -> None:
        found = self.pick(scope, lambda k: k.fields is not None)
        if found is None:
            self.make_tuple(scope)
            return
        t, kind = found
        assert kind.fields is not None
        if self.rng.random() < 0.2:  # put together again what was just taken apart
            items = [
                self.emit(scope, set_type(TupleGetItem(t, i), k.ty()), k)
                for i, k in enumerate(kind.fields)
            ]
            self.emit(scope, Tuple(items), kind)
            return
        i = self.rng.randrange(len(kind.fields))
        self.emit(scope, set_type(TupleGetItem(t, i), kind.fields[i].ty()), kind.fields[i])

    def noop(self, scope: Scope) -> None:
        x, kind = self.tensor(scope)
        which = self.rng.randrange(4)
        shape = ShapeExpr([kind.rows.expr(), kind.columns])  # type: ignore[union-attr]
        if which == 0:
            call = op.reshape(x, shape)
        elif which == 1:
            call = op.broadcast_to(x, shape)
        elif which == 2:
            axes = [1, 0] if kind == SQUARE and self.rng.random() < 0.5 else [0, 1]
            call = op.permute_dims(x, axes)
        else:
            call = op.astype(x, "float32")
        self.emit(scope, set_type(call, kind.ty()), kind)

    def split(self, scope: Scope) -> None:
        found = self.pick(scope, lambda k: k.is_tensor and k.columns == COLUMNS)
        assert found is not None
        x, kind = found
        half = Kind(kind.rows, COLUMNS // 2)
        both = Kind(fields=(half, half))
        self.emit(scope, set_type(op.split(x, 2, axis=1), both.ty()), both)

    def concat(self, scope: Scope) -> None:
        x, kind = self.tensor(scope)
        y, _ = self.tensor(scope, kind)
        assert kind.rows is not None
        if kind.columns < COLUMNS:
            new = Kind(kind.rows, kind.columns * 2)
            axis = 1
        elif kind.rows.factor == 1 and kind.rows.symbol is not None:
            new = Kind(Rows(kind.rows.symbol, 2), kind.columns)
            axis = 0
        else:
            return self.unary(scope)
        self.emit(scope, set_type(op.concat([x, y], axis=axis), new.ty()), new)
        return None

    def cast(self, scope: Scope) -> None:
        x, kind = self.tensor(scope)
        assert kind.rows is not None
        which = self.rng.randrange(4)
        if which == 0 or kind.rows.symbol is None:
            self.emit(scope, x, kind, kind.ty())  # adds nothing
        elif which == 1 and kind.rows.factor == 1:
            new = Kind(Rows(Var("m", "int64")), kind.columns)  # defines a size
            self.emit(scope, x, new, new.ty())
        else:
            others = [
                k for _, k in scope.values if k.is_tensor and k.rows and k.columns == kind.columns
            ]
            same = [
                k
                for k in others
                if k.rows.symbol is not None and k.rows.factor == kind.rows.factor  # type: ignore[union-attr]
            ]
            new = self.rng.choice(same)
            self.emit(scope, x, new, new.ty())  # a check

    def ones(self, scope: Scope) -> None:
        _, kind = self.tensor(scope)
        assert kind.rows is not None
        shape: Any = ShapeExpr([kind.rows.expr(), kind.columns])
        if self.rng.random() < 0.3:
            shape = self.emit(scope, shape, Kind(kind.rows, kind.columns, shape=True))
        self.emit(scope, set_type(op.ones(shape, "float32"), kind.ty()), kind)

    def special(self, scope: Scope, depth: int) -> None:
        if self.helpers and self.rng.random() < 0.4:
            self.call_helper(scope)
        elif scope.dataflow or depth > 1 or not self.allow_control:
            self.unary(scope)
        elif self.allow_impure and self.rng.random() < 0.5:
            self.side_effect(scope)
        elif self.rng.random() < 0.5 and self.cond is not None:
            self.branch(scope, depth)
        else:
            self.local_function(scope, depth)

    def call_helper(self, scope: Scope) -> None:
        gvar, _ = self.rng.choice(self.helpers)
        found = self.pick(scope, lambda k: k.is_tensor and k.columns == COLUMNS)
        assert found is not None
        x, kind = found
        w, _ = self.tensor(scope, SQUARE)
        both = Kind(fields=(kind, SQUARE))
        self.emit(scope, Call(gvar, [x, w], None, None, None, both.ty()), both)

    def side_effect(self, scope: Scope) -> None:
        x, kind = self.tensor(scope)
        self.impure = True
        call = op.base.call_packed("fuzz.note", x, ty_args=[kind.ty()]) if False else None
        call = Call(relax.ExternFunc("fuzz.note"), [x], None, [kind.ty()], None, kind.ty())
        self.emit(scope, call, kind)

    def branch(self, scope: Scope, depth: int) -> None:
        _, kind = self.tensor(scope)
        branches = [self.inner(scope, depth + 1, kind) for _ in range(2)]
        value = new_if(self.cond, branches[0], branches[1], kind.ty())
        self.emit(scope, value, kind)

    def inner(self, scope: Scope, depth: int, kind: Kind) -> SeqExpr:
        values = [v for v in scope.values if v[0] not in scope.hidden]
        child = Scope(values)
        self.fill(child, self.rng.choice([0, 1, 3, 4]), depth)
        visible = [v for v in child.values if v[1] == kind and v[0] not in child.hidden]
        result = self.rng.choice(visible[-3:])[0]
        return new_seq(child.blocks, result, kind.ty())

    def local_function(self, scope: Scope, depth: int) -> None:
        symbol = Var("k", "int64")
        kind = Kind(Rows(symbol))
        param = Var("p", kind.ty())
        square = [v for v in scope.values if v[1] == SQUARE and v[0] not in scope.hidden]
        child = Scope([(param, kind), *square])
        allow, self.allow_impure = self.allow_impure, False
        self.fill(child, self.rng.choice([1, 2, 4]), depth + 1)
        self.allow_impure = allow
        visible = [v for v in child.values if v[1] == kind and v[0] not in child.hidden]
        result = self.rng.choice(visible[-3:])[0]
        func = Function([param], new_seq(child.blocks, result, kind.ty()), kind.ty(), True)
        var = Var("inner", func.ty)
        scope.current.append(VarBinding(var, func))
        for _ in range(self.rng.choice([0, 1, 2])):
            found = self.pick(
                scope,
                lambda k: k.is_tensor and k.columns == COLUMNS and k.rows.symbol is not None,
            )
            if found is not None:
                x, outer = found
                self.emit(scope, Call(var, [x], None, None, None, outer.ty()), outer)

    # Scopes and functions

    def fill(self, scope: Scope, bindings: int, depth: int) -> None:
        left = bindings
        while left > 0:
            scope.dataflow = self.rng.random() < 0.65
            n = min(left, self.rng.randrange(1, 12))
            left -= n
            for _ in range(n):
                self.step(scope, depth)
            if scope.current:
                make = DataflowBlock if scope.dataflow else BindingBlock
                scope.blocks.append(make(scope.current))
            scope.values = [v for v in scope.values if v[0] not in scope.hidden]
            scope.current, scope.dataflow = [], False

    def function(self, name: str) -> tuple[GlobalVar, Function]:
        n = Var("n", "int64")
        tall = Kind(Rows(n))
        params: list[tuple[Var, Kind]] = [
            (Var("x", tall.ty()), tall),
            (Var("w", SQUARE.ty()), SQUARE),
        ]
        if self.rng.random() < 0.6:
            params.append((Var("y", tall.ty()), tall))
        if self.rng.random() < 0.3:
            double = Kind(Rows(n, 2))
            params.append((Var("z", double.ty()), double))
        self.cond = Var("c", BOOL) if self.allow_control else None
        self.impure = False
        scope = Scope(list(params))
        self.fill(scope, self.rng.randrange(3, self.size), 0)
        results = [self.rng.choice(scope.values[-6:]) for _ in range(self.rng.choice([1, 1, 2, 3]))]
        if len(results) == 1:
            result, ty = results[0][0], results[0][1].ty()
        else:
            result = Tuple([v for v, _ in results])
            ty = TupleType([k.ty() for _, k in results])
        known = {n: n}
        ret_ty = relax.analysis.erase_to_well_defined(ty, known)
        variables = [v for v, _ in params] + ([self.cond] if self.cond is not None else [])
        func = Function(variables, new_seq(scope.blocks, result, ty), ret_ty, not self.impure)
        gvar = GlobalVar(name)
        set_function_type(gvar, func)
        return gvar, func.with_attr("global_symbol", name)

    def helper(self) -> tuple[GlobalVar, Function]:
        k = Var("k", "int64")
        tall = Kind(Rows(k))
        x, w = Var("x", tall.ty()), Var("w", SQUARE.ty())
        product = DataflowVar("lv", tall.ty())
        a, b = Var("a", tall.ty()), Var("b", SQUARE.ty())
        block = DataflowBlock(
            [
                VarBinding(product, set_type(op.matmul(x, w), tall.ty())),
                VarBinding(a, set_type(op.nn.relu(product), tall.ty())),
                VarBinding(b, set_type(op.negative(w), SQUARE.ty())),
            ]
        )
        result = Tuple([a, b])
        func = Function([x, w], new_seq([block], result), result.ty, True)
        gvar = GlobalVar("helper")
        set_function_type(gvar, func)
        return gvar, func

    def module(self) -> tvm.IRModule:
        functions: dict[GlobalVar, Function] = {}
        if self.rng.random() < 0.4:
            self.helpers = [self.helper()]
            functions.update(self.helpers)
        for name in self.rng.sample(["prefill", "decode", "main"], self.rng.choice([1, 1, 2])):
            gvar, func = self.function(name)
            functions[gvar] = func
        return tvm.IRModule(functions)


def _depth(kind: Kind) -> int:
    return 0 if kind.fields is None else 1 + max(_depth(f) for f in kind.fields)


def random_module(seed: int, size: int = 24) -> tvm.IRModule:
    """Return the module of a seed; the same seed gives the same module."""
    return Generator(seed, size).module()


def random_inputs(func: Function, seed: int, rows: int = 3) -> list[np.ndarray]:
    """Return arguments for a function of `random_module`."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for param in func.params[:]:
        if len(param.ty.shape.values) == 0:
            found.append(np.array(bool(rng.integers(2))))
            continue
        first = param.ty.shape.values[0]
        if isinstance(first, tvm.tirx.IntImm):
            size = int(first.value)
        else:
            size = rows if isinstance(first, Var) else 2 * rows
        found.append(rng.standard_normal((size, COLUMNS)).astype("float32") / 2)
    return found
