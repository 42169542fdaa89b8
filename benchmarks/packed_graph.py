"""A graph with its weights group-quantised, as a model of another storage format would have them.

Every matrix that is the weight of a product becomes words and scales (fp16, groups of 32 along K)
and a TIR function that unpacks them, which is how exporters write it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from relax_llm_passes.cloning import Clone
from relax_llm_passes.corpus import Graph
from relax_llm_passes.dataflow import FunctionView

__all__ = ["pack", "with_packed_weights"]

GROUP = 32


def pack(weight: np.ndarray, bits: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return words (uint32) and scales (float16) of a matrix, grouped along an axis."""
    rows = weight.T if axis == 0 else weight
    n, k = rows.shape
    top, per = (1 << (bits - 1)) - 1, 32 // bits
    grouped = rows.reshape(n, k // GROUP, GROUP).astype("float32")
    scale = (np.abs(grouped).max(2) / top).astype("float16")
    safe = np.where(scale == 0, 1, scale).astype("float32")
    integers = np.clip(np.rint(grouped / safe[..., None]) + top, 0, 2 * top).astype("uint32")
    fields = integers.reshape(n, k // per, per)
    words = np.zeros((n, k // per), "uint32")
    for j in range(per):
        words |= fields[..., j] << np.uint32(bits * j)
    if axis == 0:
        words, scale = words.T, scale.T
    return np.ascontiguousarray(words), np.ascontiguousarray(scale)


def _unpack(shape: tuple[int, int], bits: int, axis: int) -> tirx.PrimFunc:
    """Return the function (words, scales) -> fp32 matrix."""
    per, top = 32 // bits, (1 << (bits - 1)) - 1

    def stored(step: int) -> list[int]:
        return [size // step if i == axis else size for i, size in enumerate(shape)]

    words = te.placeholder(stored(per), "uint32", "words")
    scales = te.placeholder(stored(GROUP), "float16", "scales")

    def value(*at: Any) -> Any:
        def where(step: int) -> list[Any]:
            return [i // step if a == axis else i for a, i in enumerate(at)]

        shift = tirx.Cast("uint32", at[axis] % per * bits)
        field = (words(*where(per)) >> shift) & tirx.const((1 << bits) - 1, "uint32")
        number = tirx.Cast("float32", field) - tirx.const(float(top), "float32")
        return number * tirx.Cast("float32", scales(*where(GROUP)))

    func = te.create_prim_func([words, scales, te.compute(shape, value, "weight")])
    return func.without_attr("global_symbol")


def _axis_of_k(view: FunctionView, call: Any, positions: dict[Any, int]) -> tuple[Any, int] | None:
    """Return the parameter that a product has as its weight, and the axis of its sums."""
    weight = view.resolve(call.args[1])
    axis = 0
    turned = view.call(weight, "relax.permute_dims")
    if turned is not None:
        weight, axis = view.resolve(turned.args[0]), 1
    if weight not in positions or weight.ty.ndim != 2:
        return None
    return weight, axis


def _own_table(binding: Any, tables: dict[Any, Any]) -> Any:
    """Unpack a tied embedding where it is looked up too, as exporters do; unused copies go away."""
    value = getattr(binding, "value", None)
    if getattr(getattr(value, "op", None), "name", "") != "relax.take":
        return binding
    table = tables.get(value.args[0])
    if table is None:
        return binding
    taken = relax.op.take(table, value.args[1], value.attrs.axis, str(value.attrs.mode))
    return relax.VarBinding(binding.var, taken)


def with_packed_weights(
    graph: Graph, bits: int, smallest: int = 512
) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return the module and its arguments; matrices below `smallest` rows or columns stay."""
    mod = graph.mod
    gvar = mod.get_global_var(graph.function)
    func, view = mod[gvar], FunctionView(mod, gvar)
    positions = {param: i for i, param in enumerate(func.params)}
    arrays = graph.inputs()
    chosen: dict[Any, int] = {}
    for binding in view.bindings:
        call = view.call(binding.var, "relax.matmul")
        found = _axis_of_k(view, call, positions) if call is not None else None
        if found is not None:
            shape = arrays[positions[found[0]]].shape
            if shape[found[1]] % GROUP == 0 and min(shape) >= smallest:
                chosen[found[0]] = found[1]
    bb = relax.BlockBuilder(mod)
    params, values, first = [], [], []
    renamed: dict[Any, Any] = {}
    tables: dict[Any, Any] = {}
    for param in func.params:
        array = arrays[positions[param]]
        if param not in chosen:
            params.append(param)
            values.append(array)
            continue
        stored = pack(array, bits, chosen[param])
        pair = [
            relax.Var(f"{param.name}_{what}", relax.TensorType(part.shape, str(part.dtype)))
            for what, part in zip(("words", "scales"), stored, strict=True)
        ]
        params += pair
        values += stored
        unpack = bb.add_func(_unpack(array.shape, bits, chosen[param]), "unpack")
        renamed[param] = relax.DataflowVar(param.name, param.ty)
        tables[renamed[param]] = relax.DataflowVar(f"{param.name}_table", param.ty)
        for var in (renamed[param], tables[renamed[param]]):
            call = bb.normalize(relax.call_tir(unpack, pair, out_ty=param.ty))
            first.append(relax.VarBinding(var, call))
    changed = Clone(renamed, {}).seq(func.body)
    block, *rest = changed.blocks
    bindings = [_own_table(binding, tables) for binding in block.bindings]
    body = relax.SeqExpr([relax.DataflowBlock([*first, *bindings]), *rest], changed.body)
    result = bb.get()
    # Sizes of dynamic inputs come from parameters that stay.
    new = relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)
    result.update_func(result.get_global_var(graph.function), new)
    return relax.transform.Normalize()(result), values
