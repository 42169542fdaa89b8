"""`extract`, and what it is followed by: model folders and `.pt2` files, and every error line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import relax

from relax_llm_passes import report
from relax_llm_passes.cli import main
from relax_llm_passes.fusion.inplace_kv_cache import InplaceKVCache
from relax_llm_passes.module_io import read_module

torch = pytest.importorskip("torch")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
    "max_position_embeddings": 64,
}


def one_line(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must end with one line on stderr and exit code 2."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 2
    found = capsys.readouterr()
    assert len(found.err.splitlines()) == 1 and "Traceback" not in found.err
    return found.err


@pytest.mark.parametrize(
    ("mode", "inputs", "caches"),
    [
        ("decode", ["main with 26 inputs"], 4),
        pytest.param("generate", ["prefill with 22", "decode with 26"], 8, marks=pytest.mark.slow),
    ],
)
def test_a_folder_with_a_config_gives_functions(
    tmp_path: Path, capsys: Any, mode: str, inputs: list[str], caches: int
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    out = tmp_path / "new" / "m.py"
    assert main(["extract", str(tmp_path), "--mode", mode, "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert all(line in text for line in inputs)
    mod = read_module(out).mod
    relax.analysis.well_formed(mod)
    # Every layer reads the cache that is its own, once.
    with report.collect() as found:
        InplaceKVCache(max_length=32)(mod)
    assert found.matched()["inplace_kv_cache"] == caches and not found.refused()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "prefill_cache", "decode"])
def test_every_mode_compiles_and_agrees_with_plain_tvm(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    out = str(tmp_path / "m.json")
    assert main(["extract", str(tmp_path), "--mode", mode, "--batch", "2", "-o", out]) == 0
    assert main(["check", out, "--no-upstream"]) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "lama"}, "no model_type 'lama'; did you mean 'llama'"),
        (LLAMA | {"model_type": "zzzz9"}, "knows no model_type 'zzzz9'"),
        ({"hidden_size": 3}, "names no model_type"),
        ([1], "names no model_type"),
        (LLAMA | {"model_type": "clip"}, "clip is no causal language model"),
        (LLAMA | {"hidden_act": "zzz"}, "cannot build a causal model"),
        (LLAMA | {"hidden_size": "wide"}, "cannot build a causal model"),
        (LLAMA | {"num_attention_heads": 0}, "cannot build a causal model"),
    ],
)
def test_configurations_that_cannot_be_built(
    tmp_path: Path, capsys: Any, config: Any, message: str
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in one_line(capsys, "extract", tmp_path, "-o", tmp_path / "m.py")


def test_broken_files_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert "holds no config.json" in one_line(capsys, "extract", tmp_path / "absent")
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama",')
    assert "config.json cannot be read" in one_line(capsys, "extract", tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "config.json cannot be read" in one_line(capsys, "extract", tmp_path)
    path.write_text(json.dumps(LLAMA))
    for option, message in (
        (["--mode", "decod"], "did you mean 'decode'"),
        (["--dtype", "float33"], "unknown dtype 'float33'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--batch", "0"], "batch must be positive"),
        (["--longest", "2"], "at least 4"),
    ):
        assert message in one_line(capsys, "extract", tmp_path, *option)
    path.write_text(
        json.dumps(
            {"model_type": "rwkv", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 31}
        )
    )
    assert "takes no key/value cache" in one_line(capsys, "extract", tmp_path)


def test_without_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "m.pt2").write_bytes(b"PK\x03\x04")
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    for command in (["extract", tmp_path], ["compile", tmp_path / "m.pt2"]):
        text = one_line(capsys, *command)
        assert "pip install 'relax_llm_passes[extract]'" in text


class Layer(torch.nn.Module):
    """A product, a bias, and something that takes the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.linear(x))[:, -1]


def test_an_exported_program_compiles_runs_and_gives_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 3, 6)
    size = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: size}})
    path, library = tmp_path / "layer.pt2", tmp_path / "layer.so"
    torch.export.save(program, str(path))
    assert main(["compile", str(path), "-o", str(library)]) == 0
    x = torch.randn(2, 7, 6)
    np.savez(tmp_path / "x.npz", x=x.numpy())
    out = tmp_path / "y.npz"
    command = ["run", library, "--inputs", tmp_path / "x.npz", "--output", out, "--params", path]
    assert main([str(a) for a in command]) == 0
    with torch.no_grad():
        want = layer(x).numpy()
    np.testing.assert_allclose(np.load(out)["out0"], want, rtol=1e-5, atol=1e-6)
    assert main(["check", str(path), "--no-upstream"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("content", [b"PK\x03\x04nothing", b"PK\x03\x04" + b"\0" * 99])
def test_broken_exported_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "broken.pt2"
    path.write_bytes(content)
    text = one_line(capsys, "compile", path)
    assert "broken.pt2 is not an exported program" in text and len(text) < 400
