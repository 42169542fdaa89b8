"""Register tiles of the CPU matrix kernels, chosen from the target's vector unit."""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from ..targets import num_threads, vector_lanes, vector_registers
from .cpu_bf16_dot import bf16_dot_source

__all__ = ["CpuTiles", "cpu_tiles"]


@dataclass(frozen=True)
class CpuTiles:
    """Sizes of the tiles.

    Attributes
    ----------
    lanes : int
        fp32 values in a vector.
    rows, vectors : int
        Outer-product tile of the matrix product: `rows` rows of the left operand times `vectors`
        vectors of columns, all accumulators in registers.
    dot_rows, dot_columns : int
        Inner-product tile of a skinny product: rows of the left operand times rows of an (N, K)
        weight.
    streams : int
        Sums of a matrix-vector product that are open at a time, to hide the latency of an add.
    cores : int
        Threads to cut work for.
    dot16, dot8 : str
        LLVM's names of the instructions that multiply vectors of int16, and of uint8 by int8, and
        add neighbours, or "".
    dot8_add : str
        The same of the one that adds four products of bytes (0 to 127, and int8) to an int32.
    bf16_dot : str
        LLVM's text of a product of pairs of bfloat16 (`cpu_bf16_dot`), or "".
    """

    lanes: int
    rows: int
    vectors: int
    dot_rows: int
    dot_columns: int
    streams: int
    cores: int
    dot16: str = ""
    dot8: str = ""
    dot8_add: str = ""
    bf16_dot: str = ""

    @property
    def columns(self) -> int:
        """Columns of the outer-product tile; a packed panel's width."""
        return self.lanes * self.vectors


def cpu_tiles(target: tvm.target.Target) -> CpuTiles:
    """Return the tiles for an llvm target.

    16 registers hold 6 x 2 accumulators, two vectors of weights and a broadcast; 32 hold 12 x 2
    of a wide unit, or 6 x 4 of a narrow one (whose loads would else outnumber its adds).
    """
    lanes = max(4, vector_lanes(target, "float32"))
    many = vector_registers(target) >= 32
    if many and lanes >= 16:
        rows, vectors = 12, 2
    elif many:
        rows, vectors = 6, 4
    else:
        rows, vectors = 6, 2
    return CpuTiles(
        lanes=lanes,
        rows=rows,
        vectors=vectors,
        dot_rows=4 if many else 2,
        dot_columns=4,
        streams=8,
        cores=num_threads(target),
        dot16=_instruction(target, _DOT16.get(lanes, ())),
        dot8=_instruction(target, _DOT8.get(lanes, ())),
        dot8_add=_instruction(target, _DOT8_ADD.get(lanes, ())),
        bf16_dot=bf16_dot_source(target, lanes),
    )


# By lanes of fp32: intrinsics and the processor's features that have them.
_DOT16 = {
    4: (("llvm.x86.sse2.pmadd.wd", "sse2"),),
    8: (("llvm.x86.avx2.pmadd.wd", "avx2"),),
    16: (("llvm.x86.avx512.pmaddw.d.512", "avx512bw"),),
}
_DOT8 = {
    4: (("llvm.x86.ssse3.pmadd.ub.sw.128", "ssse3"),),
    8: (("llvm.x86.avx2.pmadd.ub.sw", "avx2"),),
    16: (("llvm.x86.avx512.pmaddubs.w.512", "avx512bw"),),
}
_DOT8_ADD = {
    4: (("llvm.aarch64.neon.sdot", "dotprod"),),
    8: (("llvm.x86.avx512.vpdpbusd.256", "avxvnni"),),
    16: (("llvm.x86.avx512.vpdpbusd.512", "avx512vnni"),),
}


def _instruction(target: tvm.target.Target, candidates: tuple[tuple[str, str], ...]) -> str:
    has = tvm.get_global_func("target.target_has_feature", allow_missing=True)
    if has is None:
        return ""
    return next((name for name, feature in candidates if has(feature, target)), "")
