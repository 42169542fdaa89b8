"""The norms, softmaxes and plain reductions as row programs.

Mean and variance are taken in two passes over values held in registers: first a mean m, then
d = x - m, whose own mean delta repairs the rounding of m, and variance = mean(d*d) - delta**2
(Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983). With a mean of
1e4 and a spread of 1 the float32 result is then as exact as for a mean of 0; E[x*x] - E[x]**2, the
one-pass form, has no correct digit left there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from .norm_math import Functions
from .norm_program import (
    Axis,
    Load,
    Operand,
    RowProgram,
    Stage,
    Store,
    Tensor,
    build_domain,
    row_major,
)

__all__ = [
    "Extra",
    "NormSpec",
    "accumulator",
    "axis_domain",
    "count_of",
    "group_domain",
    "norm_program",
    "reduction_program",
    "softmax_program",
]


@dataclass(frozen=True)
class Extra:
    """A tensor that the epilogue of a norm reads at each element."""

    tensor: Tensor
    strides: tuple[Any, ...]


@dataclass
class NormSpec:
    """A normalisation over the reduced axes of a domain.

    Attributes
    ----------
    axes : list[Axis]
        Domain axes in the memory order of the input.
    data : Extra
        The input.
    weight, bias : Extra, optional
        Scale and shift.
    out : Extra
        The result.
    epsilon : float
        Added to the variance (or the mean square).
    center : bool
        Subtract the mean (False: RMS norm).
    extras : list[Extra]
        Further tensors for `epilogue`.
    epilogue : callable, optional
        (normalised value, extras' values, the bonus sum or None) -> stored value.
    before : callable, optional
        Loaded value -> value that is normalised.
    bonus : list[Extra]
        Tensors whose product is summed over the row beside the statistics.
    """

    axes: list[Axis]
    data: Extra
    out: Extra
    epsilon: float
    weight: Extra | None = None
    bias: Extra | None = None
    center: bool = True
    extras: list[Extra] = field(default_factory=list)
    epilogue: Callable[[Any, list[Any], Any], Any] | None = None
    before: Callable[[Any], Any] | None = None
    bonus: list[Extra] = field(default_factory=list)
    name: str = "norm"


def accumulator(dtype: str) -> str:
    """Return the dtype in which sums over `dtype` are taken."""
    return "float64" if dtype == "float64" else "float32"


def axis_domain(shape: Sequence[Any], reduced: Sequence[int]) -> list[Axis]:
    """Return the domain of a reduction over `reduced` axes of a tensor."""
    return [Axis(e, i in reduced) for i, e in enumerate(shape)]


def group_domain(
    shape: Sequence[Any], channel_axis: int, axes: Sequence[int], groups: int
) -> list[Axis]:
    """Return group_norm's domain: the channel axis becomes (groups, channels of a group)."""
    out = []
    for i, e in enumerate(shape):
        if i == channel_axis:
            out += [Axis(groups, False), Axis(e // groups, True)]
        else:
            out.append(Axis(e, i in axes))
    return out


def count_of(length: Any, acc: str) -> Any:
    """Return a row's length in the accumulator type."""
    return tirx.const(length, acc) if isinstance(length, int) else tirx.Cast(acc, length)


def norm_program(spec: NormSpec) -> RowProgram:
    """Return the program of layer_norm, group_norm, instance_norm or rms_norm."""
    inputs = [spec.data, *spec.bonus]
    late = [e for e in (spec.weight, spec.bias) if e is not None] + list(spec.extras)
    every = [*inputs, *late, spec.out]
    axes, loads, width = build_domain(
        spec.axes, [Operand(i, e.strides) for i, e in enumerate(every)]
    )
    # A tensor that plays two parts is one parameter; the first mention gives its place.
    tensors: list[Tensor] = []
    for e in every:
        if e.tensor not in tensors:
            tensors.append(e.tensor)
    loads = [
        Load(tensors.index(every[i].tensor), ld.index, ld.follows_last)
        for i, ld in enumerate(loads)
    ]
    acc = accumulator(spec.data.tensor.dtype)
    eps = tirx.const(spec.epsilon, acc)
    zero, one = tirx.const(0, acc), tirx.const(1, acc)
    first = len(inputs)

    def init(raw: list[Any]) -> list[Any]:
        x = raw[0] if spec.before is None else spec.before(raw[0])
        if not spec.bonus:
            return [x]
        product = raw[1]
        for other in raw[2:]:
            product = product * other
        return [x, product]

    program = RowProgram(
        spec.name, tensors, axes, loads[:first], init, [], [], loads[first:-1], width, acc
    )
    count = count_of(program.length, acc)

    def rstd(variance: Any) -> Any:
        return one / tirx.sqrt(variance + eps)

    if spec.center:
        # Only the first two moments can be combined from parts of a row.
        program.moments = not spec.bonus
        program.finish_moments = rstd
        program.stages = [
            Stage(
                ("sum",),
                lambda v, s: [v[0]],
                lambda r, s: [r[0] / count],
                lambda v, s: [v[0] - s[0], *v[1:]],
            ),
            Stage(
                ("sum", "sum", *["sum"] * bool(spec.bonus)),
                lambda v, s: [v[0], v[0] * v[0], *v[1:]],
                lambda r, s: [
                    r[0] / count,
                    rstd(tirx.max((r[1] - r[0] * (r[0] / count)) / count, zero)),
                    *r[2:],
                ],
            ),
        ]
    else:
        program.stages = [
            Stage(("sum",), lambda v, s: [v[0] * v[0]], lambda r, s: [rstd(r[0] / count)])
        ]
    has_weight, has_bias = spec.weight is not None, spec.bias is not None

    def value(vals: list[Any], late_values: list[Any], scalars: list[Any]) -> Any:
        y = (vals[0] - scalars[1]) * scalars[2] if spec.center else vals[0] * scalars[0]
        rest = list(late_values)
        if has_weight:
            y = y * rest.pop(0)
        if has_bias:
            y = y + rest.pop(0)
        bonus = scalars[3] if spec.bonus else None
        return y if spec.epilogue is None else spec.epilogue(y, rest, bonus)

    program.stores = [Store(loads[-1].tensor, loads[-1].index, value)]
    return program


def softmax_program(
    shape: Sequence[Any], axis: int, dtype: str, functions: Functions, log: bool = False
) -> RowProgram:
    """Return the program of softmax or log_softmax along `axis`."""
    tensors = [Tensor("x", tuple(shape), dtype), Tensor("y", tuple(shape), dtype)]
    strides = tuple(row_major(shape))
    axes, loads, width = build_domain(
        axis_domain(shape, [axis]), [Operand(0, strides), Operand(1, strides)]
    )
    acc = accumulator(dtype)
    first = Stage(("max",), lambda v, s: [v[0]], lambda r, s: [r[0]])
    if log:
        stages = [
            Stage(first.combine, first.value, first.post, lambda v, s: [v[0] - s[0]]),
            Stage(("sum",), lambda v, s: [functions.exp(v[0])], lambda r, s: [tirx.log(r[0])]),
        ]

        def value(vals: list[Any], late: list[Any], s: list[Any]) -> Any:
            return vals[0] - s[1]

    else:
        stages = [
            Stage(
                first.combine,
                first.value,
                first.post,
                lambda v, s: [functions.exp(v[0] - s[0])],
            ),
            Stage(("sum",), lambda v, s: [v[0]], lambda r, s: [tirx.const(1, acc) / r[0]]),
        ]

        def value(vals: list[Any], late: list[Any], s: list[Any]) -> Any:
            return vals[0] * s[1]

    return RowProgram(
        "log_softmax" if log else "softmax",
        tensors,
        axes,
        loads[:1],
        lambda raw: [raw[0]],
        stages,
        [Store(1, loads[1].index, value)],
        contiguous=width,
        acc=acc,
    )


def reduction_program(
    kind: str, shape: Sequence[Any], reduced: Sequence[int], keepdims: bool, dtype: str
) -> RowProgram:
    """Return the program of sum, mean, max, min, prod, variance or std over `reduced` axes."""
    out_shape = tuple(
        1 if i in reduced else e for i, e in enumerate(shape) if keepdims or i not in reduced
    )
    strides = tuple(row_major(shape))
    kept_strides = row_major(out_shape)
    out_strides: list[Any] = []
    k = 0
    for i in range(len(shape)):
        if i in reduced:
            out_strides.append(0)
            k += 1 if keepdims else 0
        else:
            out_strides.append(kept_strides[k])
            k += 1
    tensors = [Tensor("x", tuple(shape), dtype), Tensor("y", out_shape, dtype)]
    # The result does not constrain the vector: it is written once a row.
    operands = [Operand(0, strides), Operand(1, tuple(out_strides))]
    axes, loads, width = build_domain(axis_domain(shape, reduced), operands)
    if axes[-1].reduced:
        _, _, width = build_domain(axes, [Operand(0, tuple(row_major([a.extent for a in axes])))])
    acc = accumulator(dtype)
    program = RowProgram(
        kind, tensors, axes, loads[:1], lambda raw: [raw[0]], [], [], contiguous=width, acc=acc
    )
    count = count_of(program.length, acc)
    zero = tirx.const(0, acc)
    if kind in ("variance", "std"):

        def finish(r: list[Any], s: list[Any]) -> list[Any]:
            var = tirx.max((r[1] - r[0] * (r[0] / count)) / count, zero)
            return [tirx.sqrt(var) if kind == "std" else var]

        program.stages = [
            Stage(
                ("sum",),
                lambda v, s: [v[0]],
                lambda r, s: [r[0] / count],
                lambda v, s: [v[0] - s[0]],
            ),
            Stage(("sum", "sum"), lambda v, s: [v[0], v[0] * v[0]], finish),
        ]
    else:
        op = "sum" if kind == "mean" else kind
        program.stages = [
            Stage(
                (op,),
                lambda v, s: [v[0]],
                lambda r, s: [r[0] / count if kind == "mean" else r[0]],
            )
        ]
    program.stores = [Store(1, loads[1].index, lambda scalars: scalars[-1], per_row=True)]
    return program
