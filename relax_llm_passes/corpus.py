"""Reads a folder of model graphs: module text, inputs drawn by seed, golden outputs.

A graph ``NAME`` is two files. ``NAME.py`` is the module as TVMScript; ``NAME.json`` describes it:
where it comes from, how each input is drawn, tensor constants of the module, and the outputs that
the source framework computed. Weights are inputs that are drawn, so they are never stored. Needs
numpy only; TVM is imported when a module is asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import typing
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError, UnknownNameError
from .signature import evaluate

if typing.TYPE_CHECKING:
    import tvm

__all__ = [
    "Comparison",
    "Graph",
    "Input",
    "decode_array",
    "default_dir",
    "draw",
    "encode_array",
    "list_graphs",
    "load",
    "load_all",
    "parse_module",
]


def default_dir() -> Path:
    """Folder of the corpus: ``$RELAX_LLM_CORPUS``, else ``tests/graphs`` of the source checkout.

    Raises
    ------
    InputError
        When neither exists (a wheel does not carry the graphs).
    """
    named = os.environ.get("RELAX_LLM_CORPUS")
    candidate = Path(named) if named else Path(__file__).resolve().parent.parent / "tests/graphs"
    if not (candidate / "modules").is_dir():
        raise InputError(
            f"no graph corpus at {candidate}: it is part of the source checkout "
            f"(tests/graphs), not "
            "of the wheel; name its folder with --corpus DIR or the variable RELAX_LLM_CORPUS"
        )
    return candidate


def _modules_dir(directory: str | os.PathLike[str] | None) -> Path:
    root = default_dir() if directory is None else Path(directory)
    inner = root / "modules"
    found = inner if inner.is_dir() else root
    if not found.is_dir():
        raise InputError(f"no graph corpus at {root}: not a folder")
    return found


def list_graphs(directory: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the graphs in a corpus folder, sorted.

    Parameters
    ----------
    directory : path, optional
        A folder with ``modules/NAME.json`` (or ``NAME.json`` itself); :func:`default_dir` if not
        given.
    """
    return sorted(path.stem for path in _modules_dir(directory).glob("*.json"))


def load(name: str, directory: str | os.PathLike[str] | None = None) -> Graph:
    """Load one graph by name.

    Raises
    ------
    UnknownNameError
        When the folder has no such graph.
    InputError
        When one of its files is damaged.
    """
    folder = _modules_dir(directory)
    path = folder / f"{name}.json"
    if not path.is_file():
        raise UnknownNameError("graph", name, list_graphs(directory))
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        return Graph.from_record(name, record, text)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as err:
        raise InputError(f"graph {name!r} in {folder} cannot be read: {err!r}") from err


def load_all(directory: str | os.PathLike[str] | None = None) -> Iterator[Graph]:
    """Every graph of a corpus folder, in the order of their names."""
    for name in list_graphs(directory):
        yield load(name, directory)


# --- arrays as text -----------------------------------------------------------------------------


def _dtype(name: str) -> np.dtype:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """An array as a JSON object: dtype, shape, and its little-endian bytes (zlib, base64)."""
    array = np.asarray(array)
    packed = zlib.compress(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), 9)
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "data": base64.b64encode(packed).decode("ascii"),
    }


def decode_array(record: Mapping[str, Any]) -> np.ndarray:
    """The array that :func:`encode_array` wrote."""
    raw = zlib.decompress(base64.b64decode(record["data"]))
    return np.frombuffer(raw, dtype=_dtype(record["dtype"])).reshape(record["shape"]).copy()


# --- inputs -------------------------------------------------------------------------------------


def draw(
    rule: Sequence[Any], key: str, shape: Sequence[int], dtype: str, seed: int = 0
) -> np.ndarray:
    """Numbers by rule, from the legacy ``RandomState`` stream (the same on every numpy version).

    Parameters
    ----------
    rule : sequence
        ``["normal", mean, std]``, ``["uniform", low, high]``, ``["integers", low, high]`` (high not
        included), ``["words"]`` (all bits of an unsigned integer), ``["values", {encoded array}]``.
    key : str
        Names the stream, together with `seed`.
    shape : sequence of int
        Shape of the result.
    dtype : str
        Element type of the result; floats are drawn in float64 and rounded.
    seed : int
        0 gives the inputs that the golden outputs belong to.

    Raises
    ------
    InputError
        For an unknown rule, or fixed values of another shape.
    """
    kind, args = rule[0], list(rule[1:])
    shape = tuple(int(extent) for extent in shape)
    if kind == "values":
        values = decode_array(args[0])
        if values.shape != shape:
            raise InputError(f"input {key!r} has fixed values of shape {values.shape}, not {shape}")
        return values.astype(_dtype(dtype))
    stream = np.random.RandomState(zlib.crc32(f"{seed}/{key}".encode()))
    if kind == "normal":
        return np.asarray(stream.standard_normal(shape) * args[1] + args[0]).astype(_dtype(dtype))
    if kind == "uniform":
        span = stream.random_sample(shape) * (args[1] - args[0])
        return np.asarray(span + args[0]).astype(_dtype(dtype))
    if kind == "integers":
        return np.asarray(stream.randint(args[0], args[1], shape, dtype=np.int64)).astype(
            _dtype(dtype)
        )
    if kind == "words":
        raw = stream.bytes(int(np.prod(shape, dtype=np.int64)) * _dtype(dtype).itemsize)
        return np.frombuffer(raw, _dtype(dtype).newbyteorder("<")).reshape(shape).astype(dtype)
    raise InputError(f"input {key!r} has the unknown drawing rule {kind!r}")


@dataclass(frozen=True)
class Input:
    """One parameter of the graph's function.

    Attributes
    ----------
    name : str
        Name of the Relax variable.
    shape : tuple of int or str
        Extents; a string is a symbolic size or arithmetic over them.
    dtype : str
        Element type.
    rule : list
        How it is drawn, see :func:`draw`.
    key : str
        Stream it is drawn from; tied weights share one.
    weight : bool
        Whether it is a parameter of the model (and so constant from call to call).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    rule: list[Any]
    key: str
    weight: bool

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape at given symbolic sizes."""
        return tuple(evaluate(extent, sizes) for extent in self.shape)

    def array(self, sizes: Mapping[str, int], seed: int = 0) -> np.ndarray:
        """The numbers for this input."""
        # Another seed means other activations; weights (and fixed tables) stay what they are.
        stream = 0 if self.weight else seed
        return draw(self.rule, self.key, self.extents(sizes), self.dtype, stream)


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """How far outputs are from the golden ones.

    Attributes
    ----------
    max_rel_err : float
        Over all outputs: largest absolute difference divided by the largest magnitude in that
        output; infinity where a number is not finite, or a shape or the count of outputs differs.
    tol : float
        What is allowed.
    worst : str
        The output with the largest error, and what is wrong with it if it is no number.
    """

    max_rel_err: float
    tol: float
    worst: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.max_rel_err <= self.tol

    def __bool__(self) -> bool:
        return self.ok


def _relative_error(got: np.ndarray, want: np.ndarray) -> tuple[float, str]:
    if got.shape != want.shape:
        return float("inf"), f"shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return 0.0, ""
    left, right = got.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(left).all():
        return float("inf"), "has numbers that are not finite"
    scale = float(np.abs(right).max())
    return float(np.abs(left - right).max() / (scale if scale else 1.0)), ""


@dataclass
class Graph:
    """One module with everything needed to run and to judge it.

    Attributes
    ----------
    name : str
        Name in the corpus.
    info : dict
        source, source_version, special, tags, symbols, bindings, dtype, runs_on, size.
    text : str
        The module as TVMScript (tensor constants appear as ``metadata[...]``); empty when it was
        built in memory.
    input_specs : list of Input
        The function's parameters in call order.
    """

    name: str
    info: dict[str, Any]
    text: str
    input_specs: list[Input]
    record: dict[str, Any] = field(repr=False, default_factory=dict)
    _mod: tvm.IRModule | None = field(repr=False, default=None)

    @classmethod
    def from_record(
        cls, name: str, record: dict[str, Any], text: str, mod: tvm.IRModule | None = None
    ) -> Graph:
        """A graph from its JSON record and its module (text, or already in memory)."""
        specs = [
            Input(
                name=item["name"],
                shape=tuple(item["shape"]),
                dtype=item["dtype"],
                rule=item["draw"],
                key=item.get("key", item["name"]),
                weight=bool(item.get("weight", False)),
            )
            for item in record["inputs"]
        ]
        info = {k: v for k, v in record.items() if k not in ("inputs", "golden", "constants")}
        return cls(name, info, text, specs, record, mod)

    @property
    def function(self) -> str:
        """Name of the function to call."""
        return str(self.info["function"])

    @property
    def tags(self) -> tuple[str, ...]:
        """Short words to select graphs by ("mpt", "decode", "alibi", "symbolic", ...)."""
        return tuple(self.info["tags"])

    @property
    def digest(self) -> str:
        """A short hash of the module's text and constants: what a recorded result belongs to."""
        constants = json.dumps(self.record.get("constants", []), sort_keys=True)
        return hashlib.sha256(f"{self.text}\n{constants}".encode()).hexdigest()[:12]

    @property
    def mod(self) -> tvm.IRModule:
        """The module (parsed once, then shared: passes do not change it in place)."""
        if self._mod is None:
            constants = [decode_array(item) for item in self.record.get("constants", [])]
            self._mod = _cached_module(self.text, constants, self.name)
        return self._mod

    def sizes(self, **sizes: int) -> dict[str, int]:
        """Symbolic sizes, those of the golden run unless given.

        Parameters
        ----------
        **sizes : int
            By what the size means (``past=7``) or by its name in the module.
        """
        symbols: dict[str, dict[str, Any]] = self.info.get("symbols", {})
        result = {name: int(entry["value"]) for name, entry in symbols.items()}
        by_meaning = {entry["means"]: name for name, entry in symbols.items()}
        for key, value in sizes.items():
            name = by_meaning.get(key, key)
            if name not in result:
                raise UnknownNameError(
                    f"symbolic size of graph {self.name}", key, [*by_meaning, *result]
                )
            result[name] = int(value)
        return result

    def inputs(self, seed: int = 0, **sizes: int) -> list[np.ndarray]:
        """Arguments of the function in call order.

        Parameters
        ----------
        seed : int
            0 for the inputs of the golden run; another seed draws other activations and states
            (weights stay).
        **sizes : int
            Symbolic sizes, see :meth:`sizes`.
        """
        at = self.sizes(**sizes)
        return [spec.array(at, seed) for spec in self.input_specs]

    def golden(self) -> list[np.ndarray]:
        """Outputs of the source framework for ``inputs()``, tuples flattened."""
        return [decode_array(item) for item in self.record["golden"]["outputs"]]

    @property
    def tolerance(self) -> float:
        """Allowed :attr:`Comparison.max_rel_err`."""
        return float(self.info["tolerance"]["rel"])

    @property
    def tolerance_reason(self) -> str:
        """Why the tolerance is what it is."""
        return str(self.info["tolerance"]["reason"])

    def compare(
        self, outputs: Sequence[np.ndarray], want: Sequence[np.ndarray] | None = None
    ) -> Comparison:
        """Compare flat outputs with the golden ones (or with `want`)."""
        want = self.golden() if want is None else want
        if len(outputs) != len(want):
            found = f"{len(outputs)} outputs, expected {len(want)}"
            return Comparison(float("inf"), self.tolerance, found)
        worst, where = 0.0, "output 0"
        for index, (left, right) in enumerate(zip(outputs, want, strict=True)):
            error, problem = _relative_error(np.asarray(left), np.asarray(right))
            if error > worst:
                worst, where = error, f"output {index}" + (f": {problem}" if problem else "")
        return Comparison(worst, self.tolerance, where)


# --- modules ------------------------------------------------------------------------------------


def parse_module(
    text: str, constants: Sequence[np.ndarray] = (), name: str = "module"
) -> tvm.IRModule:
    """Parse TVMScript as ``mod.script()`` prints it, tensor constants given apart.

    Parameters
    ----------
    text : str
        The script; it needs no imports.
    constants : sequence of numpy.ndarray
        What ``metadata["ir.GenericConst"][i]`` stands for.
    name : str
        Used in the error text.

    Raises
    ------
    InputError
        When the text does not parse.
    """
    from tvm import relax
    from tvm.script import from_source
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    names = {
        "I": I,
        "R": R,
        "T": T,
        "TypeVar": typing.TypeVar,
        "metadata": {"ir.GenericConst": [relax.const(array) for array in constants]},
    }
    try:
        parsed = from_source(text, names)
    except Exception as err:  # the parser raises several unrelated types
        raise InputError(f"the TVMScript of {name!r} does not parse: {err}") from err
    return parsed


def _cached_module(text: str, constants: Sequence[np.ndarray], name: str) -> tvm.IRModule:
    """Parse, or reload what an earlier parse of the same text left in the user's cache folder.

    Parsing takes about a second for 250 bindings, reloading a hundredth of that. Without a folder
    that can be written it simply parses.
    """
    import tvm

    digest = hashlib.sha256(f"{tvm.__version__}\n{text}".encode())
    for array in constants:
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "relax_llm_passes" / "graphs" / f"{digest.hexdigest()[:32]}.json"
    try:
        return tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except Exception:  # absent, or damaged: parse again
        parsed = parse_module(text, constants, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.part")
        scratch.write_text(tvm.ir.save_json(parsed), encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        pass  # a read-only home costs time, nothing else
    return parsed
