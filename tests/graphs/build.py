"""Turns a recipe into a graph: trace, import, fill with drawn numbers, compute golden outputs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_llm_passes.corpus import Graph, encode_array

from .sources import Recipe, Source, load_families
from .sources.recipe import default_weight_rule

# How far apart two correct programs may be: one rounding of the type, times the length of the sums
# in these models (K up to 512: about sqrt(K) roundings), for programs whose order of summation
# differs.
FLOOR = {"float32": 3e-6, "float16": 2e-2, "bfloat16": 1e-1}
MARGIN = 8


@dataclass
class Built:
    """A graph and the model it came from.

    Attributes
    ----------
    graph : Graph
        Module, inputs and, when asked for, golden outputs.
    source : Source
        ``source.module`` is the torch model, filled with the graph's weights; None for graphs whose
        Relax module was not traced from torch.
    torch_args : tuple
        Arguments for ``source.module``: the same numbers as the graph's inputs.
    """

    graph: Graph
    source: Source
    torch_args: tuple[Any, ...]


def build(name: str, size: str = "small", golden: bool | None = None) -> Built:
    """Make one graph from its source.

    Parameters
    ----------
    name : str
        A name that ``generate.py --list`` shows.
    size : str
        "small" (what is committed) or a size of the family, "real" for most.
    golden : bool, optional
        Compute golden outputs; by default for small graphs only.
    """
    recipes = load_families()
    if name not in recipes:
        raise SystemExit(f"no recipe {name!r}; known: {', '.join(sorted(recipes))}")
    entry = recipes[name]
    golden = size == "small" if golden is None else golden
    source = entry.build(size)
    if source.mod is None:
        return _from_torch(entry, source, size, golden)
    return _from_relax(entry, source, size, golden)


# --- traced from torch --------------------------------------------------------------------------


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]


def _unflatten(template: Any, leaves: list[Any]) -> Any:
    if isinstance(template, (tuple, list)):
        return type(template)([_unflatten(item, leaves) for item in template])
    return leaves.pop(0)


def _flatten_dynamic(dynamic: Any, args: Any) -> list[dict[int, Any]]:
    """dynamic_shapes beside the flattened arguments."""
    if isinstance(args, (tuple, list)):
        inner = [None] * len(args) if dynamic is None else list(dynamic)
        return [leaf for d, a in zip(inner, args, strict=True) for leaf in _flatten_dynamic(d, a)]
    return [dynamic or {}]


def _automatic(dynamic: Any) -> Any:
    """The same structure with ``Dim.AUTO`` in place of every declared dimension."""
    import torch

    if isinstance(dynamic, dict):
        return {k: _automatic(v) for k, v in dynamic.items()}
    if isinstance(dynamic, (list, tuple)):
        return type(dynamic)(_automatic(each) for each in dynamic)
    return None if dynamic is None else torch.export.Dim.AUTO


def _from_torch(entry: Recipe, source: Source, size: str, golden: bool) -> Built:
    import torch

    from relax_llm_passes.extract import export_module, import_exported

    dynamic = _automatic(source.dynamic) if source.auto else source.dynamic
    # A copy: tracing leaves its stand-ins in buffers that a model overwrites.
    program = export_module(copy.deepcopy(source.module), source.args, dynamic)
    mod = import_exported(program, keep_attention=source.keep_attention)
    function = mod[source.function]
    weights = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    }
    leaves = _flatten(source.args)
    per_arg = list(source.dynamic.values()) if isinstance(source.dynamic, dict) else source.dynamic
    dims = _flatten_dynamic(per_arg, source.args)
    rule_of = source.weight_rule or default_weight_rule

    symbols: dict[str, dict[str, Any]] = {}
    items: list[dict[str, Any]] = []
    first_name: dict[int, str] = {}
    for position, param in enumerate(function.params):
        item = _describe(param)
        if position < len(leaves):
            item["draw"] = source.rules[position]
            for axis, dim in dims[position].items():
                if dim is not None and isinstance(item["shape"][axis], str):
                    value = int(leaves[position].shape[axis])
                    symbols.setdefault(item["shape"][axis], {"means": dim.__name__, "value": value})
        else:
            target = weights[param.name]
            tensor = source.module.get_parameter(target)
            item["draw"] = rule_of(target, tuple(tensor.shape))
            item["weight"] = True
            tied = first_name.setdefault(tensor.data_ptr(), param.name)
            if tied != param.name:  # the same storage under two names: the same numbers
                item["key"] = tied
                item["draw"] = next(i["draw"] for i in items if i["name"] == tied)
        items.append(item)

    record = _record(entry, source, size, mod, symbols, items)
    graph = Graph.from_record(entry.name, record, "", mod)
    arrays = graph.inputs()
    with torch.no_grad():
        for item, array in zip(items, arrays, strict=True):
            if item.get("weight") and "key" not in item:
                target = source.module.get_parameter(weights[item["name"]])
                target.copy_(_to_torch(array))
    tensors = [_to_torch(array) for array in arrays[: len(leaves)]]
    args = _unflatten(source.args, list(tensors))
    if golden:
        wide = run_wide(source.module, args)
        with torch.no_grad():
            narrow = _flatten(source.module(*copy.deepcopy(args)))
        _store_golden(record, [t.numpy() for t in wide], [t.double().numpy() for t in narrow])
        graph = Graph.from_record(entry.name, record, "", mod)
    return Built(graph, source, args)


def _to_torch(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":  # torch does not know numpy's extension type
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def run_wide(module: Any, args: Any) -> list[Any]:
    """Run a float32 (or half) model in float64, its own casts to float32 included."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    narrow_types = (torch.float32, torch.float16, torch.bfloat16)

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            def widen(value: Any) -> Any:
                return torch.float64 if value in narrow_types else value

            def visit(value: Any) -> Any:
                return widen(value) if isinstance(value, torch.dtype) else value

            return func(*tree_map(visit, args), **tree_map(visit, kwargs or {}))

    wide_module = copy.deepcopy(module).double()
    wide_args = _unflatten(
        args, [t.double() if t.is_floating_point() else t.clone() for t in _flatten(args)]
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), Wide():
            return _flatten(wide_module(*wide_args))
    finally:
        torch.set_default_dtype(before)


# --- written with Relax -------------------------------------------------------------------------


def _from_relax(entry: Recipe, source: Source, size: str, golden: bool) -> Built:
    assert source.specs is not None and source.reference is not None
    items = []
    for param, spec in zip(source.mod[source.function].params, source.specs, strict=True):
        # The printer writes dots in names as underscores; the stream keeps the weight's own name.
        item = _describe(param)
        named = {"name": item["name"].replace(".", "_"), "key": item["name"]}
        items.append({**item, **named, **spec})
    record = _record(entry, source, size, source.mod, source.symbols or {}, items)
    graph = Graph.from_record(entry.name, record, "", source.mod)
    if golden:
        arrays = {i["key"]: a for i, a in zip(items, graph.inputs(), strict=True)}
        wide = source.reference(arrays, "float64")
        narrow = source.reference(arrays, "float32")
        _store_golden(record, [np.asarray(a) for a in wide], [np.asarray(a) for a in narrow])
        graph = Graph.from_record(entry.name, record, "", source.mod)
    return Built(graph, source, ())


# --- the record ---------------------------------------------------------------------------------


def _describe(param: Any) -> dict[str, Any]:
    shape = [int(e.value) if hasattr(e, "value") else str(e) for e in param.ty.shape.values]
    return {"name": param.name, "shape": shape, "dtype": str(param.ty.dtype.dtype)}


def _record(
    entry: Recipe,
    source: Source,
    size: str,
    mod: Any,
    symbols: dict[str, dict[str, Any]],
    items: list[dict[str, Any]],
) -> dict[str, Any]:
    from .inspect_module import count_bindings, uses

    floats = [i["dtype"] for i in items if i["dtype"].startswith(("float", "bfloat"))]
    narrowest = min(floats, key=_bits)
    return {
        "source": entry.source,
        "source_version": source.version,
        "special": entry.special,
        "tags": list(entry.tags),
        "size": size,
        "function": source.function,
        "dtype": narrowest,
        "runs_on": list(source.runs_on),
        "bindings": count_bindings(mod),
        "operators": uses(mod),
        "symbols": symbols,
        "inputs": items,
    }


def _bits(dtype: str) -> int:
    return int("".join(ch for ch in dtype if ch.isdigit())[:2])


def _store_golden(record: dict[str, Any], wide: list[np.ndarray], narrow: list[np.ndarray]) -> None:
    error = 0.0
    stored = []
    for full, own in zip(wide, narrow, strict=True):
        if not np.isfinite(full).all():
            raise SystemExit("golden output is not finite: the drawing rules are unsuitable")
        scale = float(np.abs(full).max()) or 1.0
        error = max(error, float(np.abs(full - own.astype(np.float64)).max()) / scale)
        # float64 results are rounded once, by less than the tolerance of any type tested.
        stored.append(encode_array(full.astype(np.float32) if full.dtype == np.float64 else full))
    floor = FLOOR[record["dtype"]]
    bound = max(MARGIN * error, floor)
    digit = 10.0 ** math.floor(math.log10(bound))
    record["tolerance"] = {
        "rel": float(f"{math.ceil(bound / digit * (1 - 1e-9)) * digit:.0e}"),
        "source_error": float(f"{error:.2e}"),
        "reason": (
            f"largest of {MARGIN} times the error of the source model itself run in "
            f"{record['dtype']} "
            f"({error:.1e}) and {floor:.0e} for another order of summation in {record['dtype']}"
        ),
    }
    record["golden"] = {"computed_in": "float64", "stored_as": "float32", "outputs": stored}


__all__ = ["Built", "build", "run_wide"]
