"""Weights from files: every format, every dtype, and what is broken in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relax_llm_passes.errors import InputError
from relax_llm_passes.weights import match_weights, read_weights


def safetensors(path: Path, arrays: dict[str, np.ndarray], **more: Any) -> None:
    """Write the format by its definition."""
    names = {
        "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64",
        "int64": "I64", "uint8": "U8", "bool": "BOOL",
    }  # fmt: skip
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    header.update(more)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ARRAYS = {
    "model.norm.weight": np.arange(5, dtype="float32"),
    "model.layers.0.proj.weight": np.arange(6, dtype="float16").reshape(2, 3),
    "bf.weight": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
    "count": np.array(7, "int64"),
    "packed": np.arange(4, dtype="uint8"),
}


def param(name: str, shape: list[int | str], dtype: str) -> dict[str, Any]:
    return {"name": name, "type": {"kind": "tensor", "shape": shape, "dtype": dtype}}


@pytest.mark.parametrize("kind", ["safetensors", "npz", "folder", "index"])
def test_formats(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    if kind == "npz":
        path = tmp_path / "w.npz"
        np.savez(path, **ARRAYS)
    elif kind == "index":
        places = {}
        for i, (name, array) in enumerate(ARRAYS.items()):
            safetensors(tmp_path / f"part{i}.safetensors", {name: array})
            places[name] = f"part{i}.safetensors"
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": places}))
    else:
        safetensors(path, ARRAYS)
    weights = read_weights(tmp_path if kind in ("folder", "index") else path)
    assert set(weights) == set(ARRAYS)
    wanted = [
        param("p_model_model_norm_weight", [5], "float32"),
        param("p_model_layers_0_proj_weight", [2, 3], "float32"),
        param("bf_weight", [1, 2], "bfloat16"),
        param("count", [], "int64"),
        param("packed", ["n"], "uint8"),
    ]
    found = match_weights(wanted, weights)
    for want, (name, array) in zip(ARRAYS.values(), found.items(), strict=True):
        assert array.shape == want.shape, name
        np.testing.assert_array_equal(array.astype("float64"), want.astype("float64"))
    assert found["p_model_layers_0_proj_weight"].dtype == np.float32


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    arrays = {k: v for k, v in ARRAYS.items() if v.dtype.name != "bfloat16"}
    package.save_file(arrays, str(tmp_path / "w.safetensors"))
    for name, array in read_weights(tmp_path / "w.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name])


def test_names_that_extraction_knows_and_names_that_fit_twice(tmp_path: Path) -> None:
    arrays = {"wte.weight": np.ones(3, "float32"), "a.b_c": np.zeros(2), "a_b.c": np.ones(2)}
    np.savez(tmp_path / "w.npz", **arrays)
    weights = read_weights(tmp_path / "w.npz")
    tied = [param("p_lm_head_weight", [3], "float32")]
    known = {"p_lm_head_weight": ["lm_head.weight", "wte.weight"]}
    assert match_weights(tied, weights, known)["p_lm_head_weight"].sum() == 3
    with pytest.raises(InputError, match=r"lacks 1 of 1 weights \(p_lm_head_weight\)"):
        match_weights(tied, weights)
    with pytest.raises(InputError, match="lacks 1 of 1"):  # either could be meant
        match_weights([param("p_a_b_c", [2], "float64")], weights)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (param("count", [1], "int64"), r"shape \(\), expected \(1,\)"),
        (param("packed", [4], "int8"), "is uint8, expected int8"),
        (param("packed", [4], "float32"), "is uint8, expected float32"),
        (param("absent", [4], "float32"), r"lacks 1 of 1 weights \(absent\)"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, wanted: dict[str, Any], message: str) -> None:
    safetensors(tmp_path / "w.safetensors", ARRAYS)
    with pytest.raises(InputError, match=message):
        match_weights([wanted], read_weights(tmp_path / "w.safetensors"))


def test_broken_files(tmp_path: Path) -> None:
    whole = tmp_path / "w.safetensors"
    safetensors(whole, ARRAYS)
    data = whole.read_bytes()
    path = tmp_path / "b.safetensors"
    odd = {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}
    short = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    for content, message in (
        (b"", "is neither"),
        (data[:-1], "is cut off: packed ends at byte"),
        (data[:60], "is cut off: its header"),
        ((9).to_bytes(8, "little") + b"{nonsense", "is no safetensors file"),
        (b"PK\x03\x04rubbish", "no readable .npz"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_weights(path)
    for header, message in ((odd, "F99"), (short, "4 bytes for shape")):
        safetensors(path, {}, **header)
        with pytest.raises(InputError, match=message):
            read_weights(path)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (("{", "no index"), ('{"weight_map": {"a": "gone"}}', "names gone")):
        index.write_text(text)
        with pytest.raises(InputError, match=message):
            read_weights(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        read_weights(tmp_path / "absent.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no weights"):
        read_weights(tmp_path / "empty")
