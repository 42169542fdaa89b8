"""The bundle for a bare GPU machine: built, carried away and run where a device is emulated."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from relax_llm_passes.corpus import Graph, encode_array
from relax_llm_passes.cuda_on_cpu import real_gpu_missing

ROOT = Path(__file__).resolve().parents[2]

MODULE = """
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((1, 48), "float32"), w: R.Tensor((20, 48), "float32"),
             b: R.Tensor((20,), "bfloat16")):
        with R.dataflow():
            wt = R.permute_dims(w, axes=[1, 0])
            y = R.matmul(x, wt, out_dtype="float32")
            z = R.add(R.astype(y, "bfloat16"), b)
            out = (R.nn.relu(y), z)
            R.output(out)
        return out
"""


def corpus_of_one_graph(folder):
    """A corpus with the graph "tiny": fp32 and bf16 inputs and outputs."""
    draw = ["normal", 0.0, 1.0]
    record = {
        "source": "this test", "tags": [], "function": "main", "symbols": {},
        "tolerance": {"rel": 1e-2, "reason": "two roundings to bf16"},
        "inputs": [
            {"name": "x", "shape": [1, 48], "dtype": "float32", "draw": draw},
            {"name": "w", "shape": [20, 48], "dtype": "float32", "draw": draw},
            {"name": "b", "shape": [20], "dtype": "bfloat16", "draw": draw},
        ],
    }  # fmt: skip
    x, w, b = Graph.from_record("tiny", record, MODULE).inputs()
    y = x.astype("f8") @ w.astype("f8").T
    outputs = [np.maximum(y, 0).astype("f4"), (y + b.astype("f8")).astype(ml_dtypes.bfloat16)]
    record["golden"] = {"outputs": [encode_array(a) for a in outputs]}
    (folder / "modules").mkdir(parents=True)
    (folder / "modules" / "tiny.json").write_text(json.dumps(record))
    (folder / "modules" / "tiny.py").write_text(MODULE)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder for PYTHONPATH where there is no torch, which TVM imports where it finds it."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "torch.py").write_text("raise ImportError('there is no torch')\n")
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, bare):
    folder = tmp_path_factory.mktemp("bundle")
    corpus_of_one_graph(folder / "corpus")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_bundle.py"), str(folder / "carried"),
               "--graph", "tiny", "--emulated"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{bare}{os.pathsep}{ROOT}",
                   "RELAX_LLM_CORPUS": str(folder / "corpus")}  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "carried"


@pytest.fixture
def run_bundle(bare):
    """The bundle's command in a process that has only the bundle's TVM, which has no compiler."""

    def run(bundle, where, *arguments, emulated=True):
        return run_command(bare, bundle, where, arguments, emulated)

    return run


def run_command(bare, bundle, where, arguments, emulated):
    command = [sys.executable]
    paths = [str(bundle / "python"), str(bare)]
    if emulated:
        command += ["-m", "relax_llm_passes.cuda_on_cpu"]
        paths.append(str(ROOT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths),
                   "TVM_USE_RUNTIME_LIB": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command += [str(bundle / "run_on_gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=where, env=environment)


def snapshot(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_holds_what_a_bare_machine_needs(bundle):
    names = {p.name for p in bundle.rglob("*")}
    assert {"libtvm_runtime.so", "libtvm_runtime_cuda.so", "libtvm_ffi.so", "manifest.json",
            "tiny.in0.npy", "tiny.out1.npy", "run_on_gpu.py"} <= names  # fmt: skip
    assert not any("compiler" in n for n in names if n.endswith(".so"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert [r["pipeline"] for r in manifest["rows"]] == ["tvm", "relax_llm"]
    assert not any("failed" in r for r in manifest["rows"])


def test_its_command_checks_times_and_writes_outside_the_bundle(bundle, run_bundle, tmp_path):
    before = snapshot(bundle)
    done = run_bundle(bundle, tmp_path, "--repeat", "3")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "benchmarks/results/cuda-on-cpu.json").read_text())
    assert record["device"] == "CUDA on CPU" and record["emulated"] is True
    assert [r["pipeline"] for r in record["rows"]] == ["tvm", "relax_llm"]
    for row in record["rows"]:
        assert row["equal"] and row["error"] <= row["tolerance"]
        assert row["milliseconds"]["least"] <= row["milliseconds"]["median"]
    assert snapshot(bundle) == before


def test_a_wrong_result_is_an_exit_code_and_a_row(bundle, run_bundle, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(bundle, broken)
    golden = np.load(broken / "tiny.out1.npy")
    golden[0, 7] ^= 0x8000  # a sign
    np.save(broken / "tiny.out1.npy", golden)
    done = run_bundle(broken, tmp_path, "--repeat", "1", "--output", str(tmp_path / "found.json"))
    assert done.returncode == 1
    assert "1 of this package's modules failed or differ" in done.stderr
    for row in json.loads((tmp_path / "found.json").read_text())["rows"]:
        assert not row["equal"] and row["error"] > row["tolerance"] and "milliseconds" not in row


def test_nowhere_to_write_is_said_before_anything_runs(bundle, run_bundle, tmp_path):
    (tmp_path / "file").write_text("")
    done = run_bundle(bundle, tmp_path, "--output", str(tmp_path / "file" / "found.json"))
    assert done.returncode == 2
    assert "cannot write the results" in done.stderr and "--output" in done.stderr


@pytest.mark.skipif(not real_gpu_missing(), reason="this machine has a GPU")
def test_no_gpu_is_said(bundle, run_bundle, tmp_path):
    done = run_bundle(bundle, tmp_path, emulated=False)
    assert done.returncode == 2
    assert "no usable GPU here" in done.stderr or "no CUDA device" in done.stderr
