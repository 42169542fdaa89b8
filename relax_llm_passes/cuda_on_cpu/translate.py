"""From the CUDA C++ that TVM generates to C++ that g++ compiles.

Most of CUDA C++ is plain C++ once the headers under ``device/`` define its names. What remains is
rewritten here as text: ``__shared__`` variables, inline PTX, and the table of kernels at the end.
A construct that nothing here or in the headers covers is an :class:`UnsupportedError` naming it.
"""

from __future__ import annotations

import re

from ..errors import UnsupportedError
from .inline_ptx import translate_asm

__all__ = ["kernel_names", "translate"]

_DEFINITION = re.compile(r'extern\s+"C"\s+__global__\s+void\s+')
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\(\s*([^),]+)")
_NAME = re.compile(r"(\w+)\s*\(")
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:(?:alignas|__align__)\s*\(\s*\d+\s*\)\s*)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(r"(?:static\s+)?__shared__\s+([^;{}]+?);")
# Names that reach g++ undeclared would be reported as a typing error; these get a plain answer.
_UNSUPPORTED = {
    "cooperative_groups": "cooperative groups",
    "cuda/barrier": "cuda::barrier",
    "cuda::barrier": "cuda::barrier",
    "cuTensorMap": "TMA",
    "cuda_fp8.h": "fp8",
    "cuda_fp6.h": "fp6",
    "cuda_fp4.h": "fp4",
    "nvshmem": "nvshmem",
    "__nv_fp8": "fp8",
    "<<<": "launches from device code",
    "__cluster_dims__": "thread block clusters",
    "__syncthreads_count": "__syncthreads_count",
    "__syncthreads_and": "__syncthreads_and",
    "__syncthreads_or": "__syncthreads_or",
    "__nanosleep": "__nanosleep",
    "tex1D": "textures",
    "tex2D": "textures",
}


def _matching(code: str, start: int, opening: str, closing: str) -> int:
    """Index of the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(code)):
        if code[i] == opening:
            depth += 1
        elif code[i] == closing:
            depth -= 1
            if depth == 0:
                return i
    raise UnsupportedError(f"unbalanced '{opening}' in the CUDA source at offset {start}")


def _kernels(code: str) -> list[tuple[str, int, int, str]]:
    """(name, start, end, launch bounds) of every kernel that has a body."""
    found = []
    for m in _DEFINITION.finditer(code):
        position = m.end()
        bounds = "0"
        while True:  # __launch_bounds__(..) and __maxnreg__(..) stand before the name
            name = _NAME.match(code, position)
            if name is None:
                text = code[m.start() : m.start() + 80]
                raise UnsupportedError(f"cannot read the kernel declared at: {text!r}")
            close = _matching(code, name.end() - 1, "(", ")")
            if name.group(1) in ("__launch_bounds__", "__maxnreg__", "__cluster_dims__"):
                limit = _LAUNCH_BOUNDS.match(code, position)
                bounds = limit.group(1) if limit else bounds
                position = close + 1
                while code[position].isspace():
                    position += 1
                continue
            break
        after = close + 1
        while after < len(code) and code[after].isspace():
            after += 1
        if code[after] != "{":
            continue  # a forward declaration
        found.append((name.group(1), m.start(), _matching(code, after, "{", "}") + 1, bounds))
    return found


def kernel_names(code: str) -> list[str]:
    """Names of the kernels that ``code`` defines, in order."""
    return [name for name, *_ in _kernels(code)]


_ALIGNMENT = re.compile(r"(?:alignas|__align__)\s*\(([^)]*)\)")


def _declared(declaration: str) -> tuple[str, str, list[tuple[str, str]]]:
    """(alignment, type, [(name, sizes)]) of ``alignas(16) T a[2][3], b``."""
    alignment = _ALIGNMENT.search(declaration)
    depth = 0
    parts = [""]
    for c in _ALIGNMENT.sub(" ", declaration):
        depth += c in "[<(" or -(c in "]>)")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    element = ""
    variables = []
    for i, part in enumerate(parts):
        m = re.search(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$", part)
        if m is None or (i == 0 and not part[: m.start()].strip()):
            raise UnsupportedError(f"cannot read the declaration '__shared__ {declaration};'")
        if i == 0:
            element = part[: m.start()].strip()
        variables.append((m.group(1), m.group(2).strip()))
    return (alignment.group(1) if alignment else "1"), element, variables


def _shared_variables(kernel: str, body: str) -> str:
    """Give the kernel's shared variables their section, red zones and registration."""
    body = _DYNAMIC.sub(r"\1* \2 = (\1*)emu_context.dynamic_shared;", body)
    if re.search(r"extern\s+__shared__", body):
        raise UnsupportedError(f"kernel {kernel}: cannot read its 'extern __shared__' declaration")
    zones = 0

    def replace(m: re.Match[str]) -> str:
        nonlocal zones
        zones += 1
        alignment, element, variables = _declared(m.group(1))
        # Bytes seen as the type: C++ would run constructors, which CUDA does not.
        out = []
        for name, sizes in variables:
            out.append(
                f"typedef {element} emu_type_{name} {sizes}; "
                f"EMU_SHARED({kernel}) __attribute__((aligned({alignment}), "
                f"aligned(alignof(emu_type_{name})))) "
                f"char emu_bytes_{name}[sizeof(emu_type_{name})]; "
                f"emu_type_{name}& {name} = *(emu_type_{name}*)emu_bytes_{name}; "
                f"EMU_SHARED_OBJECT({kernel}, {name})"
            )
        return f"{' '.join(out)} EMU_SHARED({kernel}) char emu_red_zone_{zones}[64];"

    body = _STATIC.sub(replace, body)
    if "__shared__" in body:
        raise UnsupportedError(f"kernel {kernel}: cannot read one of its '__shared__' declarations")
    return body


def _strip_comments(code: str) -> str:
    """Remove comments and keep the line structure."""
    return re.sub(
        r"/\*.*?\*/|//[^\n]*",
        lambda m: re.sub(r"[^\n]", " ", m.group(0)),
        code,
        flags=re.DOTALL,
    )


def translate(code: str, arch: int = 900) -> str:
    """C++ for g++ from CUDA C++ as TVM generates it.

    Parameters
    ----------
    code : str
        One translation unit with ``extern "C" __global__`` kernels. Line numbers are kept.
    arch : int
        Value of ``__CUDA_ARCH__``.

    Returns
    -------
    str
        C++17 that includes ``emu.h`` and ends with the table ``emu_kernels``.

    Raises
    ------
    UnsupportedError
        The source uses something that is not emulated; the message names it.
    """
    code = _strip_comments(code)
    for token, what in _UNSUPPORTED.items():
        if token in code:
            raise UnsupportedError(f"CUDA on the CPU does not emulate {what} (found {token!r})")
    kernels = _kernels(code)
    if not kernels:
        raise UnsupportedError('no kernel found: looked for extern "C" __global__ void functions')
    out: list[str] = []
    position = 0
    for name, start, end, _ in kernels:
        out += [code[position:start], _shared_variables(name, code[start:end])]
        position = end
    out.append(code[position:])
    plain = "".join(out)
    text = translate_asm(plain)
    ptx = '#include "emu_ptx.h"\n' if text != plain or "__cvta_" in text else ""
    if "__shared__" in text:
        raise UnsupportedError("a __shared__ variable outside a kernel's body is not emulated")
    definitions = "\n".join(f"EMU_KERNEL({name})" for name, *_ in kernels)
    rows = " ".join(f"EMU_KERNEL_ROW({name}, {bounds})" for name, _, _, bounds in kernels)
    return (
        f'#include "emu.h"\n#define __CUDA_ARCH__ {arch}\n{ptx}#line 1 "kernel.cu"\n{text}\n'
        f'#line 1 "emu_kernels"\n{definitions}\n'
        f'extern "C" const EmuKernel emu_kernels[] = {{ {rows} '
        "{nullptr, nullptr, nullptr, nullptr, 0} };\n"
    )
