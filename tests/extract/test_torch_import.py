"""Importing torch programs: each known fault of the importer, against torch's own numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.errors import InputError
from relax_llm_passes.extract import (
    export_module,
    extract_hf,
    find_importer_faults,
    import_exported,
    load_pt2,
)

torch = pytest.importorskip("torch")


def _run(mod: tvm.IRModule, *arrays: np.ndarray) -> list[np.ndarray]:
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [each.numpy() for each in ([result] if hasattr(result, "numpy") else result)]


def _random(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.RandomState(sum(shape)).standard_normal(shape).astype(dtype)


class _Last(torch.nn.Module):
    def forward(self, x):
        return x[:, -1] + x[:, -3, 0][:, None]


def test_negative_select_reads_the_end() -> None:
    x = _random(2, 5, 3)
    program = export_module(_Last(), (torch.from_numpy(x),))
    mod = import_exported(program)
    assert find_importer_faults(mod) == []
    np.testing.assert_allclose(_run(mod, x)[0], x[:, -1] + x[:, -3, 0][:, None], rtol=1e-6)


def test_negative_select_of_a_symbolic_axis_reads_the_end() -> None:
    x = _random(2, 5, 3)
    size = torch.export.Dim("n", min=4, max=64)
    program = export_module(_Last(), (torch.from_numpy(x),), {"x": {1: size}})
    mod = import_exported(program)
    for length in (5, 9):
        x = _random(2, length, 3)
        np.testing.assert_allclose(_run(mod, x)[0], x[:, -1] + x[:, -3, 0][:, None], rtol=1e-6)


def test_the_stock_importer_still_has_the_fault_that_the_detector_finds() -> None:
    from tvm.relax.frontend.torch import from_exported_program

    program = export_module(_Last(), (torch.zeros(2, 5, 3),))
    assert len(find_importer_faults(from_exported_program(program))) == 2


@pytest.mark.parametrize("bias", [False, True])
def test_half_products_keep_their_type(bias: bool) -> None:
    layer = torch.nn.Linear(16, 8, bias=bias).half()
    program = export_module(layer, (torch.zeros(3, 16, dtype=torch.float16),))
    function = import_exported(program)["main"]
    assert str(function.ret_ty.dtype.dtype) == "float16"


class _Bias(torch.nn.Module):
    """A table sliced from its end by a size, as ALiBi models do."""

    def forward(self, scores):
        table = torch.arange(-31, 1, dtype=torch.float32)
        return scores + table[max(0, 32 - scores.shape[1]) :]


def test_a_slice_counted_from_the_end_keeps_its_shape() -> None:
    size = torch.export.Dim("n", min=3, max=20)
    program = export_module(_Bias(), (torch.zeros(2, 7),), {"scores": {1: size}})
    mod = import_exported(program)
    assert mod["main"].ret_ty.shape is not None
    for length in (3, 11):
        x = _random(2, length)
        want = x + np.arange(1 - length, 1, dtype="float32")
        np.testing.assert_allclose(_run(mod, x)[0], want, rtol=1e-6)


def test_attention_stays_whole_on_request() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    arrays = [_random(1, 2, 4, 8) + i for i in range(3)]
    program = export_module(Attend(), tuple(torch.from_numpy(a) for a in arrays))
    whole = import_exported(program, keep_attention=True)
    spelled = import_exported(program)
    assert "R.nn.attention" in whole.script() and "R.nn.attention" not in spelled.script()
    want = Attend()(*[torch.from_numpy(a) for a in arrays]).numpy()
    for mod in (whole, spelled):
        np.testing.assert_allclose(_run(mod, *arrays)[0], want, rtol=2e-5, atol=2e-5)


def test_pt2_file_round_trip(tmp_path) -> None:
    program = export_module(_Last(), (torch.zeros(2, 5, 3),))
    path = tmp_path / "last.pt2"
    torch.export.save(program, str(path))
    x = _random(2, 5, 3)
    got = _run(load_pt2(path), x)[0]
    np.testing.assert_allclose(got, x[:, -1] + x[:, -3, 0][:, None], rtol=1e-6)


def test_pt2_errors_name_the_file(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no such file.*absent\.pt2"):
        load_pt2(tmp_path / "absent.pt2")
    path = tmp_path / "broken.pt2"
    path.write_bytes(b"not a program")
    with pytest.raises(InputError, match=r"broken\.pt2"):
        load_pt2(path)


def test_missing_extra_is_named(monkeypatch) -> None:
    import relax_llm_passes.extract.require as module

    def refuse(name: str):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module.importlib, "import_module", refuse)
    with pytest.raises(InputError, match=r"relax_llm_passes\[extract\]"):
        load_pt2("model.pt2")


def test_untraceable_module_is_an_input_error() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match="Branch"):
        export_module(Branch(), (torch.zeros(3),))


@pytest.fixture
def llama_folder(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 31,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_config_folder_gives_a_decode_module(llama_folder) -> None:
    pytest.importorskip("transformers")
    mod = extract_hf(llama_folder, mode="decode")
    assert relax.analysis.well_formed(mod) is not False
    function = mod["main"]
    assert int(function.attrs["num_input"]) == 3
    key = function.params[1].ty.shape.values
    assert [int(e.value) for e in (key[0], key[1], key[3])] == [1, 2, 8]
    assert not hasattr(key[2], "value"), "the past must be symbolic"
    assert find_importer_faults(mod) == []


def test_config_folder_errors(tmp_path, llama_folder) -> None:
    pytest.importorskip("transformers")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        extract_hf(empty)
    with pytest.raises(InputError, match="did you mean 'decode'"):
        extract_hf(llama_folder, mode="decod")
    with pytest.raises(InputError, match="float32"):
        extract_hf(llama_folder, dtype="float33")
