"""Compile with g++ into a cache keyed by content, safe with many processes at once.

Files are written under a temporary name and renamed, so a reader sees a whole file or none; a lock
per entry keeps processes from compiling the same thing twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import RelaxLLMError, UnsupportedError
from .translate import translate

__all__ = ["build_kernels", "build_runtime", "cache_dir"]

_HERE = Path(__file__).parent
_COMMON = ["-std=gnu++17", "-fPIC", "-w", "-fno-strict-aliasing"]
# Kernels. -ffp-contract=fast as nvcc (-fmad=true): a * b + c is one operation where the CPU has it.
_KERNEL = [*_COMMON, "-O1", "-march=native", "-ffp-contract=fast", "-fno-threadsafe-statics", "-g1",
           "-fno-toplevel-reorder", "-fno-semantic-interposition"]  # fmt: skip
# The instrumented build. Without the two passes that split the copy of a vector into its fields,
# each access is counted and checked with the width that the device would use.
_CHECKED = ["-fsanitize=thread", "--param=tsan-distinguish-volatile=1",
            "--param=tsan-instrument-func-entry-exit=0", "-fno-tree-sra",
            "-fno-tree-fre"]  # fmt: skip


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/relax_llm_passes/cuda_on_cpu``.

    It can be deleted at any time.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "relax_llm_passes" / "cuda_on_cpu"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home
        path = Path(tempfile.gettempdir()) / f"relax_llm_passes-{os.getuid()}" / "cuda_on_cpu"
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)


@functools.cache
def _machine() -> str:
    """What -march=native depends on, and the compiler's version."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    try:
        with open("/proc/cpuinfo") as f:
            flags = next((line for line in f if line.startswith("flags")), "")
    except OSError:
        flags = ""
    return version.stdout.splitlines()[0] + flags


@functools.cache
def _sources(folder: str) -> str:
    return "".join(p.name + p.read_text() for p in sorted((_HERE / folder).iterdir()))


def _run(command: Sequence[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    raise UnsupportedError(
        f"{what}: g++ does not accept it, so it uses something that is not emulated:\n"
        + "\n".join(lines[:8] or [result.stderr[:2000]])
    )


def _precompiled_header(flags: Sequence[str]) -> Path:
    """A folder with emu.h compiled under these flags: most of a kernel's time is that header."""
    key = hashlib.sha256("\0".join([*flags, _machine(), _sources("device")]).encode()).hexdigest()
    folder = cache_dir() / f"header-{key[:24]}"
    header = folder / "emu.h.gch"
    if not header.exists():
        with _locked(cache_dir() / f"header-{key[:24]}.lock"):
            if not header.exists():
                folder.mkdir(exist_ok=True)
                partial = folder / "partial"
                _run(["g++", *flags, f"-I{_HERE / 'device'}", "-x", "c++-header", "-o",
                      str(partial), str(_HERE / "device" / "emu.h")], "emu.h")  # fmt: skip
                os.replace(partial, header)
    return folder


def build_kernels(code: str, checked: bool, arch: int = 900) -> Path:
    """Compile CUDA source into a shared library for the CPU.

    Parameters
    ----------
    code : str
        CUDA C++ as TVM generates it.
    checked : bool
        Instrument every load and store (10 to 50 times slower to run).
    arch : int
        Value of ``__CUDA_ARCH__``, e.g. 800.

    Returns
    -------
    pathlib.Path
        The library; unchanged input gives the same file without compiling.

    Raises
    ------
    UnsupportedError
        The source uses something that is not emulated; the message names it.
    """
    # One precompiled header serves every architecture, so the macro goes into the source.
    flags = [*_KERNEL, *(_CHECKED if checked else [])]
    key = hashlib.sha256(
        "\0".join(
            [code, str(arch), *flags, _machine(), _sources("device"), _python_sources()]
        ).encode()
    ).hexdigest()[:24]
    library = cache_dir() / f"{key}.so"
    if library.exists():
        return library
    with _locked(cache_dir() / f"{key}.lock"):
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="build-") as work:
            source = Path(work) / "kernel.cc"
            source.write_text(translate(code, arch))
            (Path(work) / "kernel.cu").write_text(code)
            output = Path(work) / "kernel.so"
            # The link must not add the sanitizer's own runtime: the hooks are ours.
            obj = Path(work) / "kernel.o"
            _run(["g++", *flags, f"-I{_precompiled_header(flags)}", f"-I{_HERE / 'device'}",
                  "-c", "-o", str(obj), str(source)], "CUDA source")  # fmt: skip
            _run(["g++", "-shared", "-o", str(output), str(obj)], "CUDA source")
            os.replace(Path(work) / "kernel.cu", library.with_suffix(".cu"))
            os.replace(output, library)
    return library


@functools.cache
def _python_sources() -> str:
    return "".join((_HERE / n).read_text() for n in ("translate.py", "inline_ptx.py"))


def build_runtime(cudart_soname: str) -> tuple[Path, Path]:
    """Compile the stand-ins for ``libcuda.so.1`` and for ``cudart_soname``.

    Returns
    -------
    tuple of pathlib.Path
        The two libraries, to be loaded in this order.
    """
    key = hashlib.sha256(
        "\0".join(
            [
                cudart_soname,
                _machine(),
                _sources("runtime"),
                (_HERE / "device" / "emu_abi.h").read_text(),
            ]
        ).encode()
    ).hexdigest()[:24]
    folder = cache_dir() / f"runtime-{key}"
    driver, cudart = folder / "libcuda.so.1", folder / cudart_soname
    if cudart.exists():
        return driver, cudart
    with _locked(cache_dir() / f"runtime-{key}.lock"):
        if cudart.exists():
            return driver, cudart
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="build-") as work:
            _compile_runtime(Path(work), cudart_soname)
            folder.mkdir(exist_ok=True)
            os.replace(Path(work) / "libcuda.so.1", driver)
            os.replace(Path(work) / cudart_soname, cudart)
    return driver, cudart


def _compile_runtime(work: Path, cudart_soname: str) -> None:
    sources = sorted(p for p in (_HERE / "runtime").glob("*.cc") if p.name != "runtime_api.cc")
    # One translation unit in all: half the time, as each file spends most of it on headers.
    whole = work / "runtime.cc"
    whole.write_text("".join(f'#include "{p}"\n' for p in sources))
    try:
        _run(["g++", *_COMMON, "-O2", "-shared", "-Wl,-soname,libcuda.so.1", "-o",
              str(work / "libcuda.so.1"), str(whole), "-ldl"], "runtime")  # fmt: skip
        script = work / "version.map"
        script.write_text(f"{cudart_soname} {{ global: cuda*; local: *; }};\n")
        _run(["g++", *_COMMON, "-O2", "-shared", f"-Wl,-soname,{cudart_soname}",
              f"-Wl,--version-script={script}", "-o", str(work / cudart_soname),
              str(_HERE / "runtime" / "runtime_api.cc"), str(work / "libcuda.so.1")],
             "runtime")  # fmt: skip
    except UnsupportedError as e:
        raise RelaxLLMError(f"the CUDA runtime for the CPU does not compile here: {e}") from e
