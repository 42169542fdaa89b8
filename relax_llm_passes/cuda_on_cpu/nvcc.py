"""Compile TVM's CUDA code with nvcc and read back what each kernel needs of the GPU."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, UnsupportedError
from .build import cache_dir
from .resources import KernelResources, launch_bounds, parse_ptxas

__all__ = ["compile_cubin", "cuda_sources", "embedded_cubins", "nvcc_check",
           "nvcc_missing"]  # fmt: skip

_DYNAMIC = re.compile(r'T\.alloc_buffer\(\((\d+),\), "(\w+)", scope="shared\.dyn"\)')
_BITS = re.compile(r"\d+$")


def _nvcc() -> str | None:
    """Path of nvcc: on PATH, under CUDA_HOME, or from PyPI's nvidia-cuda-nvcc."""
    found = shutil.which("nvcc")
    if found:
        return found
    candidates = [Path(os.environ[v]) / "bin" / "nvcc" for v in ("CUDA_HOME", "CUDA_PATH")
                  if v in os.environ]  # fmt: skip
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    candidates += sorted(site.glob("cu*/bin/nvcc")) + sorted(site.glob("cuda_nvcc/bin/nvcc"))
    for c in candidates:
        if os.access(c, os.X_OK):
            return str(c)
    return None


def cuda_library_dirs() -> list[Path]:
    """Folders that may hold CUDA's runtime library: beside nvcc, and those of PyPI's packages."""
    nvcc = _nvcc()
    found: list[Path] = []
    if nvcc is not None:
        # nvcc may be a script that calls the real one: ask it where its files are.
        text = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
        top = re.search(r"#\$ TOP=(\S+)", text.stderr)
        if top:
            root = Path(top.group(1)).resolve()
            found += [root / "lib64", root / "lib", root / "targets" / "x86_64-linux" / "lib"]
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found += [*sorted(site.glob("cu*/lib")), *sorted(site.glob("cuda_runtime/lib"))]
    return [f for f in found if f.is_dir()]


def nvcc_missing() -> str:
    """Why nvcc cannot be used; empty when it can."""
    if _nvcc():
        return ""
    return "no nvcc on PATH, under CUDA_HOME, or from the package nvidia-cuda-nvcc"


def cuda_sources(module: Any) -> list[str]:
    """CUDA source of every CUDA module inside a compiled executable or runtime module."""
    found: list[str] = []

    def visit(m: Any) -> None:
        if m.kind == "cuda":
            text = m.inspect_source()
            if text not in found:
                found.append(text)
        for child in m.imports:
            visit(child)

    visit(getattr(module, "mod", module))
    return found


def _compile(mod: Any, target: Any, relax_pipeline: Any) -> tuple[list[str], dict[str, int]]:
    """Sources and dynamic shared bytes per kernel, from an IRModule or a PrimFunc."""
    import tvm

    dynamic: dict[str, int] = {}

    @tvm.instrument.pass_instrument
    class ReadDynamicShared:
        def run_after_pass(self, module: Any, info: Any) -> None:
            if info.name != "tirx.SplitHostDevice":
                return
            for gvar, func in module.functions.items():
                if not isinstance(func, tvm.tirx.PrimFunc) or "tirx.kernel_launch_params" not in (
                    func.attrs or {}
                ):
                    continue
                text = func.script()
                total = 0
                for size, dtype in _DYNAMIC.findall(text):
                    bits = _BITS.search(dtype)
                    total += int(size) * (int(bits.group(0)) if bits else 8) // 8
                if 'scope="shared.dyn"' in text and total == 0:
                    total = -1
                dynamic[gvar.name_hint] = total

    if isinstance(mod, tvm.tirx.PrimFunc):
        name = str((mod.attrs or {}).get("global_symbol", "main"))
        mod = tvm.IRModule({name: mod.with_attr("global_symbol", name)})
    relax = any(isinstance(f, tvm.relax.Function) for f in mod.functions.values())
    instruments = [*tvm.transform.PassContext.current().instruments, ReadDynamicShared()]
    with tvm.transform.PassContext(instruments=instruments):
        if relax:
            pipeline = relax_pipeline or tvm.relax.get_default_pipeline(target)
            built = tvm.compile(mod, target, relax_pipeline=pipeline)
        else:
            with target:
                built = tvm.tirx.build(mod, target=target)
    return cuda_sources(built), dynamic


def compile_cubin(source: str, arch: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """A cubin and ptxas' resource report, cached by content.

    Raises
    ------
    UnsupportedError
        No nvcc, or it refuses the source; the message carries its errors.
    """
    nvcc = _nvcc()
    if nvcc is None:
        raise UnsupportedError(f"cannot compile for {arch}: {nvcc_missing()}")
    flags = [f"-arch={arch}", "-cubin", "-Xptxas", "-v", "-O3", *options]
    stamp = f"{nvcc}{os.stat(os.path.realpath(nvcc)).st_mtime_ns}"
    key = hashlib.sha256("\0".join([source, *flags, stamp]).encode()).hexdigest()[:24]
    cubin, log = cache_dir() / f"{key}.cubin", cache_dir() / f"{key}.ptxas"
    if not log.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="nvcc-") as work:
            path = Path(work) / "kernel.cu"
            path.write_text(source)
            out = Path(work) / "kernel.cubin"
            r = subprocess.run(
                [nvcc, *flags, "-o", str(out), str(path)], capture_output=True, text=True
            )
            if r.returncode:
                raise UnsupportedError(f"nvcc refuses the source for {arch}:\n{r.stderr[:4000]}")
            (Path(work) / "log").write_text(r.stderr)
            os.replace(out, cubin)
            os.replace(Path(work) / "log", log)
    return cubin.read_bytes(), log.read_text()


@contextlib.contextmanager
def embedded_cubins(arch: str) -> Iterator[None]:
    """Inside, what ``tvm.compile`` makes for CUDA carries cubins, so it can be exported as it is.

    Such a module runs on a real GPU only; none is needed to make it.

    Parameters
    ----------
    arch : str
        What nvcc compiles for, e.g. "sm_90".

    Raises
    ------
    UnsupportedError
        No nvcc, or (in ``tvm.compile``) it refuses a kernel.
    """
    import tvm
    import tvm_ffi

    from .availability import real_gpu_missing
    from .harness import install

    if _nvcc() is None:
        raise UnsupportedError(f"cannot make cubins: {nvcc_missing()}")
    if real_gpu_missing():
        install()  # without a device TVM compiles no kernels

    def to_cubin(code: str) -> bytes:
        return compile_cubin(code, arch)[0]

    name = "tvm_callback_cuda_compile"
    before = tvm.get_global_func(name)
    tvm_ffi.register_global_func(name, to_cubin, override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(name, before, override=True)


def nvcc_check(
    mod: Any,
    archs: Iterable[str] = ("sm_80", "sm_90", "sm_100"),
    *,
    relax_pipeline: Any = None,
    options: Sequence[str] = (),
) -> list[KernelResources]:
    """Compile every CUDA kernel of a module with nvcc and read back its resources.

    Parameters
    ----------
    mod : IRModule, PrimFunc, compiled executable, or str
        Relax or TIR is compiled by TVM once per architecture first; text is CUDA source.
    archs : iterable of str
        GPU architectures.
    relax_pipeline : optional
        For Relax modules; default TVM's pipeline of the target.
    options : sequence of str
        More options for nvcc.

    Returns
    -------
    list of KernelResources
        One per kernel and architecture.

    Raises
    ------
    UnsupportedError
        No nvcc (ask :func:`nvcc_missing` first), or it refuses a kernel.
    """
    import tvm

    from .harness import cuda_target

    jobs: list[tuple[str, str, dict[str, int]]] = []
    for arch in archs:
        dynamic: dict[str, int] = {}
        if isinstance(mod, str):
            sources = [mod]
        elif isinstance(mod, (tvm.IRModule, tvm.tirx.PrimFunc)):
            sources, dynamic = _compile(mod, cuda_target(arch), relax_pipeline)
        else:
            sources = cuda_sources(mod)
        if not sources:
            raise InputError("the module holds no CUDA code")
        jobs += [(s, arch, dynamic) for s in sources]
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        logs = list(pool.map(lambda j: compile_cubin(j[0], j[1], options)[1], jobs))
    return [row for log, (s, arch, dynamic) in zip(logs, jobs, strict=True)
            for row in parse_ptxas(log, arch, dynamic, launch_bounds(s))]  # fmt: skip
