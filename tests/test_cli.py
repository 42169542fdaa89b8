"""The command line, called as a function: what it prints, its exit codes, its one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from relax_llm_passes.cli import main
from tests.small_modules import TEXT


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A compiled library, with its report."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "m.py").write_text(TEXT)
    out = str(folder / "out" / "m.so")
    written = ["-o", out, "--report", str(folder / "r.json"), "--dump-ir", str(folder / "ir")]
    code = main(["compile", str(folder / "m.py"), "--target", "llvm", *written])
    assert code == 0
    return folder


def one_line(capsys, *arguments: str) -> str:
    """Run a command that must end with one line on stderr and exit code 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert len(found.err.splitlines()) == 1 and "Traceback" not in found.err
    return found.err


def test_list(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in ("CanonicalizeBindings", "LowerComposites", "ScheduleKernels", "LegalizeOps"):
        assert name in out
    assert main(["list", "--json", "--target", "cuda"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"passes", "pipeline", "libraries", "implementations", "targets"} == set(data)
    assert "RewriteCUDAGraph" in [p["name"] for p in data["pipeline"]]


def test_compile_writes_library_signatures_report_and_ir(library):
    sidecar = json.loads((library / "out" / "m.so.json").read_text())
    assert sidecar["target"]["kind"] == "llvm"
    assert set(sidecar["functions"]) == {"main", "second"}
    params = sidecar["functions"]["main"]["params"]
    assert params[0] == {
        "name": "x",
        "type": {"kind": "tensor", "shape": ["n", 5], "dtype": "float32"},
    }
    report = json.loads((library / "r.json").read_text())
    names = [p["name"] for p in report["passes"]]
    assert "CanonicalizeBindings" in names
    assert len(list((library / "ir").iterdir())) == len(names)


def test_run_random_and_given_inputs(library, capsys):
    lib = str(library / "out" / "m.so")
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((9, 5)), rng.standard_normal((5, 7))
    np.savez(library / "i.npz", x=x.astype("float32"), w=w.astype("float32"))
    out = str(library / "o.npz")
    assert main(["run", lib, "--inputs", str(library / "i.npz"), "--output", out]) == 0
    got = np.load(out)["out0"]
    np.testing.assert_allclose(got, 2 * np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert main(["run", lib, "--shape", "n=4", "--repeat", "3", "--json", "-"]) == 0
    text = capsys.readouterr().out
    assert "output 0: float32 (4, 7)" in text and "3 calls" in text
    assert main(["run", lib, "--function", "second", "--shape", "k=3"]) == 0
    assert "(3, 6)" in capsys.readouterr().out


def test_same_seed_same_result(library):
    lib, files = str(library / "out" / "m.so"), []
    for seed in ("1", "1", "2"):
        files.append(str(library / f"s{len(files)}.npz"))
        assert main(["run", lib, "--seed", seed, "--output", files[-1]]) == 0
    a, b, c = (np.load(f)["out0"] for f in files)
    assert (a == b).all() and not np.allclose(a, c)


def test_run_errors(library, capsys):
    lib = str(library / "out" / "m.so")
    np.savez(library / "bad.npz", x=np.zeros((2, 5)))
    np.savez(library / "odd.npz", x=np.zeros((2, 6), "float32"))
    np.savez(library / "name.npz", xx=np.zeros((2, 5), "float32"))
    (library / "junk.npz").write_bytes(b"PK\x03\x04junk")
    with open(library / "one.npz", "wb") as file:
        np.save(file, np.zeros((2, 5), "float32"))
    for arguments, message in (
        (["--inputs", "bad.npz"], "x is float64, expected float32"),
        (["--inputs", "odd.npz"], r"shape (2, 6), expected (2, 5)"),
        (["--inputs", "name.npz"], "unknown input of main 'xx'; did you mean 'x'"),
        (["--inputs", "junk.npz"], "no readable .npz"),
        (["--inputs", "one.npz"], "holds one array"),
        (["--inputs", "none.npz"], "no such file"),
        (["--shape", "m=3"], "unknown symbolic size"),
        (["--shape", "n"], "expected NAME=SIZE"),
        (["--function", "mian"], "did you mean 'main'"),
        (["--shape", "n=" + "9" * 20], "too large"),
        (["--threads", "100000"], "at most 1024"),
        (["--repeat", "0"], "--repeat 0"),
    ):
        given = [str(library / a) if a.endswith(".npz") else a for a in arguments]
        assert message in one_line(capsys, "run", lib, *given)
    assert "no such file" in one_line(capsys, "run", str(library / "none.so"))
    (library / "fake.so").write_text("no library")
    assert ".json is missing" in one_line(capsys, "run", str(library / "fake.so"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "has format 9, expected 1"),
        ({"functions": []}, "is damaged"),
        ({"functions": {"main": {}}}, "is damaged (KeyError: 'params')"),
        ({"functions": {"main": {"params": [{"name": "x"}]}}}, "is damaged (KeyError: 'type')"),
        ({"target": []}, "is damaged"),
        ({"generation": "x"}, "is damaged"),
        ({"generation": {"step": {}}}, "is damaged"),
    ],
)
def test_damaged_signatures(library, tmp_path, capsys, change, message):
    record = json.loads((library / "out" / "m.so.json").read_text())
    (tmp_path / "m.so").write_bytes(b"")
    (tmp_path / "m.so.json").write_text(json.dumps({**record, **change}))
    assert message in one_line(capsys, "run", str(tmp_path / "m.so"))


def test_what_compiled_code_says_of_its_inputs(library, capsys):
    record = json.loads((library / "out" / "m.so.json").read_text())
    shape = record["functions"]["second"]["params"][0]["type"]["shape"]
    shape[1] = "k * 3"  # not what the library was compiled for
    odd = library / "odd.so"
    odd.write_bytes((library / "out" / "m.so").read_bytes())
    (library / "odd.so.json").write_text(json.dumps(record))
    assert "second refuses these inputs" in one_line(
        capsys, "run", str(odd), "--function", "second"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cudaa"], "did you mean 'cuda'"),
        (["--target", "vulkan"], "unknown target 'vulkan'"),
        (["--target", "cuda -arch=sm_9x"], "arch 'sm_9x': expected 'sm_' and a number"),
        (["--kv-cache", "8"], "no caches to keep"),
        (["--kv-cache", "-1"], "expected at least 1"),
        (["--prefill", "none.py"], "No such file"),
        (["--target", "nolib, cuda"], "unknown library 'nolib'"),
        (["--disabled-pass", "FuseOpz"], "did you mean 'FuseOps'"),
        (["--passes", "default,-FuseOpz"], "did you mean 'FuseOps'"),
        (["--pass-config", "LowerComposites.avoit=x"], "did you mean 'avoid'"),
        (["--pass-config", "LowerComposites"], "expected Pass.option=value"),
        (["--function", "mian"], "did you mean 'main'"),
        (["--opt-level", "7"], "expected 0 to 3"),
        (["--opt-level", "x"], "invalid int value"),
        (["-o", "m.xyz"], "ends in .so or .tar"),
        (["--bogus"], "unrecognized arguments"),
    ],
)
def test_compile_option_errors(library, capsys, arguments, message):
    assert message in one_line(capsys, "compile", str(library / "m.py"), *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"x = 1\n", "expected a class with @I.ir_module"),
        (b"{", "no valid TVM JSON"),
        (b'{"root_index": 0, "nodes": []}', "no valid TVM JSON"),
        (b"\x00\xff\xfe\x80", "neither TVMScript"),
        (b"def f(:\n", "line 1"),
        (TEXT.replace("float32", "flout32").encode(), "flout32"),
        (TEXT.replace("R.matmul", "R.matmull").encode(), "line 11"),
        (TEXT.replace("(WIDTH, 7)", "(6, 7)").encode(), "line 11"),
        (TEXT[: TEXT.index("        return c")].encode(), "ends without a return"),
        (TEXT[: TEXT.index("x, w)")].encode(), "no TVMScript"),
    ],
)
def test_corrupt_files(tmp_path, capsys, content, message):
    path = tmp_path / "input"
    path.write_bytes(content)
    assert message in one_line(capsys, "compile", str(path), "--target", "llvm")


def test_missing_file_and_folder(tmp_path, capsys):
    assert "No such file" in one_line(capsys, "compile", str(tmp_path / "none.py"))
    assert "is a folder" in one_line(capsys, "explain", str(tmp_path))


def test_explain(library, capsys):
    assert main(["explain", str(library / "m.py"), "--target", "llvm"]) == 0
    out = capsys.readouterr().out
    assert "function main" in out and "function second" in out
    assert "LowerComposites" in out and "gemm" in out


def test_compile_cuda_and_run_without_a_device(library, capsys):
    out = str(library / "c.so")
    arguments = ["compile", str(library / "m.py"), "--target", "cuda -arch=sm_90", "-o", out]
    assert main([*arguments, "--function", "main", "--print-pass-times"]) == 0
    text = capsys.readouterr().out
    assert "code generation" in text
    import tvm

    if not tvm.cuda(0).exist:
        assert "no cuda device" in one_line(capsys, "run", out)


def test_json_modules_are_read(library, tmp_path):
    from relax_llm_passes.module_io import read_module, write_module

    mod = read_module(library / "m.py").mod
    for name in ("m.json", "m.py"):
        write_module(mod, tmp_path / name)
        again = read_module(tmp_path / name).mod
        assert set(map(str, again.get_global_vars())) == set(map(str, mod.get_global_vars()))


def test_check_file_and_usage(library, tmp_path, capsys):
    out = tmp_path / "c.json"
    code = main(["check", str(library / "m.py"), "--target", "llvm", "--json", str(out)])
    text = capsys.readouterr().out
    assert code == 0 and text.splitlines()[-1] == "2 passed, 0 failed"
    for entry in json.loads(out.read_text()):
        assert entry["status"] == "passed" and entry["max_rel_err"] <= entry["tol"]
        assert entry["upstream_status"] == "ok" and entry["launches"] >= 1
        assert {"matched", "refused"} == set(entry["passes"]["LowerComposites"])
    assert "FILE or --corpus" in one_line(capsys, "check")
    assert "no graph corpus" in one_line(capsys, "check", "--corpus", str(tmp_path / "none"))


def test_check_writes_nothing_but_json_to_stdout(library, capsys):
    command = ["check", str(library / "m.py"), "--target", "llvm", "--no-upstream", "--json", "-"]
    assert main(command) == 0
    found = capsys.readouterr()
    assert [e["status"] for e in json.loads(found.out)] == ["passed", "passed"]
    assert found.err.splitlines()[-1] == "2 passed, 0 failed"


def test_extract_errors(tmp_path, capsys):
    assert "holds no config.json" in one_line(capsys, "extract", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    text = one_line(capsys, "extract", str(tmp_path), "-o", str(tmp_path / "m.bin"))
    assert "ends in .py or .json" in text
    for option in (["--mode", "dekode"], ["--dtype", "flout16"]):
        # Without PyTorch the line names the extra, with it the value that is wrong.
        text = one_line(capsys, "extract", str(tmp_path), *option)
        assert option[1] in text or "relax_llm_passes[extract]" in text


def test_no_arguments_and_unknown_command(capsys):
    assert main([]) == 2
    assert "invalid choice" in one_line(capsys, "compil")


def test_interrupt_is_130(library, monkeypatch, capsys):
    import relax_llm_passes.cli.compile_command as command

    def interrupted(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load", interrupted)
    assert main(["compile", str(library / "m.py"), "-o", str(library / "i.so")]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert main(["--debug", "compile", str(tmp_path / "none.py")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_as_a_process(library):
    command = [sys.executable, "-m", "relax_llm_passes", "compile", "nothing.py"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "relax-llm-passes: cannot read nothing.py: No such file or directory"
    ]
