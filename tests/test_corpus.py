"""The committed graphs: they load, they agree with their description, and stock TVM reproduces the
golden outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes import corpus
from relax_llm_passes.errors import InputError, UnknownNameError

FOLDER = Path(__file__).resolve().parent / "graphs"
NAMES = corpus.list_graphs(FOLDER)
UPSTREAM = json.loads((FOLDER / "upstream.json").read_text(encoding="utf-8"))
# What stock TVM cannot compile, upstream.json records; graphs bound to GPU threads have no llvm
# entry.
RUNNABLE = [n for n in NAMES if UPSTREAM.get(n, {}).get("llvm") == "ok"]
# Small, and of different kinds: ALiBi with match_cast, rotary with constants, group_norm,
# PrimFuncs, quantised.
SAMPLE = ["llama_mlc_decode_q4f16_1", "mpt_hf_decode", "rwkv5_mlc_decode", "rwkv5_package_decode"]


def _flat(value) -> list[np.ndarray]:
    if hasattr(value, "numpy"):
        return [value.numpy()]
    return [leaf for item in value for leaf in _flat(item)]


def _run(graph: corpus.Graph, inputs: list[np.ndarray]) -> list[np.ndarray]:
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    machine = relax.VirtualMachine(tvm.compile(graph.mod, target), tvm.cpu())
    return _flat(machine[graph.function](*[tvm.runtime.tensor(a) for a in inputs]))


def _check_description(graph: corpus.Graph) -> None:
    relax.analysis.well_formed(graph.mod)
    params = graph.mod[graph.function].params
    assert [p.name for p in params] == [spec.name for spec in graph.input_specs]
    sizes = graph.sizes()
    for param, spec, array in zip(params, graph.input_specs, graph.inputs(), strict=True):
        declared = [int(e.value) if hasattr(e, "value") else str(e) for e in param.ty.shape.values]
        assert declared == list(spec.shape)
        assert array.shape == spec.extents(sizes)
        assert array.dtype.name == str(param.ty.dtype.dtype) == spec.dtype
        assert np.isfinite(np.asarray(array, np.float64)).all()
    golden = graph.golden()
    assert golden and all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in golden)
    assert graph.compare(golden).ok
    assert graph.tolerance_reason and graph.info["source"] and graph.info["source_version"]


def test_the_families_are_there() -> None:
    tags = {tag for name in NAMES for tag in corpus.load(name, FOLDER).tags}
    wanted = (
        "mpt alibi llama neox gptj bloom phi rwkv4 rwkv5 rwkv6 rwkv7 mlc q4 q8 float16 bfloat16 "
        "gqa llama3 dail symbolic prefill decode cache whole"
    )
    assert set(wanted.split()) <= tags


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_agrees_with_its_description(name: str) -> None:
    _check_description(corpus.load(name, FOLDER))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_graph_agrees_with_its_description(name: str) -> None:
    _check_description(corpus.load(name, FOLDER))


@pytest.mark.parametrize("name", ["mpt_hf_decode", "rwkv5_package_decode"])
def test_stock_tvm_reproduces_the_sample(name: str) -> None:
    graph = corpus.load(name, FOLDER)
    result = graph.compare(_run(graph, graph.inputs()))
    assert result.ok, result


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNABLE)
def test_stock_tvm_reproduces_every_graph_it_can_compile(name: str) -> None:
    graph = corpus.load(name, FOLDER)
    result = graph.compare(_run(graph, graph.inputs()))
    assert result.ok, result


def test_golden_outputs_depend_on_every_kind_of_input() -> None:
    """A graph that ignored its state or weights would also reproduce its golden outputs."""
    graph = corpus.load("rwkv5_package_decode", FOLDER)
    inputs = graph.inputs()
    machine = relax.VirtualMachine(tvm.compile(graph.mod, "llvm"), tvm.cpu())
    for index, spec in enumerate(graph.input_specs):
        if spec.weight and "blocks_1" not in spec.name and "blocks_0" in spec.name:
            continue  # one layer's weights are enough
        changed = list(inputs)
        if spec.dtype.startswith("int"):
            changed[index] = (inputs[index] + 1) % 97
        else:
            changed[index] = (inputs[index] * 1.5 + 0.25).astype(inputs[index].dtype)
        outputs = _flat(machine[graph.function](*[tvm.runtime.tensor(a) for a in changed]))
        assert not graph.compare(outputs).ok, f"{spec.name} has no influence"


def test_inputs_are_the_same_every_time_and_change_with_the_seed() -> None:
    graph = corpus.load("mpt_hf_decode", FOLDER)
    first, second, other = graph.inputs(), graph.inputs(), graph.inputs(seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    for spec, a, b in zip(graph.input_specs, first, other, strict=True):
        if spec.weight:
            assert np.array_equal(a, b)
        elif a.size > 1:
            assert not np.array_equal(a, b)


def test_tied_weights_are_the_same_numbers() -> None:
    graph = corpus.load("mpt_hf_decode", FOLDER)
    drawn = dict(zip([s.name for s in graph.input_specs], graph.inputs(), strict=True))
    embedding = next(v for k, v in drawn.items() if k.endswith("wte_weight"))
    assert np.array_equal(embedding, drawn["p_model_lm_head_weight"])


def test_sizes_by_meaning() -> None:
    graph = corpus.load("mpt_hf_decode", FOLDER)
    past = next(s for s in graph.input_specs if s.name.startswith("past"))
    at = graph.inputs(past=11)[graph.input_specs.index(past)]
    assert at.shape[2] == 11
    with pytest.raises(UnknownNameError, match="did you mean 'past'"):
        graph.inputs(pasts=11)


def test_compare_reports_shape_count_and_nan() -> None:
    graph = corpus.load("mpt_hf_decode", FOLDER)
    golden = graph.golden()
    assert not graph.compare(golden[1:]).ok
    assert not graph.compare([golden[0][..., :-1], *golden[1:]]).ok
    broken = [g.copy() for g in golden]
    broken[2].flat[3] = np.nan
    result = graph.compare(broken)
    assert not result.ok and "output 2" in result.worst
    nudged = [g.copy() for g in golden]
    nudged[1].flat[0] += 1e-2
    assert not graph.compare(nudged).ok


def test_draw_is_pinned() -> None:
    """The golden outputs hang on these numbers: the stream must never change."""
    drawn = corpus.draw(["normal", 0.0, 1.0], "key", (3,), "float64")
    again = np.random.RandomState(__import__("zlib").crc32(b"0/key")).standard_normal(3)
    np.testing.assert_array_equal(drawn, again)
    words = corpus.draw(["words"], "key", (4,), "uint32")
    assert words.dtype == np.uint32 and len(set(words.tolist())) == 4
    with pytest.raises(InputError, match="unknown drawing rule"):
        corpus.draw(["cauchy"], "key", (3,), "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint32", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2)])
def test_arrays_survive_encoding(dtype: str, shape: tuple[int, ...]) -> None:
    kind = corpus._dtype(dtype)
    array = np.asarray(np.random.RandomState(3).standard_normal(shape) * 9).astype(kind)
    again = corpus.decode_array(json.loads(json.dumps(corpus.encode_array(array))))
    assert again.dtype == array.dtype and again.shape == array.shape
    assert again.tobytes() == array.tobytes()


def test_errors_of_the_loader(tmp_path, monkeypatch) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'mpt_hf_decode'"):
        corpus.load("mpt_hf_decod", FOLDER)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "bad.json").write_text("{")
    with pytest.raises(InputError, match="'bad'"):
        corpus.load("bad", tmp_path)
    monkeypatch.setenv("RELAX_LLM_CORPUS", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="--corpus DIR"):
        corpus.list_graphs()
    with pytest.raises(InputError, match="does not parse"):
        corpus.parse_module("class Module(:")


def test_loading_needs_no_torch() -> None:
    code = (
        "import sys; from relax_llm_passes import corpus; g = "
        "corpus.load('mpt_hf_decode', sys.argv[1]);"
        "g.mod; g.inputs(); g.golden()"
    )
    root = str(FOLDER.parent.parent)
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER)], cwd=root, check=False)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mpt_hf_decode", "rwkv5_package_decode", "llama_decode"])
def test_the_generator_gives_what_is_committed(name: str) -> None:
    pytest.importorskip("transformers")
    script = str(FOLDER / "generate.py")
    command = [sys.executable, script, "--check", "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
