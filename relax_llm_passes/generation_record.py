"""Which functions of a module generate text, and what each of their parameters is for.

`compile` writes this beside a library; `generation.Generator` drives the library by it. Two kinds
of models are known, both as `step(ids, [positions], states, ..., weights) -> (logits, states)`:

- caches written in place, as InplaceKVCache makes them: the states are its caches, a
  `length: R.Shape([p])` stands behind them, and other functions create them and take the prompt;
- recurrent models (RWKV): the states are inputs that are no weights (the attribute `num_input` says
  where those begin) and come back, in their order and of their types, as the last results.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from .errors import InputError
from .fusion.inplace_twin import AXIS_ATTR, CACHES_ATTR, CREATES_ATTR, SOURCE_ATTR
from .module_io import public_functions
from .signature import WEIGHT_NAMES_ATTR, extent

__all__ = ["generation_record"]


def generation_record(mod: tvm.IRModule) -> dict[str, Any] | None:
    """Return how the module's functions generate text, in plain Python; None where none does.

    Returns
    -------
    dict or None
        "step" and "prefill" (or None): {"function", "ids", "positions", "states", "length",
        "logits", "results", "rows": {"size", "least", "most"}, "weights"}; "create": a function's
        name, or None where states begin as zeros; "capacity": rows of the caches, or None.
        "ids" and the like are places among the parameters, "logits" and "results" (the states)
        places among the flattened results; "results" is empty for caches, which stay where they
        are.

    Raises
    ------
    InputError
        When several decode functions have caches.
    """
    functions = public_functions(mod)
    creators = [n for n, f in functions.items() if f.attrs and CREATES_ATTR in f.attrs]
    if len(creators) > 1:
        found = ", ".join(str(functions[n].attrs[SOURCE_ATTR]) for n in creators)
        raise InputError(
            f"several functions append to caches ({found}); choose one with --function, and its "
            "prefill"
        )
    if creators:
        return _with_caches(functions, creators[0])
    return _recurrent(functions)


def _with_caches(functions: dict[str, Any], creator: str) -> dict[str, Any] | None:
    source = str(functions[creator].attrs[SOURCE_ATTR])
    step = _cached_step(f"{source}_inplace", functions[f"{source}_inplace"])
    if step is None:
        return None
    prefill = None
    for name, func in functions.items():
        is_twin = func.attrs and CACHES_ATTR in func.attrs and name != step["function"]
        if is_twin and prefill is None:
            prefill = _cached_step(name, func)
    first = functions[step["function"]].params[step["states"][0]].ty
    axis = int(functions[creator].attrs[AXIS_ATTR])
    return {
        "step": step,
        "prefill": prefill,
        "create": creator,
        "capacity": int(first.shape.values[axis]),
    }


def _cached_step(name: str, func: relax.Function) -> dict[str, Any] | None:
    states = [int(i) for i in func.attrs[CACHES_ATTR]]
    length = next(
        i for i, p in enumerate(func.params) if i > states[-1] and isinstance(p.ty, relax.ShapeType)
    )
    attrs = func.attrs
    inputs = int(attrs["num_input"]) if "num_input" in attrs else length + 1
    others = [i for i in range(inputs) if i not in states and i != length]
    step = _step(name, func, others, states, inputs)
    if step is None:
        return None
    shapes = [str(func.params[i].ty) for i in states]
    leaves = _leaves(func.ret_ty)
    logits = [i for i, ty in enumerate(leaves) if str(ty) not in shapes and _is_logits(ty)]
    if not logits:
        return None
    return {**step, "length": length, "logits": logits[0], "results": []}


def _recurrent(functions: dict[str, Any]) -> dict[str, Any] | None:
    steps = {}
    for name, func in functions.items():
        found = _recurrent_step(name, func)
        if found is not None:
            steps[name] = found
    one = [s for s in steps.values() if s["rows"]["size"] == 1]
    many = [s for s in steps.values() if s["rows"]["size"] != 1]
    if len(one) > 1 or len(many) > 1 or not steps:
        return None
    step = (one or many)[0]
    if isinstance(step["rows"]["size"], int) and step["rows"]["size"] > 1:
        return None
    prefill = many[0] if one and many else None
    if prefill is not None:
        types = [
            [str(functions[s["function"]].params[i].ty) for i in s["states"]]
            for s in (step, prefill)
        ]
        if types[0] != types[1]:
            prefill = None
    return {"step": step, "prefill": prefill, "create": None, "capacity": None}


def _recurrent_step(name: str, func: relax.Function) -> dict[str, Any] | None:
    attrs = func.attrs or {}
    if "num_input" not in attrs:
        return None
    inputs = int(attrs["num_input"])
    types = [p.ty for p in func.params]
    others = [i for i in range(inputs) if _is_integer(types[i])]
    states = [i for i in range(inputs) if i not in others]
    leaves = _leaves(func.ret_ty)
    if not states or len(leaves) <= len(states):
        return None
    results = list(range(len(leaves) - len(states), len(leaves)))
    for state, result in zip(states, results, strict=True):
        ty = types[state]
        if not _fixed(ty) or str(ty) != str(leaves[result]):
            return None
    step = _step(name, func, others, states, inputs)
    if step is None or not _is_logits(leaves[0]):
        return None
    return {**step, "length": None, "logits": 0, "results": results}


def _step(
    name: str, func: relax.Function, others: list[int], states: list[int], inputs: int
) -> dict[str, Any] | None:
    """Return what both kinds have in common; None where an input is neither ids nor positions."""
    if not others or len(others) > 2 or any(not _is_integer(func.params[i].ty) for i in others):
        return None
    ids = func.params[others[0]].ty
    shape = list(ids.shape.values)
    if len(shape) > 2:
        return None
    attrs = func.attrs or {}
    rows = shape[-1] if shape else 1
    least, most = 1, None
    if isinstance(rows, tirx.Var):
        lower, upper = (
            {str(k): int(v) for k, v in dict(attrs[a]).items()} if a in attrs else {}
            for a in ("tir_var_lower_bound", "tir_var_upper_bound")
        )
        least, most = max(1, lower.get(rows.name, 1)), upper.get(rows.name)
    record = {
        "function": name,
        "ids": others[0],
        "positions": others[1] if len(others) == 2 else None,
        "states": states,
        "rows": {"size": extent(rows), "least": least, "most": most},
        "weights": [i for i in range(inputs, len(func.params))],
    }
    if WEIGHT_NAMES_ATTR in attrs:
        import json

        record["weight_names"] = json.loads(str(attrs[WEIGHT_NAMES_ATTR]))
    return record


def _leaves(ty: Any) -> list[Any]:
    if isinstance(ty, relax.TupleType):
        return [leaf for field in ty.fields for leaf in _leaves(field)]
    return [ty]


def _is_integer(ty: Any) -> bool:
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return known and str(ty.dtype) in ("int32", "int64")


def _is_logits(ty: Any) -> bool:
    return isinstance(ty, relax.TensorType) and "float" in str(ty.dtype)


def _fixed(ty: Any) -> bool:
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return known and all(isinstance(d, tirx.IntImm) for d in ty.shape.values)
