"""Compile C++ and CUDA sources that come with the package into objects, once per machine.

Objects are kept in a cache folder under a name made of everything that went into them, so that a
second compilation of a model takes no time and nothing stale is ever linked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import InputError, UnsupportedError

__all__ = ["cache_dir", "compile_object", "ffi_include_flags", "find_compiler"]


def cache_dir() -> Path:
    """Return the folder of compiled objects: RELAX_LLM_CACHE, else the user's cache folder."""
    chosen = os.environ.get("RELAX_LLM_CACHE")
    if chosen:
        base = Path(chosen)
    else:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        base = Path(home) / "relax_llm_passes"
    try:
        base.mkdir(parents=True, exist_ok=True)
        return base
    except OSError:
        return Path(tempfile.mkdtemp(prefix="relax_llm_passes_"))


def ffi_include_flags() -> list[str]:
    """Return the compiler flags for tvm-ffi's headers."""
    import tvm_ffi.libinfo as info

    paths = [info.find_include_path(), info.find_dlpack_include_path()]
    return [f"-I{p}" for p in paths]


def find_compiler(name: str) -> str:
    """Return the path of "g++" or "nvcc"; raises UnsupportedError where there is none."""
    chosen = os.environ.get("CXX") if name == "g++" else os.environ.get("NVCC")
    found = shutil.which(chosen or name)
    if found is None and name == "nvcc":
        at = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
        found = str(at) if at.exists() else None
    if found is None:
        variable = "CXX" if name == "g++" else "NVCC or CUDA_HOME"
        raise UnsupportedError(
            f"no {name} was found; install it or set {variable}, or compile without this library"
        )
    return found


def _hash(parts: Sequence[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def compile_object(
    source: Path | str,
    *,
    name: str,
    compiler: str = "g++",
    flags: Sequence[str] = (),
    defines: Mapping[str, str] | None = None,
    headers: Sequence[Path] = (),
    shared: bool = False,
    timeout: float = 600.0,
) -> Path:
    """Compile one source file (or source text) and return the object's path.

    Parameters
    ----------
    source : Path or str
        A file, or the text itself.
    name : str
        Beginning of the object's file name.
    compiler : str
        "g++" (environment variable CXX) or "nvcc" (NVCC, CUDA_HOME).
    flags : sequence of str
        Beside the standard ones (`-O2 -fPIC -std=c++17`).
    defines : mapping, optional
        Macros.
    headers : sequence of Path
        Files that the source includes and that may change.
    shared : bool
        Link a shared library instead.
    timeout : float
        Seconds.

    Raises
    ------
    UnsupportedError
        When there is no compiler.
    InputError
        When the source does not compile; the message ends with the compiler's.
    """
    text = source.read_text() if isinstance(source, Path) else source
    suffix = ".cu" if compiler == "nvcc" else ".cc"
    program = find_compiler(compiler)
    macros = [f"-D{key}={value}" for key, value in sorted((defines or {}).items())]
    if isinstance(source, Path):
        flags = [*flags, f"-I{source.parent}"]
    pic = ["-Xcompiler", "-fPIC"] if compiler == "nvcc" else ["-fPIC"]
    kind = ["-shared"] if shared else ["-c"]
    command = [program, "-std=c++17", "-O2", *pic, *flags, *macros, *kind]
    key = _hash([text, *command, *[h.read_bytes() for h in headers]])
    target = cache_dir() / f"{name}_{key}{'.so' if shared else '.o'}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="relax_llm_passes_") as folder:
        path = Path(folder) / f"{name}{suffix}"
        path.write_text(text)
        output = Path(folder) / target.name
        try:
            done = subprocess.run(
                [*command, str(path), "-o", str(output)],
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise InputError(f"{compiler} took longer than {timeout:.0f} s on {name}") from None
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-20:])
            raise InputError(f"{compiler} does not compile {name}:\n{tail}")
        # Another process may be doing the same: the rename is atomic, whoever wins.
        moved = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(output, moved)
        os.replace(moved, target)
    return target
