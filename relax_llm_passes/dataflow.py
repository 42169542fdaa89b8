"""The def-use view of a Relax function that recognisers read: linear time, aliases looked through.

A *scope* is one sequence of bindings: a function's body, one branch of an If, or the body of a
function defined inside another. `FunctionView(mod, name)` views the outermost scope of a
function; `views(mod)` yields every scope of every Relax function.

Importers and earlier passes leave many names for one value. The view treats as one value:

- `b = a`, chains of it, across dataflow blocks, to parameters and to constants;
- `t = (a, b); c = t[0]`, also with nested tuples, and `(t[0], t[1])` rebuilt from `t` itself;
- `b = match_cast(a, type)` where `type` is the type that `a` has already.

`resolve` maps any of these names to the one canonical expression: the variable bound by the
operator itself, a parameter, or a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call, GenericConst, GlobalVar, Tuple, TupleGetItem
from tvm.relax import (
    Binding,
    DataflowBlock,
    Expr,
    Function,
    If,
    MatchCast,
    SeqExpr,
    TensorType,
    Var,
)

from .errors import InputError, UnknownNameError
from .expressions import (
    IMMEDIATES,
    VAR_TYPES,
    Dim,
    collect,
    collect_type,
    dtype_of,
    is_var,
    op_name,
    shape_of,
    type_vars,
    used_vars,
)

__all__ = [
    "Dim",
    "FunctionView",
    "dtype_of",
    "function_named",
    "is_var",
    "op_name",
    "shape_of",
    "type_vars",
    "used_vars",
    "views",
]

NoopTest: TypeAlias = "Callable[[FunctionView, Call], str | None]"


def function_named(mod: tvm.IRModule, function: GlobalVar | str) -> tuple[GlobalVar, Function]:
    """Look up a Relax function of `mod` by its GlobalVar or name.

    Raises
    ------
    UnknownNameError
        When no function has this name.
    InputError
        When the function is not a Relax function.
    """
    name = function if isinstance(function, str) else function.name_hint
    by_name = {gv.name_hint: gv for gv in mod.get_global_vars()}
    if name not in by_name:
        raise UnknownNameError("function", name, by_name)
    found = mod[by_name[name]]
    if not isinstance(found, Function):
        raise InputError(
            f"function {name!r} is a {type(found).__name__}; expected a Relax function"
        )
    return by_name[name], found


class FunctionView:
    """What defines and what reads each value of one scope, with aliases looked through.

    Built in one walk over the bindings. The view is a snapshot: build a new one after a rewrite.

    Parameters
    ----------
    mod : tvm.IRModule
        The module the function belongs to.
    function : GlobalVar or str
        The Relax function to view.
    is_noop : callable, optional
        Given the view and a call, returns why the call returns its first argument unchanged
        ("reshape"), or None. Such calls count as aliases too.

    Attributes
    ----------
    name : str
        The name of the function the scope belongs to.
    function : Function
        The innermost function around this scope: for the body of an If, the function it is in.
    seq : SeqExpr
        The scope itself.
    parent : FunctionView or None
        The scope that holds this one.
    owner : Binding or None
        The binding of `parent` whose value (If or Function) holds this scope.
    bindings : list of Binding
        Every binding of the scope in program order, of dataflow blocks and of others.
    children : list of FunctionView
        The scopes directly inside this one, in program order.

    Raises
    ------
    InputError
        When the module has no such Relax function.
    """

    def __init__(
        self, mod: tvm.IRModule, function: GlobalVar | str, is_noop: NoopTest | None = None
    ) -> None:
        gvar, func = function_named(mod, function)
        self._is_noop = is_noop
        self._setup(mod, gvar, func, func.body, func.params, None, None)

    def _setup(
        self,
        mod: tvm.IRModule,
        gvar: GlobalVar,
        function: Function,
        seq: SeqExpr,
        params: Any,
        parent: FunctionView | None,
        owner: Binding | None,
    ) -> None:
        self.mod = mod
        self.gvar = gvar
        self.name: str = gvar.name_hint
        self.function = function
        self.seq = seq
        self.params: list[Var] = list(params)
        self.parent = parent
        self.owner = owner
        self.bindings: list[Binding] = []
        self.children: list[FunctionView] = []
        self._block_of: list[int] = []
        self._dataflow: list[bool] = []
        self._index: dict[Var, int] = {}
        self._value: dict[Var, Expr] = {}
        self._alias: dict[Var, Expr] = {}
        self._why: dict[Var, str] = {}
        self._tuples: dict[Var, Tuple] = {}
        # Tuples that were put together again: names of the whole, whose fields have names too.
        self._again: dict[Var, Tuple] = {}
        self._reads: list[list[Var]] = []
        self._users: dict[Var, list[Binding]] | None = None
        self._outputs: set[Var] | None = None
        self._needed: set[Var] | None = None
        self._given_sizes: set[Var] | None = None
        self._whole: set[Var] = set()
        for block in seq.blocks[:]:
            self._dataflow.append(isinstance(block, DataflowBlock))
            for binding in block.bindings[:]:
                self._add(binding, len(self._dataflow) - 1)
        self._result = dict.fromkeys(used_vars(seq.body))

    def _add(self, binding: Binding, block: int) -> None:
        var, value = binding.var, binding.value
        self._index[var] = len(self.bindings)
        self.bindings.append(binding)
        self._block_of.append(block)
        self._value[var] = value
        kind = type(value)
        reads: dict[Var, None] = {}
        if type(binding) is MatchCast:
            collect(value, reads)
            collect_type(binding.ty, reads)
            source = self.resolve(value)
            if tvm_ffi.structural_equal(binding.ty, source.ty):
                self._set_alias(var, source, "match_cast")
            self._reads.append(list(reads))
            return
        if kind is If or kind is Function:
            self._add_children(binding, value, reads)
        else:
            collect(value, reads)
        self._reads.append(list(reads))
        if kind in VAR_TYPES:
            self._set_alias(var, self.resolve(value), "variable")
            self._keep_again(var, value)
        elif kind is GenericConst or kind in IMMEDIATES or kind is GlobalVar:
            self._set_alias(var, value, "constant")
        elif kind is TupleGetItem:
            field = self._field(value)
            if field is not None:
                self._set_alias(var, self.resolve(field), "tuple")
                self._keep_again(var, field)
        elif kind is Tuple:
            whole = self._rebuilt(value)
            if whole is not None:
                self._set_alias(var, whole, "tuple")
                self._again[var] = value
            else:
                self._tuples[var] = value
        elif kind is Call and self._is_noop is not None:
            why = self._is_noop(self, value)
            if why is not None:
                self._set_alias(var, self.resolve(value.args[0]), why)

    def _keep_again(self, var: Var, source: Expr) -> None:
        again = self._lookup("_again", source) if type(source) in VAR_TYPES else None
        if again is not None:
            self._again[var] = again

    def _set_alias(self, var: Var, target: Expr, why: str) -> None:
        self._alias[var] = target
        self._why[var] = why

    def _add_children(self, binding: Binding, value: Expr, reads: dict[Var, None]) -> None:
        parts: list[tuple[Function, SeqExpr, Any]]
        if type(value) is If:
            collect(value.cond, reads)
            parts = [
                (self.function, value.true_branch, ()),
                (self.function, value.false_branch, ()),
            ]
        else:
            parts = [(value, value.body, value.params)]
        for function, seq, params in parts:
            child = FunctionView.__new__(FunctionView)
            child._is_noop = self._is_noop
            child._setup(self.mod, self.gvar, function, seq, params, self, binding)
            self.children.append(child)
            reads.update(dict.fromkeys(child.free_vars()))

    def _lookup(self, table: str, var: Expr) -> Any:
        scope: FunctionView | None = self
        while scope is not None:
            found = getattr(scope, table).get(var)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def _find_tuple(self, expr: Expr) -> Tuple | None:
        if type(expr) is Tuple:
            return expr
        return self._lookup("_tuples", expr) if type(expr) in VAR_TYPES else None

    def _field(self, item: TupleGetItem) -> Expr | None:
        """Return what `(a, b)[0]` is, as written; None when the tuple is not built in sight."""
        source = item.tuple_value
        if type(source) is TupleGetItem:
            inner = self._field(source)
            if inner is None:
                return None
            source = inner
        built = self._lookup("_again", source) if type(source) in VAR_TYPES else None
        if built is None:
            built = self._find_tuple(self.resolve(source))
        if built is None or item.index >= len(built.fields):
            return None
        return built.fields[item.index]

    def _rebuilt(self, value: Tuple) -> Expr | None:
        """Return `t` for `(t[0], t[1])` that takes `t` apart and puts the same together."""
        fields = value.fields[:]
        if len(fields) == 0:
            return None
        source: Expr | None = None
        for i, field in enumerate(fields):
            field = self.resolve(field)
            item = field if type(field) is TupleGetItem else self.value(field)
            if type(item) is not TupleGetItem or item.index != i:
                return None
            whole = self.resolve(item.tuple_value)
            if source is not None and not whole.same_as(source):
                return None
            source = whole
        if source is None or not isinstance(source.ty, tvm.ir.TupleType):
            return None
        if len(source.ty.fields) != len(fields) or self._is_composite_result(source):
            return None
        return source

    def _is_composite_result(self, var: Expr) -> bool:
        """Whether a tuple is what an outlined region gives: none of the program's own tuples.

        The program's tuple of the same values stays, so that inlining finds it again.
        """
        call = self.value(var)
        if type(call) is not Call or type(call.op) is not GlobalVar:
            return False
        callee = self.mod.functions.get(call.op, None)
        return callee is not None and bool(callee.attrs) and "Composite" in callee.attrs

    # What a value is

    def resolve(self, expr: Expr) -> Expr:
        """Return the canonical expression of a value: a variable, a constant, or `expr` itself."""
        kind = type(expr)
        if kind in VAR_TYPES:
            scope: FunctionView | None = self
            while scope is not None:
                if expr in scope._alias:
                    return scope._alias[expr]
                scope = scope.parent
        elif kind is TupleGetItem:
            field = self._field(expr)
            if field is not None:
                return self.resolve(field)
        return expr

    def binding(self, expr: Expr) -> Binding | None:
        """Return the binding that makes this value, of this scope or of one around it."""
        var = self.resolve(expr)
        scope: FunctionView | None = self
        while scope is not None:
            position = scope._index.get(var) if type(var) in VAR_TYPES else None
            if position is not None:
                return scope.bindings[position]
            scope = scope.parent
        return None

    def value(self, expr: Expr) -> Expr:
        """Return the expression that computes a value, through aliases.

        A parameter, a constant, and the result of a match_cast that adds information are
        returned as they are: for a parameter and for a match_cast that is the variable.
        """
        found = self.resolve(expr)
        binding = self.binding(found)
        if binding is None or type(binding) is MatchCast:
            return found
        return binding.value

    def asserted(self, expr: Expr) -> Expr | None:
        """Return the tensor of which a match_cast asserts the shape, or None.

        The match_cast defines no symbolic size: its result is the same tensor or the run fails.
        """
        binding = self.binding(self.resolve(expr))
        if binding is None or type(binding) is not MatchCast:
            return None
        want, have = binding.ty, binding.value.ty
        if not isinstance(want, TensorType) or not isinstance(have, TensorType):
            return None
        sizes = getattr(want.shape, "values", None)
        if sizes is None or want.dtype != have.dtype or have.ndim != len(sizes):
            return None
        new = relax.analysis.definable_tir_vars_in_type(want)
        return self.resolve(binding.value) if all(v in self._given() for v in new) else None

    def _given(self) -> set[Var]:
        """Return the symbolic sizes that the parameters here and around here define."""
        if self._given_sizes is None:
            self._given_sizes = set(self.parent._given()) if self.parent is not None else set()
            for param in self.params:
                self._given_sizes.update(relax.analysis.definable_tir_vars_in_type(param.ty))
        return self._given_sizes

    def call(self, expr: Expr, *names: str) -> Call | None:
        """Return the call that computes `expr` if its operator is one of `names`, else None.

        Without names, any call to a built-in operator will do.
        """
        found = self.value(expr)
        name = op_name(found)
        return found if name and (not names or name in names) else None

    def constant(self, expr: Expr) -> np.ndarray | None:
        """Return the value of a constant, or None. bfloat16 and fp8 come as ml_dtypes arrays."""
        found = self.resolve(expr)
        if type(found) is GenericConst and hasattr(found.value, "numpy"):
            return found.value.numpy()
        return None

    def scalar(self, expr: Expr) -> float | int | None:
        """Return the number that a one-element constant or an immediate holds, or None."""
        found = self.resolve(expr)
        if isinstance(found, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
            return found.value
        array = self.constant(found)
        if array is None or array.size != 1:
            return None
        item = array.reshape(()).item()
        return item if isinstance(item, (int, float)) else float(item)

    def fields(self, expr: Expr) -> list[Expr] | None:
        """Return the resolved fields of a tuple that is built in sight, or None."""
        built = self._find_tuple(self.resolve(expr))
        return None if built is None else [self.resolve(f) for f in built.fields[:]]

    def shape(self, expr: Expr) -> tuple[Dim, ...] | None:
        """Return the sizes of a tensor: ints, and expressions for symbolic sizes; None if unknown.

        Where an alias carries a vaguer type than the value itself, the value's is used.
        """
        found = shape_of(self.resolve(expr))
        return shape_of(expr) if found is None else found

    def dtype(self, expr: Expr) -> str | None:
        """Return the element type of a tensor or scalar as text ("float16"), or None."""
        found = dtype_of(self.resolve(expr))
        return dtype_of(expr) if found is None else found

    # Where a value is, and who reads it

    def index(self, expr: Expr) -> int:
        """Return the position in `bindings` of the binding that makes this value, or -1."""
        var = self.resolve(expr)
        return self._index.get(var, -1) if type(var) in VAR_TYPES else -1

    def position(self, var: Var) -> int:
        """Return the position of the binding of `var` itself, aliases not looked through, or -1."""
        return self._index.get(var, -1)

    def is_alias(self, var: Var) -> bool:
        """Whether `var` is just another name for a value."""
        return var in self._alias

    def alias_kind(self, var: Var) -> str:
        """Return what makes `var` an alias ("variable", "tuple", ...), or ""."""
        return self._why.get(var, "")

    def is_unread_tuple(self, var: Var) -> bool:
        """Whether `var` is a tuple built here that nothing reads as a whole."""
        if self._users is None:
            self._find_users()
        return var in self._tuples and var not in self._whole

    def block(self, position: int) -> int:
        """Return the number of the block that holds the binding at `position`."""
        return self._block_of[position]

    def in_dataflow(self, position: int) -> bool:
        """Whether the binding at `position` is inside a dataflow block."""
        return self._dataflow[self._block_of[position]]

    def reads(self, position: int) -> list[Var]:
        """Return the variables a binding reads, as written; symbolic sizes among them."""
        return self._reads[position]

    def users(self, expr: Expr) -> list[Binding]:
        """Return the bindings of this scope that compute with a value, in program order.

        Uses through aliases count, alias bindings themselves do not. A tuple counts as a user
        only if it is read as a whole. An If or a local function that reads the value inside
        counts as one user.
        """
        if self._users is None:
            self._find_users()
        assert self._users is not None
        return self._users.get(self.resolve(expr), [])

    def result_vars(self) -> list[Var]:
        """Return the variables, aliases looked through, that the scope's result is made of."""
        found = dict.fromkeys(self.resolve(v) for v in self._result)
        return [v for v in found if type(v) in VAR_TYPES]

    def is_output(self, expr: Expr) -> bool:
        """Whether the scope returns this value, alone or inside a tuple."""
        if self._outputs is None:
            self._find_users()
        assert self._outputs is not None
        return self.resolve(expr) in self._outputs

    def is_needed(self, expr: Expr) -> bool:
        """Whether the scope's result depends on a value, through however many bindings."""
        if self._needed is None:
            needed: set[Var] = set()
            for binding in reversed(self.bindings):
                var = binding.var
                if self.is_output(var) or any(u.var in needed for u in self.users(var)):
                    needed.add(var)
            self._needed = needed
        found = self.resolve(expr)
        return found in self._needed or self.is_output(found)

    def _find_users(self) -> None:
        self._outputs = set()
        pending: list[Expr] = [self.resolve(v) for v in self._result]
        while pending:
            var = pending.pop()
            if type(var) not in VAR_TYPES or var in self._outputs:
                continue
            self._outputs.add(var)
            built = self._tuples.get(var)
            if built is not None:
                pending.extend(self.resolve(f) for f in built.fields[:])
        # A tuple that is only taken apart again is no use of its fields, so tuples wait until
        # something reads them whole; uses come after definitions, hence the backward walk.
        whole: set[Var] = {v for v in self._outputs if v in self._tuples}
        users: dict[Var, list[Binding]] = {}
        for i in range(len(self.bindings) - 1, -1, -1):
            binding = self.bindings[i]
            var = binding.var
            if var in self._alias or (var in self._tuples and var not in whole):
                continue
            for read in {self.resolve(v): None for v in self._reads[i]}:
                if type(read) in VAR_TYPES:
                    users.setdefault(read, []).append(binding)
                    if read in self._tuples:
                        whole.add(read)
        for found in users.values():
            found.reverse()
        self._users = users
        self._whole = whole

    def free_vars(self) -> list[Var]:
        """Return the values this scope reads and does not define, symbolic sizes included.

        Aliases are looked through: the variables are those that `resolve` gives.
        """
        found: dict[Var, None] = {}
        bound: set[Var] = set(self._index)
        if self.parent is None or self.function is not self.parent.function:
            bound.update(self.params)
            for param in self.params:
                bound.update(relax.analysis.definable_tir_vars_in_type(param.ty))
        for i, binding in enumerate(self.bindings):
            if binding.var in self._alias or self.is_unread_tuple(binding.var):
                continue
            for var in self._reads[i]:
                found[self.resolve(var)] = None
            if type(binding) is MatchCast:
                bound.update(relax.analysis.definable_tir_vars_in_type(binding.ty))
            else:
                collect_type(binding.var.ty, found)
        for var in self._result:
            found[self.resolve(var)] = None
        return [v for v in found if type(v) in VAR_TYPES and v not in bound]

    def scopes(self) -> Iterator[FunctionView]:
        """Yield this scope and every scope inside it, outermost first."""
        yield self
        for child in self.children:
            yield from child.scopes()

    def __repr__(self) -> str:
        inside = f" inside {self.owner.var.name}" if self.owner is not None else ""
        return f"FunctionView({self.name}{inside}, {len(self.bindings)} bindings)"


def views(mod: tvm.IRModule) -> Iterator[FunctionView]:
    """Yield a view of every scope of every Relax function: bodies, If branches, local functions."""
    for gvar, func in mod.functions.items():
        if isinstance(func, Function) and isinstance(func.body, SeqExpr):
            yield from FunctionView(mod, gvar).scopes()
