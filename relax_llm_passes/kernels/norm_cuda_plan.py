"""How a row program is laid over CUDA threads: lanes, rows, registers, vectors, blocks per row.

Decided from static facts: extents, element sizes and the target's limits. What the choices mean is
said in `norm_cuda`.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from .norm_program import RowProgram

__all__ = ["FILL_BLOCKS", "CudaPlan", "plan_cuda"]

# Blocks below which a GPU of today (108 to 148 multiprocessors) has idle ones.
FILL_BLOCKS = 132
MAX_KEPT = 32  # values a thread keeps in registers for one row


@dataclass(frozen=True)
class CudaPlan:
    """How a row program is laid over threads.

    Attributes
    ----------
    lanes : int
        Threads that share a row (a power of two).
    rows_per_block : int
        Rows in a block.
    chunks : int
        Vectors of the row that each thread keeps in registers.
    vector : int
        Elements loaded at once.
    columns : bool
        Neighbouring threads take neighbouring rows instead of neighbouring elements.
    split : int
        Blocks per row; above 1 a second kernel follows.
    """

    lanes: int
    rows_per_block: int
    chunks: int
    vector: int
    columns: bool = False
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.lanes * self.rows_per_block


def _pow2_at_least(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def plan_cuda(prog: RowProgram, target: tvm.target.Target | None = None) -> CudaPlan:
    """Choose a plan from the extents, the element size and the target's limits."""
    attrs = dict(target.attrs) if target is not None else {}
    limit = min(1024, int(attrs.get("max_threads_per_block", 1024)))
    length, rows = prog.length, prog.rows
    static_len = length if isinstance(length, int) else None
    static_rows = rows if isinstance(rows, int) else None
    if not prog.axes[-1].reduced:
        return _plan_columns(prog, limit, static_len, static_rows)
    widest = min(
        [16 // max(1, tvm.DataType(prog.tensors[ld.tensor].dtype).bits // 8) for ld in prog.loads]
        or [4]
    )
    vector = max(1, min(prog.contiguous, widest))
    kept = max(1, len(prog.loads))
    if static_len is None:
        few = static_rows is not None and static_rows < FILL_BLOCKS
        split = 32 if prog.moments and few else 1
        lanes = min(256, limit)
        chunks = max(1, MAX_KEPT // (2 * vector * kept))
        return CudaPlan(lanes, 1, chunks, vector, split=split)
    split = 1
    if prog.moments and static_rows is not None and static_rows < FILL_BLOCKS:
        # Chunks no smaller than 2048 elements: below that the second launch costs more.
        while (
            split < 32
            and static_rows * split < 2 * FILL_BLOCKS
            and (static_len // (split * 2) >= 2048)
        ):
            split *= 2
    part = -(-static_len // split)
    while vector > 1 and part <= 32 * vector // 2:
        vector //= 2  # short rows: more lanes rather than wider loads
    vectors = -(-part // vector)
    if part * kept <= 32 * MAX_KEPT:
        lanes = min(32, _pow2_at_least(vectors))
    else:
        lanes = min(limit, max(64, _pow2_at_least(-(-part * kept // 16))))
    chunks = -(-vectors // lanes)
    chunks = min(chunks, max(1, MAX_KEPT // (vector * kept)))
    per_block = max(1, min(128, limit) // lanes)
    if static_rows is not None:
        least = max(1, 32 // lanes)
        while per_block > least and static_rows * split < per_block * FILL_BLOCKS:
            per_block //= 2
    if split > 1:
        per_block = 1
    return CudaPlan(lanes, per_block, chunks, vector, split=split)


def _plan_columns(
    prog: RowProgram, limit: int, static_len: int | None, static_rows: int | None
) -> CudaPlan:
    kept = max(1, len(prog.loads))
    most = max(1, MAX_KEPT // kept)
    last = prog.axes[-1].extent
    across = 32 if not isinstance(last, int) else min(32, _pow2_at_least(last))
    if static_len is None:
        lanes = min(16, limit // across)
        return CudaPlan(lanes, across, max(1, most // 2), 1, columns=True)
    lanes = 1
    while lanes * across < limit and lanes * 2 <= static_len and -(-static_len // lanes) > 8:
        lanes *= 2
    if static_rows is not None:
        # Few rows: share each among more threads as long as blocks would stand idle.
        while (
            lanes * across < min(limit, 256)
            and lanes * 2 <= static_len
            and static_rows < across * FILL_BLOCKS
            and lanes < 32
        ):
            lanes *= 2
    chunks = min(-(-static_len // lanes), most)
    return CudaPlan(lanes, across, chunks, 1, columns=True)
