"""The CUDA source of one kind of product for CUTLASS: types, alignments, tiles, epilogue tree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["BINARY", "UNARY", "CutlassSpec", "EpilogueStep", "source"]

_ELEMENT = {"float16": "cutlass::half_t", "bfloat16": "cutlass::bfloat16_t", "float32": "float"}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}

# Steps without operands, and the functor of cutlass_gemm.cuh.
UNARY = {
    "relu": "Relu",
    "relu_squared": "ReluSquared",
    "gelu_erf": "GeluErf",
    "gelu_tanh": "GeluTanh",
    "silu": "Silu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}
# Steps with an operand: the functor, and how the operand is read.
BINARY = {
    "bias": ("cutlass::plus", "Row"),
    "residual": ("cutlass::plus", "Matrix"),
    "multiply": ("cutlass::multiplies", "Matrix"),
}
# Rows and columns of a block to: block K (two-byte types, fp32), warp rows, warp columns. Four
# warps each. The large tile reads each operand from shared memory least often; the small one fills
# a GPU with products of few rows.
_TILES = {"128x128": ((32, 16), 64, 64), "64x64": ((64, 32), 32, 32)}
STAGES = 4  # 64 KiB of shared memory with either tile, which every sm_80 and newer has


@dataclass(frozen=True)
class EpilogueStep:
    """A step after the product.

    Attributes
    ----------
    op : str
        A key of UNARY or BINARY, or "scale".
    dtype : str
        Element type of the operand, "" where there is none.
    value : float
        The factor of "scale".
    """

    op: str
    dtype: str = ""
    value: float = 1.0


@dataclass(frozen=True)
class CutlassSpec:
    """Everything that is compiled into one instance; sizes are not.

    Attributes
    ----------
    dtype, out_dtype : str
        Of both operands; of the result.
    lhs_layout, rhs_layout : str
        "MK" or "KM"; "KN" or "NK".
    align_lhs, align_rhs, align_out : int
        How many elements are read or written at once along the contiguous axis, whose length is a
        multiple of it.
    steps : tuple of EpilogueStep
        What follows the product, in order, computed in fp32.
    tiles : tuple of str
        One tile, or the large and the small one between which the call chooses by its rows.
    """

    dtype: str
    out_dtype: str
    lhs_layout: str
    rhs_layout: str
    align_lhs: int
    align_rhs: int
    align_out: int
    steps: tuple[EpilogueStep, ...]
    tiles: tuple[str, ...]

    @property
    def symbol(self) -> str:
        """Name of the exported function."""
        digest = hashlib.sha256(_body(self, "").encode()).hexdigest()[:16]
        return f"relax_llm_cutlass_{digest}"


def _number(value: float) -> str:
    return f"{float(value).hex()}f"


def _tree(spec: CutlassSpec) -> tuple[str, str, list[str], list[str]]:
    """Return the tree's type, its arguments, the functors it needs, and its operands' types."""
    kind, arguments = "Sums", "{}"
    functors: list[str] = []
    operands: list[str] = []
    for i, step in enumerate(spec.steps):
        if step.op in BINARY:
            functor, how = BINARY[step.op]
            element = _ELEMENT[step.dtype]
            name = f"e{len(operands)}"
            operands.append(element)
            stride = "{_0{}, _1{}, 0}" if how == "Row" else "{p.n, _1{}, p.m * p.n}"
            kind = f"Sm80EVT<Compute<{functor}>, {kind}, {how}<Map, {element}>>"
            arguments = f"{{{arguments}, {{{name}, {element}(0), {stride}}}, {{}}}}"
        else:
            if step.op == "scale":
                functor = f"Scale{i}"
                functors.append(f"RELAX_LLM_STEP({functor}, x * {_number(step.value)})")
            else:
                functor = UNARY[step.op]
            kind = f"Sm80EVT<Compute<{functor}>, {kind}>"
            arguments = f"{{{arguments}, {{}}}}"
    out = _ELEMENT[spec.out_dtype]
    store = f"{{static_cast<{out}*>(p.out), {{p.n, _1{{}}, p.m * p.n}}}}"
    return (
        f"Sm80EVT<Store<Map, {out}>, {kind}>",
        f"{{{arguments}, {store}}}",
        functors,
        operands,
    )


def _instance(spec: CutlassSpec, tile: str) -> str:
    (narrow, wide), rows, columns = _TILES[tile]
    wide_type = spec.dtype == "float32"
    depth = wide if wide_type else narrow
    block = f"{tile.replace('x', ', ')}, {depth}, {rows}, {columns}, {STAGES}"
    orders = {"MK": "RowMajor", "KM": "ColumnMajor", "KN": "RowMajor", "NK": "ColumnMajor"}
    return (
        f"Gemm<{_ELEMENT[spec.dtype]}, cutlass::layout::{orders[spec.lhs_layout]}, "
        f"{spec.align_lhs}, cutlass::layout::{orders[spec.rhs_layout]}, {spec.align_rhs}, "
        f"{_ELEMENT[spec.out_dtype]}, {spec.align_out}, "
        f"cutlass::gemm::GemmShape<16, 8, {8 if wide_type else 16}>, Tile<{block}>, Tree>"
    )


def source(*specs: CutlassSpec) -> str:
    """Return a source file with these instances."""
    bodies = [_body(spec, spec.symbol) for spec in specs]
    return "\n".join(['#include "cutlass_gemm.cuh"', *bodies])


def _body(spec: CutlassSpec, symbol: str) -> str:
    kind, arguments, functors, operands = _tree(spec)
    names = [f"e{i}" for i in range(len(operands))]
    parameters = "".join(f", {t}* {n}" for t, n in zip(operands, names, strict=True))
    tensors = "".join(f"TensorView {n}, " for n in names)
    passed, checks = [], []
    steps = [s for s in spec.steps if s.op in BINARY]
    for name, element, step in zip(names, operands, steps, strict=True):
        size = "p.n" if step.op == "bias" else "p.batch * p.m * p.n"
        checks.append(f'  CheckSize({name}, {size}, "{step.op}");\n')
        width = min(16, spec.align_out * BYTES[step.dtype])
        pointer = f'const_cast<void*>(Aligned({name}, {width}, "{step.op}"))'
        passed.append(f"static_cast<{element}*>({pointer})")
    call = ", ".join(["p", *passed])
    align_n = max(spec.align_out, spec.align_rhs if spec.rhs_layout == "KN" else 1)
    align_k = max(
        spec.align_lhs if spec.lhs_layout == "MK" else 1,
        spec.align_rhs if spec.rhs_layout == "NK" else 1,
    )
    instances = "".join(
        f"using Gemm{i} = {_instance(spec, tile)};\n" for i, tile in enumerate(spec.tiles)
    )
    if len(spec.tiles) == 2:
        rows, columns = spec.tiles[0].split("x")
        run = (
            f"  if (Blocks(p, {rows}, {columns}) >= Multiprocessors()) {{\n"
            f"    Gemm0::Run({call});\n  }} else {{\n    Gemm1::Run({call});\n  }}\n"
        )
    else:
        run = f"  Gemm0::Run({call});\n"
    bytes_in = BYTES[spec.dtype]
    out_width = spec.align_out * BYTES[spec.out_dtype]
    transposed = [str(spec.lhs_layout == "KM").lower(), str(spec.rhs_layout == "NK").lower()]
    return f"""
namespace relax_llm {{
namespace {symbol or "instance"} {{
{"".join(f + chr(10) for f in functors)}
template <class Map>
struct Tree {{
  using Type = {kind};
  static typename Type::Arguments Arguments(const Problem& p{parameters}) {{
    return {arguments};
  }}
}};

{instances}
void Run(TensorView lhs, TensorView rhs, {tensors}TensorView out) {{
  Problem p = Describe(lhs, rhs, out, {", ".join(transposed)}, {align_n}, {align_k});
  if (p.m == 0 || p.batch == 0) return;
{"".join(checks)}  p.lhs = Aligned(lhs, {spec.align_lhs * bytes_in}, "the left operand");
  p.rhs = Aligned(rhs, {spec.align_rhs * bytes_in}, "the right operand");
  p.out = const_cast<void*>(Aligned(out, {out_width}, "the result"));
{run}}}

}}  // namespace {symbol}
}}  // namespace relax_llm

TVM_FFI_DLL_EXPORT_TYPED_FUNC({symbol}, relax_llm::{symbol}::Run);
"""
