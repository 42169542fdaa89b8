"""Pack what a bare GPU machine needs into one folder.

    python benchmarks/gpu_bundle.py FOLDER [--arch sm_90] [--python 3.12] [--graph NAME ...]

Makes FOLDER with the runtime libraries of TVM (no compiler) and of CUDA, graphs of the corpus
compiled by TVM's default pipeline and by this package's with cubins inside, their inputs and
expected outputs, and ``run_on_gpu.py``. On the GPU machine, with the Python version named (this
one's by default; the extension modules of another come by pip), numpy and the driver:

    python FOLDER/run_on_gpu.py            # writes benchmarks/results/GPU-NAME.json

No GPU is needed to build it; nvcc is. Each module is compiled in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax_llm_passes import corpus
from relax_llm_passes.errors import UnsupportedError

DEFAULT_GRAPHS = ("rwkv5_package_decode", "mpt_foundry_rope_decode")
# The compiler, and what only a compiler needs.
NOT_NEEDED = ("libtvm_compiler*", "__pycache__", "*.h", "*.hpp", "*.cuh",
              "src", "3rdparty", "include")  # fmt: skip
THIS_PYTHON = ".".join(map(str, sys.version_info[:2]))
RUNNER = Path(__file__).with_name("run_on_gpu.py")


def compile_one(name: str, pipeline: str, arch: str, output: Path, emulated: bool) -> None:
    """Compile one graph into a library; with ``emulated`` its code is for the CPU stand-in."""
    import tvm
    from tvm import relax

    import relax_llm_passes
    from relax_llm_passes.cuda_on_cpu import cuda_target, embedded_cubins, install

    target = cuda_target(arch)
    graph = corpus.load(name)
    passes = (
        relax.get_default_pipeline(target)
        if pipeline == "tvm"
        else relax_llm_passes.default_pipeline(target)
    )
    if emulated:
        install()
    with contextlib.nullcontext() if emulated else embedded_cubins(arch):
        executable = tvm.compile(graph.mod, target, relax_pipeline=passes)
    executable.export_library(str(output))


def copy_runtime(folder: Path, python: str) -> None:
    """TVM's Python package and runtime libraries without the compiler, tvm_ffi and ml_dtypes."""
    import ml_dtypes
    import tvm
    import tvm_ffi

    packages = [tvm, tvm_ffi, ml_dtypes]
    if python != THIS_PYTHON:  # TVM's package is of no version, the others are
        packages = [tvm]
        download_extensions(folder / "python", python)
    for package in packages:
        source = Path(package.__file__).parent
        shutil.copytree(
            source,
            folder / "python" / source.name,
            ignore=shutil.ignore_patterns(*NOT_NEEDED),
            dirs_exist_ok=True,
        )


def download_extensions(folder: Path, python: str) -> None:
    """Unpack tvm_ffi and ml_dtypes, in the versions installed here, for another Python."""
    wanted = [f"{n}=={importlib.metadata.version(n)}" for n in ("apache-tvm-ffi", "ml_dtypes")]
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28)]
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--only-binary=:all:", f"--python-version={python}", *platforms,
                   "--dest", wheels, *wanted]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["?"])[-1]
            raise UnsupportedError(f"no {' and '.join(wanted)} for Python {python}: {reason}")
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


def cuda_runtime() -> Path | None:
    """This machine's CUDA runtime library, which a machine with only the driver lacks."""
    from relax_llm_passes.cuda_on_cpu.nvcc import cuda_library_dirs

    for directory in cuda_library_dirs():
        for library in sorted(directory.glob("libcudart.so.*")):
            if library.name.count(".") == 2:  # libcudart.so.13
                return library
    return None


def save(folder: Path, name: str, arrays: Sequence[Any]) -> None:
    """Write arrays as NAME0.npy, ...; bf16 as its bits, for numpy has no such type."""
    for i, array in enumerate(arrays):
        a = np.asarray(array)
        np.save(folder / f"{name}{i}.npy", a.view(np.uint16) if a.dtype.name == "bfloat16" else a)


def build(
    folder: Path, graphs: list[str], arch: str, emulated: bool = False, python: str = ""
) -> None:
    """Write the bundle into ``folder``, for a machine with Python ``python`` (this one's)."""
    python = python or THIS_PYTHON
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in graphs:
        graph = corpus.load(name)
        inputs, golden = graph.inputs(), graph.golden()
        save(folder, f"{name}.in", inputs)
        save(folder, f"{name}.out", golden)
        for pipeline in ("tvm", "relax_llm"):
            library = folder / f"{name}.{pipeline}.so"
            command = [sys.executable, __file__, "--compile", name, pipeline, arch, str(library)]
            done = subprocess.run(command + (["--emulated"] if emulated else []),
                                  capture_output=True, text=True)  # fmt: skip
            row = {"graph": name, "pipeline": pipeline, "library": library.name,
                   "function": graph.function, "tolerance": graph.tolerance,
                   "inputs": [a.dtype.name for a in inputs],
                   "outputs": [a.dtype.name for a in golden]}  # fmt: skip
            if done.returncode:
                row["failed"] = (done.stderr.strip().splitlines() or ["?"])[-1][:300]
            rows.append(row)
    manifest = {"arch": arch, "emulated": emulated, "python": [int(n) for n in python.split(".")],
                "rows": rows}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    copy_runtime(folder, python)
    library = None if emulated else cuda_runtime()
    if library is not None:
        (folder / "lib").mkdir(exist_ok=True)
        shutil.copy(library, folder / "lib" / library.name)
    shutil.copy(RUNNER, folder / RUNNER.name)


def main() -> None:
    """Build a bundle, or (internal) compile one of its modules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--graph", action="append")
    parser.add_argument("--python", default="", metavar="X.Y", help="of the GPU machine")
    parser.add_argument("--emulated", action="store_true", help="code for the CPU stand-in")
    parser.add_argument("--compile", nargs=4, metavar=("GRAPH", "PIPELINE", "ARCH", "OUTPUT"))
    a = parser.parse_args()
    if a.compile:
        name, pipeline, arch, output = a.compile
        compile_one(name, pipeline, arch, Path(output), a.emulated)
        return
    if a.folder is None:
        parser.error("name the folder to build")
    from relax_llm_passes.cuda_on_cpu import nvcc_missing

    if nvcc_missing() and not a.emulated:
        raise UnsupportedError(f"a GPU bundle needs nvcc: {nvcc_missing()}")
    build(a.folder, a.graph or list(DEFAULT_GRAPHS), a.arch, a.emulated, a.python)
    for row in json.loads((a.folder / "manifest.json").read_text())["rows"]:
        if "failed" in row:
            print(f"{row['graph']} by {row['pipeline']} does not compile: {row['failed']}")
    size = sum(p.stat().st_size for p in a.folder.rglob("*") if p.is_file()) / 1e6
    runner = os.path.join(a.folder, RUNNER.name)
    print(f"{a.folder}: {size:.0f} MB; run {runner} on the GPU machine")


if __name__ == "__main__":
    main()
