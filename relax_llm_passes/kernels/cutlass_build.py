"""Compile CUTLASS instances with nvcc into objects that need nothing but TVM when they run.

Each object carries NVIDIA's static CUDA runtime with every symbol but the exported function made
local: it links with plain g++, has no library to find at run time, and two of them, or another
library with a runtime of its own, do not get into each other's way.

Where CUDA is emulated in this process (`cuda_on_cpu.install`), g++ compiles the same instances, and
they run on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import InputError, UnsupportedError
from .cutlass_source import CutlassSpec, source
from .native import cache_dir, compile_object, ffi_include_flags, find_compiler

__all__ = ["build", "build_for_cpu", "compiler_flags", "find_headers"]

HOW = (
    "install them with `pip install nvidia-cutlass`, or set RELAX_LLM_CUTLASS to a folder with "
    "include/cutlass/cutlass.h"
)


def find_headers() -> Path | None:
    """Return CUTLASS's include folder (RELAX_LLM_CUTLASS, or PyPI's nvidia-cutlass), or None."""
    chosen = os.environ.get("RELAX_LLM_CUTLASS")
    if chosen:
        folders = [Path(chosen), Path(chosen) / "include"]
    else:
        spec = importlib.util.find_spec("cutlass_library")
        bases = (spec.submodule_search_locations or []) if spec else []
        folders = [Path(base) / "source" / "include" for base in bases]
    return next((f for f in folders if (f / "cutlass" / "cutlass.h").is_file()), None)


def _of_toolkit(file: str, folders: Sequence[str]) -> Path:
    """Return the folder with a file of the CUDA toolkit."""
    nvcc = Path(find_compiler("nvcc")).resolve()
    roots = [nvcc.parent.parent, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    for root in roots:
        for folder in folders:
            if (root / folder / file).is_file():
                return root / folder
    raise UnsupportedError(f"{file} was not found beside {nvcc}; it comes with the CUDA toolkit")


def _static_runtime() -> Path:
    name = "libcudart_static.a"
    folders = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    return _of_toolkit(name, folders) / name


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise UnsupportedError(f"no {name} was found; it comes with binutils, beside g++")
    return found


def _seal(obj: Path, symbol: str) -> Path:
    """Join an object with the CUDA runtime, and hide all but one function."""
    target = cache_dir() / f"{obj.stem}_sealed.o"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="relax_llm_passes_") as folder:
        joined = Path(folder) / "joined.o"
        runtime = str(_static_runtime())
        commands = [
            # Groups would still be merged with those of other objects by name, once local.
            [_tool("ld"), "-r", "--force-group-allocation", "-o", str(joined), str(obj), runtime],
            [_tool("objcopy"), f"--keep-global-symbol=__tvm_ffi_{symbol}", str(joined)],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise InputError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
        moved = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(joined, moved)
        os.replace(moved, target)
    return target


def compiler_flags(arch: str, headers: Path) -> list[str]:
    """Return nvcc's flags for instances, for one architecture ("sm_80")."""
    number = arch.removeprefix("sm_")
    return [
        f"-I{Path(__file__).parent}",
        f"-I{headers}",
        *ffi_include_flags(),
        "--expt-relaxed-constexpr",
        "-gencode",
        f"arch=compute_{number},code=[sm_{number},compute_{number}]",
    ]


def build_for_cpu(source_text: str, name: str, headers: Path) -> Path:
    """Compile a source with instances for the emulation of CUDA in this process."""
    from ..cuda_on_cpu import cutlass_headers

    cuda = _of_toolkit("cuda_runtime.h", ("include", "targets/x86_64-linux/include"))
    flags, files = cutlass_headers.compiler_flags(headers, cuda)
    own = Path(__file__).with_name("cutlass_gemm.cuh")
    return compile_object(
        source_text,
        name=name,
        flags=[*flags, f"-I{own.parent}", *ffi_include_flags()],
        headers=[own, headers / "cutlass" / "version.h", *files],
    )


def _build_one(spec: CutlassSpec, arch: str, headers: Path) -> Path:
    from ..cuda_on_cpu.preload import stand_ins_loaded

    if stand_ins_loaded():
        return build_for_cpu(source(spec), "cutlass_cpu", headers)
    # The version of the headers decides the result as much as our own file does.
    obj = compile_object(
        source(spec),
        name="cutlass",
        compiler="nvcc",
        flags=compiler_flags(arch, headers),
        headers=[
            Path(__file__).with_name("cutlass_gemm.cuh"),
            headers / "cutlass" / "version.h",
        ],
    )
    return _seal(obj, spec.symbol)


def build(specs: Sequence[CutlassSpec], arch: str) -> dict[CutlassSpec, Path | Exception]:
    """Compile instances, several at a time; each stays in the cache.

    Parameters
    ----------
    specs : sequence of CutlassSpec
        What to compile.
    arch : str
        "sm_80", "sm_90", ...

    Returns
    -------
    dict
        The object of each spec, or why it could not be built.

    Raises
    ------
    UnsupportedError
        When the headers, nvcc or its runtime are missing.
    """
    headers = find_headers()
    if headers is None:
        raise UnsupportedError(f"CUTLASS's headers were not found; {HOW}")
    find_compiler("nvcc")
    _static_runtime()

    def one(spec: CutlassSpec) -> Path | Exception:
        try:
            return _build_one(spec, arch, headers)
        except InputError as error:
            return error

    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        return dict(zip(specs, pool.map(one, specs), strict=True))
