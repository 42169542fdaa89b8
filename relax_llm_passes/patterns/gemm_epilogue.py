"""Grow the epilogue of a GEMM: what happens to the product before anything else reads it.

Accepted, in any order and number: a vector per column (bias), a tensor of the product's own shape
(added: residual; multiplied), one-argument functions in whatever spelling (see `scalar_function`),
scaling by a constant, casts between floats, and the reshape back of importers. The epilogue ends at
the first value that something else reads too, that is an output, or that another GEMM has claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from ..report import Refusal
from .gemm_operands import Operand
from .scalar_function import grow_scalar_graph, name_function
from .shapes import dims, dtype_of, is_one, same_dim, same_dims

__all__ = ["Epilogue", "grow_epilogue"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze")


@dataclass
class Epilogue:
    """The steps after a product.

    Attributes
    ----------
    result : relax.Var
        The value after the last step.
    steps : list[dict]
        As in the composite's `epilogue` attribute; operands are called epi0, epi1, ...
    operands : dict[str, relax.Expr]
        Operand name to variable or constant.
    variables : list[relax.Var]
        Variables of all bindings absorbed after the product.
    paths : list[list[relax.Var]]
        Bindings between an operand and its step (views of a bias vector), nearest first.
    rows : Operand or None
        The form of the left operand whose leading axes are those of `result`, when a view was
        absorbed.
    refusals : list[Refusal]
        Near misses: steps that look like an epilogue and are none.
    """

    result: relax.Var
    steps: list[dict[str, Any]] = field(default_factory=list)
    operands: dict[str, relax.Expr] = field(default_factory=dict)
    variables: list[relax.Var] = field(default_factory=list)
    paths: list[list[relax.Var]] = field(default_factory=list)
    rows: Operand | None = None
    refusals: list[Refusal] = field(default_factory=list)

    def operand(self, expr: relax.Expr) -> str:
        """Name a new operand."""
        name = f"epi{len(self.operands)}"
        self.operands[name] = expr
        return name


def _vector_root(view: Any, expr: relax.Expr, usable: Any) -> tuple[Any, list[relax.Var]] | None:
    """Return the 1-D tensor that `expr` is a view of, and the bindings in between."""
    path: list[relax.Var] = []
    root = view.resolve(expr)
    for _ in range(4):
        shape = dims(root)
        if shape is None:
            return None
        if len(shape) == 1:
            return root, path
        call = view.value(root)
        name = getattr(getattr(call, "op", None), "name", "")
        if not isinstance(root, relax.Var) or name not in (*_VIEWS, "relax.broadcast_to"):
            return None
        before = dims(call.args[0])
        if not before or not same_dim(before[-1], shape[-1]):
            return None
        if not all(is_one(d) for d in before[:-1]):
            return None
        path.append(root)
        root = view.resolve(call.args[0])
        if not usable(root):
            return None
    return None


def _shape_text(shape: Sequence[Any]) -> str:
    return "(" + ", ".join(str(getattr(d, "value", d)) for d in shape) + ")"


def _added_operand(
    view: Any, state: Epilogue, other: relax.Expr, usable: Any
) -> tuple[str, Any, list[relax.Var]] | str:
    """Return (step, operand, path) for `current + other`, or the reason against it."""
    current, shape = dims(state.result), dims(other)
    if current is None or shape is None:
        return "an operand of unknown shape is added to the product"
    columns = current[-1]
    vector = _vector_root(view, other, usable)
    if vector is not None:
        length = dims(vector[0])
        assert length is not None
        if same_dim(length[0], columns) and len(shape) <= len(current):
            return "bias", vector[0], vector[1]
    if same_dims(shape, current):
        return "residual", view.resolve(other), []
    text = _shape_text(shape)
    if not shape or all(is_one(d) for d in shape):
        return f"{text} is added: one number for all columns, not a bias of N"
    if not same_dim(shape[-1], columns):
        return f"{text} is added to {_shape_text(current)}: the columns differ"
    if len(shape) <= len(current) and all(is_one(d) for d in shape[:-1]):
        return "bias", view.resolve(other), []
    return f"{text} is added to {_shape_text(current)}: neither one row nor the product's shape"


def _binary(view: Any, state: Epilogue, binding: Any, usable: Any) -> bool:
    """Absorb `result op other`; return whether it was."""
    call = binding.value
    name = call.op.name
    sides = [view.resolve(a) for a in call.args]
    mine = [i for i, s in enumerate(sides) if isinstance(s, relax.Var) and s.same_as(state.result)]
    if len(mine) != 1:
        return False
    other = call.args[1 - mine[0]]
    current, after = dims(state.result), dims(binding.var)

    def refuse(reason: str) -> bool:
        state.refusals.append(Refusal(reason, "gemm", view.name, binding.var.name))
        return False

    if current is None or after is None or not same_dims(current, after):
        return refuse("the step after the product changes its shape (a bias that widens it)")
    if dtype_of(other) != dtype_of(state.result):
        return refuse("the operand of the step after the product has another dtype")
    if name == "relax.multiply":
        shape = dims(other)
        if shape is None or not same_dims(shape, current):
            return refuse("the product is multiplied by a tensor that is not of its own shape")
        step, operand = "multiply", view.resolve(other)
        path: list[relax.Var] = []
    else:
        answer = _added_operand(view, state, other, usable)
        if isinstance(answer, str):
            return refuse(answer)
        step, operand, path = answer
    state.steps.append({"op": step, "operand": state.operand(operand)})
    state.variables.append(binding.var)
    if path:
        state.paths.append(path)
    state.result = binding.var
    return True


def _view(view: Any, state: Epilogue, binding: Any, rows: Sequence[Operand]) -> bool:
    """Absorb a reshape that gives the result the leading axes of a form of the left operand."""
    after, current = dims(binding.var), dims(state.result)
    if not after or not current or not same_dim(after[-1], current[-1]):
        return False
    if any(s["op"] in ("residual", "multiply") for s in state.steps):
        return False
    for form in rows:
        shape = dims(form.root)
        if shape and same_dims(shape[:-1], after[:-1]):
            state.rows = form
            state.variables.append(binding.var)
            state.result = binding.var
            return True
    return False


def _unary(view: Any, state: Epilogue, claimed: Any) -> bool:
    graph = grow_scalar_graph(view, state.result)
    if graph is None or any(claimed(v) for v in graph.variables):
        return False
    step = name_function(view, graph)
    if step is None:
        return False
    if step["op"] == "square":
        if not state.steps or state.steps[-1]["op"] != "relu":
            return False
        state.steps[-1] = {"op": "relu_squared"}
    elif step["op"] == "cast":
        if step["dtype"] not in _FLOATS or dtype_of(state.result) not in _FLOATS:
            return False
        if step["dtype"] != dtype_of(state.result):
            state.steps.append(step)
    elif step["op"] != "identity":
        state.steps.append(step)
    state.variables.extend(graph.variables)
    state.result = graph.result
    return True


def grow_epilogue(
    view: Any, product: relax.Var, rows: Sequence[Operand], usable: Any, claimed: Any
) -> Epilogue:
    """Return the epilogue of `product`.

    Parameters
    ----------
    view : FunctionView
        The function.
    product : relax.Var
        The matmul's result.
    rows : Sequence[Operand]
        Forms of the left operand with other leading axes; empty when the right operand is batched.
    usable : Callable[[relax.Expr], bool]
        Whether a variable may be read where the matmul is.
    claimed : Callable[[relax.Var], bool]
        Whether a binding belongs to another region already.
    """
    state = Epilogue(product)
    while not view.is_output(state.result):
        if dtype_of(state.result) not in _FLOATS:
            break
        if _unary(view, state, claimed):
            continue
        users = view.users(state.result)
        if len(users) != 1 or claimed(users[0].var):
            break
        call = users[0].value
        name = getattr(getattr(call, "op", None), "name", "")
        if name in ("relax.add", "relax.multiply"):
            absorbed = _binary(view, state, users[0], usable)
        elif name in _VIEWS:
            absorbed = _view(view, state, users[0], rows)
        else:
            absorbed = False
        if not absorbed:
            break
    return state
