"""CUTLASS's headers for g++: what only nvcc can read, replaced in copies of the files that have it.

The kernels are CUTLASS's own; inline PTX, launches, shared memory and the switches that leave the
code for sm_80 out of a host compilation are what is replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from ..errors import UnsupportedError
from .build import cache_dir
from .inline_ptx import translate_asm

__all__ = ["changed_headers", "compiler_flags"]

_HERE = Path(__file__).parent

_PREFETCH = re.compile(r"#if CUTLASS_ENABLE_L2_PREFETCH\n.*?#else\n(.*?)#endif\n", re.DOTALL)

# Of each file, what is replaced before its inline PTX is translated. Each must be there.
_REPLACED: dict[str, list[tuple[str, str]]] = {
    # Lanes and warps, which a host compilation takes to be 0.
    "cutlass/cutlass.h": [(r"#if defined\(__CUDA_ARCH__\)", "#if 1")],
    "cutlass/arch/memory.h": [],
    "cutlass/arch/memory_sm75.h": [
        (r"#if defined\(CUTE_ARCH_LDSM_SM75_ACTIVATED\)", "#if 1"),
    ],
    "cutlass/arch/memory_sm80.h": [
        (r"#define CUDA_CP_ASYNC_ACTIVATED 0", "#define CUDA_CP_ASYNC_ACTIVATED 1"),
    ],
    "cutlass/arch/mma_sm80.h": [
        (r"#if defined\(CUTLASS_ARCH_MMA_SM80_ENABLED\)", "#if 1"),
    ],
    "cute/arch/util.hpp": [
        (
            r'\(void\) ptr;\s*printf\("ERROR: cast_smem_ptr_to_uint[^;]*;\s*return 0;',
            "return emu_shared_address(ptr);",
        ),
    ],
    "cutlass/device_kernel.h": [
        (
            r"extern __shared__ (\w+) (\w+)\[\];",
            r"\1* \2 = reinterpret_cast<\1*>(emu_context.dynamic_shared);",
        ),
    ],
    "cutlass/kernel_launch.h": [
        (r"device_kernel<GemmKernel><<<[^;]*;", ""),  # for newer architectures
    ],
    "cutlass/gemm/device/gemm_universal_base.h": [
        (
            r"(Kernel2<GemmKernel>)<<<(.*?)>>>\((\w+)\);",
            r'emu_launch<&\1>("cutlass_gemm", \2, \3);',
        ),
    ],
}


def _changed(name: str, text: str) -> str:
    for pattern, replacement in _REPLACED[name]:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise UnsupportedError(f"{name} of this CUTLASS has no {pattern!r}")
    return translate_asm(_PREFETCH.sub(r"\1", text), strict=False)


def changed_headers(headers: Path) -> Path:
    """Return a folder like CUTLASS's: changed copies of some headers, links to the others.

    Links to all, as some include their neighbours.

    Parameters
    ----------
    headers : Path
        CUTLASS's include folder.

    Raises
    ------
    UnsupportedError
        A header does not have what is to be replaced: a version of CUTLASS that differs.
    """
    texts = {name: _changed(name, (headers / name).read_text()) for name in _REPLACED}
    parts = [str(headers), *texts.values()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_dir() / f"cutlass-{key}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="build-") as work:
        whole = Path(work) / "include"
        for original in headers.rglob("*"):
            name = original.relative_to(headers).as_posix()
            path = whole / name
            if original.is_dir():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in texts:
                path.write_text(texts[name])
            else:
                path.symlink_to(original)
        try:
            os.rename(whole, folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    return folder


def compiler_flags(headers: Path, cuda: Path) -> tuple[list[str], list[Path]]:
    """Return g++'s flags for sources that instantiate CUTLASS, and the files these bring in.

    Parameters
    ----------
    headers, cuda : Path
        CUTLASS's include folder, and the CUDA toolkit's.
    """
    first = _HERE / "device" / "emu_cutlass.h"
    flags = ["-std=gnu++17", "-O1", "-march=native", "-fno-strict-aliasing", "-w"]
    # nvcc accepts a name that changes its meaning within a class.
    flags += ["-fpermissive", "-include", str(first), f"-I{changed_headers(headers)}"]
    flags += [f"-I{cuda}", f"-I{cuda / 'cccl'}"]
    return flags, sorted((_HERE / "device").glob("emu*.h"))
