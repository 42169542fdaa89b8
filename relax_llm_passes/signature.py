"""Signatures of compiled functions, kept beside a library so that it can be called by name.

A compiled library has no parameter names, shapes or dtypes. `compile` writes them to
`LIBRARY.json`; `run` reads them to draw random inputs and to check those it is given.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import InputError, UnknownNameError

__all__ = [
    "WEIGHT_NAMES_ATTR",
    "Signature",
    "evaluate",
    "extent",
    "read_sidecar",
    "sidecar_path",
    "write_sidecar",
]

# On a function: from a parameter's name to the names its tensor has in the model's files, in JSON.
WEIGHT_NAMES_ATTR = "relax_llm.weight_names"

_FORMAT = 1
_DEFAULT_SIZE = 16


def sidecar_path(library: str | Path) -> Path:
    """Return where a library's signatures are kept."""
    return Path(f"{library}.json")


def _describe(ty: Any) -> dict[str, Any]:
    import tvm
    from tvm import relax

    if isinstance(ty, relax.TupleType):
        return {"kind": "tuple", "fields": [_describe(f) for f in ty.fields]}
    if isinstance(ty, relax.ShapeType):
        values = None if ty.values is None else [extent(v) for v in ty.values]
        return {"kind": "shape", "values": values}
    if isinstance(ty, relax.TensorType):
        known = ty.shape is not None and hasattr(ty.shape, "values")
        return {
            "kind": "tensor",
            "shape": [extent(v) for v in ty.shape.values] if known else None,
            "dtype": str(ty.dtype),
        }
    if isinstance(ty, tvm.ir.PrimType):
        return {"kind": "number", "dtype": str(ty.dtype)}
    return {"kind": "object", "type": str(ty)}


def extent(value: Any) -> int | str:
    """Return a size as a number, or as text that `evaluate` reads."""
    from tvm import tirx

    if isinstance(value, (int, tirx.IntImm)):
        return int(value)
    if isinstance(value, tirx.Var):
        return str(value.name)
    binary = {
        tirx.Add: "+",
        tirx.Sub: "-",
        tirx.Mul: "*",
        tirx.FloorDiv: "//",
        tirx.FloorMod: "%",
        tirx.Div: "//",
        tirx.Mod: "%",
    }
    for node, sign in binary.items():
        if isinstance(value, node):
            return f"({extent(value.a)} {sign} {extent(value.b)})"
    for node, name in ((tirx.Max, "max"), (tirx.Min, "min")):
        if isinstance(value, node):
            return f"{name}({extent(value.a)}, {extent(value.b)})"
    if isinstance(value, tirx.Cast):
        return extent(value.value)
    return f"unknown({value})"


def _names(extent: int | str) -> list[str]:
    if isinstance(extent, int):
        return []
    tree = ast.parse(extent, mode="eval")
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called]


def evaluate(extent: int | str, sizes: Mapping[str, int]) -> int:
    """Evaluate the arithmetic that `extent` writes; nothing else is accepted."""
    if isinstance(extent, int):
        return extent

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp):
            a, b = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return a + b
            if isinstance(node.op, ast.Sub):
                return a - b
            if isinstance(node.op, ast.Mult):
                return a * b
            if isinstance(node.op, ast.FloorDiv) and b:
                return a // b
            if isinstance(node.op, ast.Mod) and b:
                return a % b
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id in ("max", "min"):
                return (max if node.func.id == "max" else min)(value(a) for a in node.args)
        raise InputError(f"size {extent} cannot be computed from {dict(sizes)}")

    try:
        tree = ast.parse(extent, mode="eval")
    except SyntaxError:
        raise InputError(f"size {extent!r} is no arithmetic") from None
    return value(tree.body)


class Signature:
    """Parameters and result of one compiled function.

    Parameters
    ----------
    name : str
        The function.
    record : mapping
        As in the sidecar: {"params": [{"name", "type"}], "result": type}.
    """

    def __init__(self, name: str, record: Mapping[str, Any]) -> None:
        self.name = name
        self.record = record

    @staticmethod
    def of(name: str, func: Any) -> Signature:
        """Read the signature of a Relax function."""
        params = [{"name": str(p.name), "type": _describe(p.ty)} for p in func.params]
        return Signature(name, {"params": params, "result": _describe(func.ret_ty)})

    @property
    def symbols(self) -> list[str]:
        """Names of the symbolic sizes, in order of appearance."""
        found: dict[str, None] = {}

        def visit(ty: Mapping[str, Any]) -> None:
            for field in ty.get("fields", ()):
                visit(field)
            for extent in ty.get("shape") or ty.get("values") or ():
                found.update(dict.fromkeys(_names(extent)))

        for param in self.record["params"]:
            visit(param["type"])
        return list(found)

    def leaves(self) -> dict[str, dict[str, Any]]:
        """Return the types of the parameters by name; fields of tuples are "name.0"."""
        found: dict[str, dict[str, Any]] = {}

        def visit(name: str, ty: dict[str, Any]) -> None:
            if ty["kind"] == "tuple":
                for i, field in enumerate(ty["fields"]):
                    visit(f"{name}.{i}", field)
            else:
                found[name] = ty

        for param in self.record["params"]:
            visit(param["name"], param["type"])
        return found

    def sizes(self, given: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Return a size for every symbol: given, read from the arrays' shapes, or 16.

        Raises
        ------
        UnknownNameError
            For a name that is no symbolic size of the function.
        InputError
            When two arrays disagree, or an array and a given size.
        """
        symbols = self.symbols
        for name in given:
            if name not in symbols:
                raise UnknownNameError(f"symbolic size of {self.name}", name, symbols)
        sizes = dict(given)
        source = dict.fromkeys(given, "--shape")
        for key, ty in self.leaves().items():
            extents = ty.get("shape") if ty["kind"] == "tensor" else ty.get("values")
            if key not in arrays or extents is None:
                continue
            actual = arrays[key].shape if ty["kind"] == "tensor" else arrays[key].tolist()
            for extent, found in zip(extents, actual, strict=False):
                if isinstance(extent, str) and extent.isidentifier():
                    if sizes.setdefault(extent, int(found)) != int(found):
                        raise InputError(
                            f"{key} has {extent}={found}, {source[extent]} has "
                            f"{extent}={sizes[extent]}"
                        )
                    source.setdefault(extent, key)
        return {name: sizes.get(name, _DEFAULT_SIZE) for name in symbols}

    def arguments(
        self,
        sizes: Mapping[str, int],
        seed: int = 0,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> list[Any]:
        """Return arguments in call order: given arrays, checked, and random values for the rest.

        Raises
        ------
        UnknownNameError
            For an array whose name is no parameter.
        InputError
            For an array of the wrong dtype or shape, or a parameter that cannot be drawn.
        """
        import tvm

        from .sampling import random_array

        arrays = dict(arrays or {})
        leaves = self.leaves()
        for name in arrays:
            if name not in leaves:
                raise UnknownNameError(f"input of {self.name}", name, leaves)
        rng = np.random.default_rng(seed)

        def make(name: str, ty: dict[str, Any]) -> Any:
            kind = ty["kind"]
            if kind == "tuple":
                return [make(f"{name}.{i}", f) for i, f in enumerate(ty["fields"])]
            if kind == "shape":
                if name in arrays:
                    return tvm.runtime.ShapeTuple([int(v) for v in arrays[name].ravel()])
                if ty["values"] is None:
                    raise InputError(f"input {name}: its length is unknown; give it in --inputs")
                return tvm.runtime.ShapeTuple([evaluate(v, sizes) for v in ty["values"]])
            if kind == "number":
                if name in arrays:
                    return arrays[name].item()
                return random_array((), ty["dtype"], rng).item()
            if kind != "tensor":
                raise InputError(f"input {name} is {ty.get('type', kind)}: it cannot be drawn")
            if name in arrays:
                return _checked(name, arrays[name], ty, sizes)
            if ty["shape"] is None:
                raise InputError(f"input {name}: its shape is unknown; give it in --inputs")
            shape = tuple(evaluate(v, sizes) for v in ty["shape"])
            return random_array(shape, ty["dtype"], rng)

        return [make(p["name"], p["type"]) for p in self.record["params"]]


def _checked(
    name: str, array: np.ndarray, ty: Mapping[str, Any], sizes: Mapping[str, int]
) -> np.ndarray:
    dtype = ty["dtype"]
    # numpy's files know no bfloat16 and float8: they come back as raw bytes of the same size.
    if hasattr(ml_dtypes, dtype) and array.dtype.kind in "Vu":
        if array.dtype.itemsize == np.dtype(getattr(ml_dtypes, dtype)).itemsize:
            array = array.view(getattr(ml_dtypes, dtype))
    if str(array.dtype) != dtype:
        raise InputError(f"input {name} is {array.dtype}, expected {dtype}")
    if ty["shape"] is not None:
        shape = tuple(evaluate(v, sizes) for v in ty["shape"])
        if array.shape != shape:
            raise InputError(f"input {name} has shape {array.shape}, expected {shape}")
    return np.require(array, requirements="C")  # ascontiguousarray makes () to (1,)


def write_sidecar(
    library: str | Path, functions: Mapping[str, Any], target: Any, **more: Any
) -> Path:
    """Write the signatures of the Relax functions beside a library; return the file's path."""
    import tvm

    from . import __version__

    record = {
        "format": _FORMAT,
        "relax_llm_passes": __version__,
        "tvm": str(tvm.__version__),
        "target": json.loads(str(target)),
        **more,
        "functions": {name: Signature.of(name, f).record for name, f in functions.items()},
    }
    path = sidecar_path(library)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def read_sidecar(library: str | Path) -> dict[str, Any]:
    """Read what `write_sidecar` wrote.

    Raises
    ------
    InputError
        When the file is missing, damaged, or of a later version.
    """
    path = sidecar_path(library)
    try:
        record = json.loads(path.read_text())
        found = record["format"]
        if found != _FORMAT:
            raise InputError(f"{path} has format {found!r}, expected {_FORMAT}: compile again")
        _check_record(record)
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: `relax-llm-passes compile` writes it beside the library, with "
            "the functions' signatures"
        ) from None
    except InputError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}); compile again"
        ) from None
    return record


def _check_record(record: Mapping[str, Any]) -> None:
    """Look at everything that is read later, so that a damaged file is told as one."""

    def check(ty: Mapping[str, Any]) -> None:
        if ty["kind"] == "tuple":
            for field in ty["fields"]:
                check(field)
        elif ty["kind"] == "tensor":
            str(ty["dtype"]), list(ty["shape"] or ())
        elif ty["kind"] == "shape":
            list(ty["values"] or ())

    str(record["target"]["kind"])
    functions = record["functions"]
    for function in functions.values():
        for param in function["params"]:
            check(param["type"])
            str(param["name"])
        check(function["result"])
    plan = record.get("generation")
    if plan is not None:
        str(plan["create"]), str(plan["capacity"])
        for step in (plan["step"], plan["prefill"]):
            if step is None:
                continue
            params = functions[step["function"]]["params"]
            for place in (step["ids"], *step["states"], *step["weights"]):
                str(params[place]["name"])
            str(step["positions"]), str(step["length"]), str(step["logits"]), list(step["results"])
            str(step["rows"]["size"]), str(step["rows"]["least"]), str(step["rows"]["most"])
