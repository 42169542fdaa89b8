"""Graphs with a product in them: spellings that are GEMMs, and near misses.

`Case.build(g, *params)` writes the graph; "n", "b" and "k" in shapes are symbolic sizes. The same
cases are executed by the tests of every implementation of GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op as O
from tvm.script import relax as R

SIZES = {"n": 5, "b": 2, "k": 24}
F = "float"  # stands for the dtype that a test asks for


class Graph:
    """What the builders of cases write to."""

    def __init__(self, bb: relax.BlockBuilder, dtype: str) -> None:
        self.bb, self.dtype = bb, dtype

    def __call__(self, expr: relax.Expr) -> relax.Var:
        return self.bb.emit(expr)

    def number(self, value: float, dtype: str | None = None) -> relax.Expr:
        return relax.const(value, dtype or self.dtype)


@dataclass
class Case:
    """One graph.

    `attrs` is what the region's attributes must contain, `bindings` how many variables it has;
    `refused` is a part of the reason that must be given (with `attrs` None: no region at all).
    """

    name: str
    params: list[tuple[Any, ...]]
    build: Callable[..., Any]
    attrs: dict[str, Any] | None = None
    steps: list[Any] = field(default_factory=list)
    bindings: int | None = None
    refused: str = ""
    roles: dict[str, int] = field(default_factory=dict)  # role -> parameter

    def module(self, dtype: str = "float32") -> tvm.IRModule:
        """Return the module for a dtype."""
        bb = relax.BlockBuilder()
        sizes: dict[str, Any] = {}

        def dim(size: int | str) -> Any:
            if isinstance(size, str):
                return sizes.setdefault(size, tvm.tirx.Var(size, "int64"))
            return size

        params = []
        for i, (shape, *rest) in enumerate(self.params):
            kind = rest[0] if rest else F
            kind = dtype if kind == F else kind
            if isinstance(shape, int):
                ty = R.Tensor(ndim=shape, dtype=kind)
            else:
                ty = R.Tensor([dim(d) for d in shape], kind)
            params.append(relax.Var(f"p{i}", ty))
        with bb.function("main", params):
            with bb.dataflow():
                result = self.build(Graph(bb, dtype), *params)
                several = isinstance(result, tuple)
                outputs = [bb.emit_output(o) for o in (result if several else (result,))]
            bb.emit_func_output(relax.Tuple(outputs) if several else outputs[0])
        return bb.get()

    def shapes(self, sizes: dict[str, int] | None = None) -> list[tuple[int, ...]]:
        """Return the parameters' shapes for given sizes."""
        sizes = {**SIZES, **(sizes or {})}
        return [
            tuple(sizes[d] if isinstance(d, str) else d for d in shape) for shape, *_ in self.params
        ]

    def arrays(self, seed: int = 0, sizes: dict[str, int] | None = None) -> list[np.ndarray]:
        """Return random inputs in float64, scaled so that sums stay near one."""
        generator = np.random.default_rng(seed)
        return [generator.normal(size=s) * 0.5 for s in self.shapes(sizes)]


def _t(w: Any, *axes: int) -> relax.Expr:
    return O.permute_dims(w, list(axes) or None)


X, W, B = ((("n", 24),),), (((16, 24),),), (((16,),),)  # rows, weight (N, K), bias
XW = [*X, *W]


def _linear(g: Graph, x: Any, w: Any) -> Any:
    return g(O.matmul(x, g(_t(w, 1, 0))))


def _erf_gelu(g: Graph, x: Any) -> Any:
    e = g(O.erf(g(O.multiply(x, g.number(1 / math.sqrt(2))))))
    half = g(O.multiply(g.number(0.5), x))
    return g(O.multiply(half, g(O.add(e, g.number(1.0)))))


def _tanh_gelu(g: Graph, x: Any) -> Any:
    cube = g(O.multiply(g(O.multiply(x, x)), x))
    inner = g(O.add(x, g(O.multiply(cube, g.number(0.044715)))))
    t = g(O.tanh(g(O.multiply(inner, g.number(math.sqrt(2 / math.pi))))))
    return g(O.multiply(g(O.multiply(x, g.number(0.5))), g(O.add(g.number(1.0), t))))


def _tanh_gelu_power(g: Graph, x: Any) -> Any:
    cube = g(O.power(x, g.number(3.0)))
    inner = g(O.add(g(O.multiply(g.number(0.044715), cube)), x))
    t = g(O.tanh(g(O.multiply(g.number(0.7978845608028654), inner))))
    return g(O.multiply(g(O.divide(x, g.number(2.0))), g(O.add(t, g.number(1.0)))))


def _after(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, x, w, *more: function(g, _linear(g, x, w), *more)


def _identity_permute(g: Graph, x: Any, w: Any) -> Any:
    return g(O.matmul(x, g(_t(w, 0, 1))))


def _aliases(g: Graph, x: Any, w: Any, b: Any) -> Any:
    m = g(O.matmul(x, g(_t(w, 1, 0))))
    a = g(O.add(g(m), b))
    return g(O.nn.relu(g(g(a))))


def _importer(g: Graph, x: Any, w: Any, b: Any) -> Any:
    n = x.ty.shape.values[1]
    flat = g(O.reshape(x, (2 * n, 24)))
    m = g(O.matmul(flat, g(_t(w, 1, 0))))
    back = g(O.reshape(m, (2, n, 16)))
    return g(O.nn.silu(g(O.add(back, b))))


def _addmm(g: Graph, x: Any, w: Any, b: Any, r: Any) -> Any:
    n = x.ty.shape.values[1]
    flat = g(O.reshape(x, (2 * n, 24)))
    m = g(O.add(b, g(O.matmul(flat, g(_t(w, 1, 0))))))
    return g(O.add(r, g(O.reshape(m, (2, n, 16)))))


def _vector(g: Graph, x: Any, w: Any) -> Any:
    row = g(O.expand_dims(x, 0))
    m = g(O.matmul(row, g(_t(w, 1, 0))))
    return g(O.sigmoid(g(O.squeeze(m, [0]))))


def _broadcast_weight(g: Graph, x: Any, w: Any) -> Any:
    wide = g(O.broadcast_to(g(O.expand_dims(g(_t(w, 1, 0)), 0)), (3, 24, 16)))
    return g(O.matmul(x, wide))


def _broadcast_bias(g: Graph, x: Any, w: Any, b: Any) -> Any:
    m = _linear(g, x, w)
    return g(O.add(m, g(O.broadcast_to(g(O.reshape(b, (1, 16))), m.ty.shape))))


def _sum_of_products(g: Graph, x: Any, w: Any, y: Any, v: Any) -> Any:
    return g(O.nn.relu(g(O.add(_linear(g, x, w), _linear(g, y, v)))))


def _swiglu(g: Graph, x: Any, gate: Any, up: Any) -> Any:
    return g(O.multiply(g(O.nn.silu(_linear(g, x, gate))), _linear(g, x, up)))


def _silu_wide(g: Graph, m: Any) -> Any:
    wide = g(O.astype(m, "float32"))
    return g(O.astype(g(O.multiply(g(O.sigmoid(wide)), wide)), g.dtype))


def _diamond(g: Graph, x: Any, w: Any) -> Any:
    m = _linear(g, x, w)
    return g(O.add(m, g(O.tanh(g(O.nn.relu(m))))))


NK = {"rhs_layout": "NK", "lhs_layout": "MK"}
KN = {"rhs_layout": "KN", "lhs_layout": "MK"}

ACCEPTED = [
    Case("plain", [*X, ((24, 16),)], lambda g, x, w: g(O.matmul(x, w)), KN, [], 1),
    Case("transposed", XW, _linear, NK, [], 2, roles={"lhs": 0, "rhs": 1}),
    Case("transposed_default_axes", XW, lambda g, x, w: g(O.matmul(x, g(_t(w)))), NK, [], 2),
    Case(
        "two_transposes",
        [*X, ((24, 16),)],
        lambda g, x, w: g(O.matmul(x, g(_t(g(_t(w)))))),
        KN,
        [],
        3,
    ),
    Case("identity_permute", [*X, ((24, 16),)], _identity_permute, KN, [], 2),
    Case(
        "transposed_lhs",
        [((24, "n"),), ((24, 16),)],
        lambda g, x, w: g(O.matmul(g(_t(x)), w)),
        {"lhs_layout": "KM", "rhs_layout": "KN"},
        [],
        2,
    ),
    Case("rows_3d", [(("b", "n", 24),), *W], _linear, NK, [], 2),
    Case("vector", [((24,),), ((24, 16),)], lambda g, x, w: g(O.matmul(x, w)), KN, [], 1),
    Case("vector_expanded", [((24,),), *W], _vector, NK, ["sigmoid"], 5),
    Case(
        "batched",
        [(("b", "n", 24),), (("b", 24, 16),)],
        lambda g, x, w: g(O.matmul(x, w)),
        KN,
        [],
        1,
    ),
    Case(
        "batched_transposed",
        [(("b", 4, "n", 24),), (("b", 4, 7, 24),)],
        lambda g, x, w: g(O.matmul(x, g(_t(w, 0, 1, 3, 2)))),
        NK,
        [],
        2,
    ),
    Case(
        "batch_axes_moved",
        [((4, "n", 24),), ((7, 4, 24),)],
        lambda g, x, w: g(O.matmul(x, g(_t(w, 1, 2, 0)))),
        KN,
        [],
        1,
    ),
    Case(
        "lora",
        [((1, "n", 24),), ((24, 8),)],
        lambda g, x, w: g(O.tanh(g(O.matmul(x, w)))),
        KN,
        ["tanh"],
        2,
    ),
    Case(
        "batch_of_low_rank",
        [((5, "n", 8),), ((5, 8, 24),)],
        lambda g, x, w: g(O.matmul(x, w)),
        KN,
        [],
        1,
    ),
    Case(
        "one_matrix_in_front",
        [((1, "n", 24),), ((5, 24, 8),)],
        lambda g, x, w: g(O.matmul(x, w)),
        KN,
        [],
        1,
    ),
    Case(
        "symbolic_k",
        [(("b", "n", "k"),), (("b", "k", 16),)],
        lambda g, x, w: g(O.matmul(x, w)),
        KN,
        [],
        1,
    ),
    Case(
        "square",
        [((24, 24),)],
        lambda g, x: g(O.matmul(x, x)),
        KN,
        [],
        1,
        roles={"lhs": 0, "rhs": 0},
    ),
    Case("gram", [(("n", 24),)], lambda g, x: g(O.matmul(x, g(_t(x)))), NK, [], 2),
    Case(
        "weight_in_steps",
        [*X, ((16, 1, 24),)],
        lambda g, x, w: g(O.matmul(x, g(_t(g(O.squeeze(w, [1])))))),
        NK,
        [],
        2,
    ),
    Case("broadcast_weight", [((3, "n", 24),), *W], _broadcast_weight, NK, [], 4),
    Case("bias", [*XW, *B], _after(lambda g, m, b: g(O.add(m, b))), NK, ["bias"], 3),
    Case("bias_left", [*XW, *B], _after(lambda g, m, b: g(O.add(b, m))), NK, ["bias"], 3),
    Case("bias_row", [*XW, ((1, 16),)], _after(lambda g, m, b: g(O.add(m, b))), NK, ["bias"], 3),
    Case("bias_broadcast", [*XW, *B], _broadcast_bias, NK, ["bias"], 5, roles={"epi0": 2}),
    Case(
        "bias_of_one_column",
        [*X, ((1, 24),), ((1,),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        ["bias"],
        3,
    ),
    Case(
        "bias_is_lhs",
        [((16,),), ((16, 16),)],
        lambda g, x, w: g(O.add(g(O.matmul(x, w)), x)),
        KN,
        ["bias"],
        2,
        roles={"lhs": 0, "epi0": 0},
    ),
    Case(
        "residual", [*XW, (("n", 16),)], _after(lambda g, m, r: g(O.add(r, m))), NK, ["residual"], 3
    ),
    Case(
        "residual_is_lhs",
        [(("n", 16),), ((16, 16),)],
        lambda g, x, w: g(O.add(g(O.matmul(x, w)), x)),
        KN,
        ["residual"],
        2,
        roles={"lhs": 0, "epi0": 0},
    ),
    Case(
        "residual_one_row",
        [((1, 24),), *W, ((1, 16),)],
        _after(lambda g, m, r: g(O.add(m, r))),
        NK,
        ["residual"],
        3,
    ),
    Case(
        "multiply",
        [*XW, (("n", 16),)],
        _after(lambda g, m, r: g(O.multiply(r, m))),
        NK,
        ["multiply"],
        3,
    ),
    Case(
        "bias_residual_relu",
        [*XW, *B, (("n", 16),)],
        _after(lambda g, m, b, r: g(O.nn.relu(g(O.add(r, g(O.add(m, b))))))),
        NK,
        ["bias", "residual", "relu"],
        5,
    ),
    Case("relu_maximum", XW, _after(lambda g, m: g(O.maximum(m, g.number(0.0)))), NK, ["relu"], 3),
    Case(
        "relu_squared",
        XW,
        _after(lambda g, m: g(O.square(g(O.nn.relu(m))))),
        NK,
        ["relu_squared"],
        4,
    ),
    Case(
        "relu_times_relu",
        XW,
        _after(lambda g, m: (lambda r: g(O.multiply(r, r)))(g(O.nn.relu(m)))),
        NK,
        ["relu_squared"],
        4,
    ),
    Case(
        "relu_power",
        XW,
        _after(lambda g, m: g(O.power(g(O.nn.relu(m)), g.number(2.0)))),
        NK,
        ["relu_squared"],
        4,
    ),
    Case(
        "gelu",
        [*XW, *B],
        _after(lambda g, m, b: g(O.nn.gelu(g(O.add(m, b))))),
        NK,
        ["bias", "gelu_erf"],
        4,
    ),
    Case("gelu_op_tanh", XW, _after(lambda g, m: g(O.nn.gelu_tanh(m))), NK, ["gelu_tanh"], 3),
    Case(
        "gelu_spelled",
        [*XW, *B],
        _after(lambda g, m, b: _erf_gelu(g, g(O.add(m, b)))),
        NK,
        ["bias", "gelu_erf"],
        8,
    ),
    Case("gelu_tanh_spelled", XW, _after(_tanh_gelu), NK, ["gelu_tanh"], 11),
    Case("gelu_tanh_power", XW, _after(_tanh_gelu_power), NK, ["gelu_tanh"], 10),
    Case("silu", XW, _after(lambda g, m: g(O.nn.silu(m))), NK, ["silu"], 3),
    Case(
        "silu_spelled", XW, _after(lambda g, m: g(O.multiply(g(O.sigmoid(m)), m))), NK, ["silu"], 4
    ),
    Case(
        "silu_divided",
        XW,
        _after(lambda g, m: g(O.divide(m, g(O.add(g(O.exp(g(O.negative(m)))), g.number(1.0)))))),
        NK,
        ["silu"],
        6,
    ),
    Case("scale", XW, _after(lambda g, m: g(O.multiply(m, g.number(0.125)))), NK, ["scale"], 3),
    Case(
        "scale_divided",
        XW,
        _after(lambda g, m: g(O.divide(m, g.number(8.0)))),
        NK,
        [{"op": "scale", "value": 0.125}],
        3,
    ),
    Case(
        "doubled", XW, _after(lambda g, m: g(O.add(m, m))), NK, [{"op": "scale", "value": 2.0}], 3
    ),
    Case(
        "cast",
        XW,
        _after(lambda g, m: g(O.astype(m, "float16"))),
        {**NK, "out_dtype": "float16"},
        [{"op": "cast", "dtype": "float16"}],
        3,
    ),
    Case("aliases", [*XW, *B], _aliases, NK, ["bias", "relu"]),
    Case(
        "importer",
        [((2, "n", 24),), *W, *B],
        _importer,
        NK,
        ["bias", "silu"],
        6,
        roles={"lhs": 0, "rhs": 1, "epi0": 2},
    ),
    Case(
        "addmm",
        [((2, "n", 24),), *W, *B, ((2, "n", 16),)],
        _addmm,
        NK,
        ["bias", "residual"],
        6,
        roles={"lhs": 0, "epi0": 2, "epi1": 3},
    ),
    Case("diamond", XW, _diamond, NK, [], 2),
    Case(
        "two_outputs",
        [*XW, *B],
        _after(lambda g, m, b: (lambda s: (s, g(O.nn.relu(s))))(g(O.add(m, b)))),
        NK,
        ["bias"],
        3,
    ),
    Case(
        "batch_expression",
        [(((4, 2, "n", 24),)), ((4, 2, 24, 8),)],
        lambda g, x, w: g(O.matmul(x, w)),
        KN,
        [],
        1,
    ),
]

NEAR_MISSES = [
    Case(
        "unknown_shape",
        [(2,), ((24, 16),)],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="shape of an operand is not known",
    ),
    Case(
        "vector_right",
        [*X, ((24,),)],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="right operand is a vector",
    ),
    Case(
        "int8_sums_in_int8",
        [(("n", 24), "int8"), ((24, 16), "int8")],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="int8 operands with sums in int8",
    ),
    Case(
        "half_to_double",
        [(("n", 24), "float16"), ((24, 16), "float16")],
        lambda g, x, w: g(O.matmul(x, w, out_dtype="float64")),
        None,
        refused="float16 operands with sums in float64",
    ),
    Case(
        "integers",
        [(("n", 24), "int32"), ((24, 16), "int32")],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="no GEMM for int32",
    ),
    Case(
        "both_broadcast",
        [((2, 1, 5, 24),), ((1, 3, 24, 16),)],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="broadcast against each other",
    ),
    Case(
        "ranks_differ",
        [((2, 3, 5, 24),), ((3, 24, 16),)],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="broadcast against each other",
    ),
    Case(
        "vector_times_batch",
        [((24,),), ((3, 24, 16),)],
        lambda g, x, w: g(O.matmul(x, w)),
        None,
        refused="vector times a batch",
    ),
    Case(
        "scalar_bias",
        [*XW, ((),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="one number for all columns",
    ),
    Case(
        "bias_of_one",
        [*XW, ((1,),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="one number for all columns",
    ),
    Case(
        "widening_bias",
        [((1, 24),), *W, ((7, 16),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="changes its shape",
    ),
    Case(
        "deeper_bias",
        [*XW, ((1, 1, 16),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="changes its shape",
    ),
    Case(
        "column_bias",
        [((16, 24),), *W, ((16, 1),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="the columns differ",
    ),
    Case(
        "bias_per_matrix",
        [(("b", "n", 24),), *W, (("b", 1, 16),)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="neither one row nor",
    ),
    Case(
        "bias_without_shape",
        [*XW, (1,)],
        _after(lambda g, m, b: g(O.add(m, b))),
        NK,
        [],
        2,
        refused="changes its shape",
    ),
    Case(
        "multiplied_by_row",
        [*XW, *B],
        _after(lambda g, m, b: g(O.multiply(m, b))),
        NK,
        [],
        2,
        refused="not of its own shape",
    ),
    Case(
        "quick_gelu",
        XW,
        _after(lambda g, m: g(O.multiply(m, g(O.sigmoid(g(O.multiply(m, g.number(1.702)))))))),
        NK,
        [],
        2,
    ),
    Case("shifted", XW, _after(lambda g, m: g(O.add(m, g.number(1.0)))), NK, [], 2),
    Case("square_of_product", XW, _after(lambda g, m: g(O.multiply(m, m))), NK, [], 2),
    Case("softmax_after", XW, _after(lambda g, m: g(O.nn.softmax(m))), NK, [], 2),
]

# Two products in one graph: the regions in program order, as (number of bindings, steps).
PAIRS = [
    (Case("sum_of_products", [*XW, *XW], _sum_of_products), [(2, []), (4, ["residual", "relu"])]),
    (Case("swiglu", [*XW, *W], _swiglu), [(3, ["silu"]), (3, ["multiply"])]),
]
