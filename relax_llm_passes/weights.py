"""Weights from files, matched with the parameters of a compiled function.

`.npz`, `.safetensors`, `model.safetensors.index.json` with its parts, a folder that holds one of
these, or the `.pt2` file that the module came from. The format of safetensors is read here: eight
bytes with the length of a JSON header, the header (name to dtype, shape and place), the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import InputError

__all__ = ["Weights", "match_weights", "read_weights"]

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


class Weights(Mapping[str, np.ndarray]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, path: str, readers: dict[str, Callable[[], np.ndarray]]) -> None:
        self.path = path
        self._readers = readers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def read_weights(path: str | Path) -> Weights:
    """Open a file of weights, or a folder with one.

    Raises
    ------
    InputError
        When there is none, or it cannot be read; the text says where it is broken.
    """
    path = Path(path)
    if path.is_dir():
        names = ("model.safetensors.index.json", "model.safetensors", "model.npz")
        found = next((path / n for n in names if (path / n).is_file()), None)
        if found is None:
            raise InputError(f"{path} holds no weights: expected one of {', '.join(names)}")
        path = found
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    if path.name.endswith(".index.json"):
        return Weights(str(path), _indexed(path))
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".pt2":
        return Weights(str(path), _exported(path))
    if start[:4] == b"PK\x03\x04":
        return Weights(str(path), _npz(path))
    if len(start) == 9 and start[8:9] == b"{":
        return Weights(str(path), _safetensors(path))
    raise InputError(f"{path} is neither .npz nor .safetensors nor .pt2")


def _npz(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    try:
        file = np.load(path, allow_pickle=False)
        return {name: partial(file.__getitem__, name) for name in file.files}
    except Exception as error:
        raise InputError(f"{path} is no readable .npz file: {error}") from None


def _exported(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    """The weights that a program saved by `torch.export.save` holds."""
    from .extract.require import require

    torch: Any = require("torch", "reading a .pt2 file")
    try:
        tensors = dict(torch.export.load(str(path)).state_dict)
    except Exception as error:
        raise InputError(f"{path} is no exported program of this torch version: {error}") from None

    def read(name: str) -> np.ndarray:
        tensor = tensors[name].detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:  # numpy has none
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    return {name: partial(read, name) for name in tensors}


def _indexed(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    try:
        places = json.loads(path.read_text())["weight_map"]
        parts = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} is no index of safetensors files: {error}") from None
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for part in parts:
        if not (path.parent / part).is_file():
            raise InputError(f"{path} names {part}, which is not there")
        readers.update(_safetensors(path.parent / part))
    return readers


def _safetensors(path: Path) -> dict[str, Callable[[], np.ndarray]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise InputError(
                f"{path} is cut off: its header should have {length} bytes, the file has {size}"
            )
        try:
            header = json.loads(file.read(length))
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
            readers = {}
            for name, entry in entries.items():
                first, last = (int(o) for o in entry["data_offsets"])
                shape = tuple(int(s) for s in entry["shape"])
                dtype = _DTYPES[entry["dtype"]]
                kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
                if last - first != int(np.prod(shape, dtype=np.int64)) * kind.itemsize:
                    raise InputError(f"{path}: {name} has {last - first} bytes for shape {shape}")
                if 8 + length + last > size:
                    raise InputError(
                        f"{path} is cut off: {name} ends at byte {8 + length + last} of {size}"
                    )
                readers[name] = _mapped(path, 8 + length + first, shape, kind)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is no safetensors file: {error!r}") from None
    return readers


def _mapped(
    path: Path, offset: int, shape: tuple[int, ...], kind: np.dtype
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return np.fromfile(path, kind, count, offset=offset).reshape(shape)

    return read


def _plain(name: str) -> str:
    return re.sub(r"[^0-9a-z]+", "_", name.lower()).strip("_")


def match_weights(
    params: Sequence[Mapping[str, Any]],
    weights: Weights,
    known: Mapping[str, Sequence[str]] | None = None,
    some: bool = False,
) -> dict[str, np.ndarray]:
    """Return the tensor for every parameter.

    A parameter's tensor is the one of its own name, or of a name that `known` gives for it (from
    extraction), or the only one whose name, dots as underscores, is the parameter's or its end
    (`p_model_model_norm_weight`: `model.norm.weight`).

    Parameters
    ----------
    params : sequence of mapping
        As in a signature: {"name", "type": {"shape", "dtype"}}.
    weights : Weights
        From :func:`read_weights`.
    known : mapping, optional
        From a parameter's name to names in files.
    some : bool
        Parameters without a tensor are left out, as long as one has one.

    Raises
    ------
    InputError
        When tensors are missing, or one has another shape or kind of numbers.
    """
    plain: dict[str, list[str]] = {}
    for name in weights:
        plain.setdefault(_plain(name), []).append(name)
    chosen: dict[str, str] = {}
    missing = []
    for param in params:
        name = param["name"]
        source = _source(name, weights, plain, (known or {}).get(name, ()))
        if source is None:
            missing.append(name)
        else:
            chosen[name] = source
    if missing and not (some and chosen):
        few = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        held = ", ".join(list(weights)[:4]) + (", ..." if len(weights) > 4 else "")
        raise InputError(
            f"{weights.path} lacks {len(missing)} of {len(params)} weights ({few}); it holds "
            f"{len(weights)} tensors ({held or 'none'})"
        )
    return {
        param["name"]: _fitted(
            param, weights[chosen[param["name"]]], chosen[param["name"]], weights
        )
        for param in params
        if param["name"] in chosen
    }


def _source(
    name: str, weights: Weights, plain: Mapping[str, list[str]], known: Sequence[str]
) -> str | None:
    for wanted in (name, *known):
        if wanted in weights:
            return wanted
    # The longest end of the parameter's name that is the name of one tensor.
    words = _plain(name).split("_")
    for start in range(len(words)):
        found = plain.get("_".join(words[start:]), ())
        if len(found) == 1:
            return found[0]
    return None


def _fitted(
    param: Mapping[str, Any], array: np.ndarray, source: str, weights: Weights
) -> np.ndarray:
    ty = param["type"]
    shape, dtype = ty.get("shape"), ty["dtype"]
    where = f"{weights.path}: {source} for {param['name']}"
    fits = shape is None or (
        len(shape) == array.ndim
        and all(isinstance(a, str) or a == b for a, b in zip(shape, array.shape, strict=True))
    )
    if not fits:
        raise InputError(f"{where} has shape {array.shape}, expected {tuple(shape)}")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    # numpy's files know no bfloat16: it comes back as raw bytes of the same size.
    if array.dtype.kind == "V" and array.dtype.itemsize == kind.itemsize:
        array = array.view(kind)
    if array.dtype == kind:
        return np.require(array, requirements="C")
    if _floating(array.dtype) and _floating(kind):
        return array.astype(kind, order="C")
    raise InputError(f"{where} is {array.dtype}, expected {dtype}")


def _floating(kind: np.dtype) -> bool:
    return kind.kind == "f" or "float" in kind.name
