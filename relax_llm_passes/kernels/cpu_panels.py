"""Products with many rows: outer products of packed panels, all sums in registers.

The left operand is copied once into tiles of a few rows, K-major, in fp32. Each core then walks its
strips of the weight: a strip's panels are packed (or used as they are when the weight came packed
in fp32), and every tile of rows is multiplied by every panel. A long K is cut into blocks so that a
panel stays in the second-level cache; the sums then wait in scratch between the blocks.

Where a processor multiplies pairs of bfloat16 (`cpu_bf16_dot`) both operands stay as they are and
are packed by pairs: half of the instructions, half of the scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import tirx

from .cpu_bf16_dot import PAIRS, bf16_dot, load_pairs
from .cpu_build import T, ceil_div, choose, divides, i64, let, load, local, splat, store, workspace
from .cpu_gemv import emit_finish_tail
from .cpu_spec import GemmSpec
from .cpu_tiles import CpuTiles
from .cpu_weights import pack_panels

__all__ = ["emit_panel_product"]

# Bytes of packed fp32 panels a core keeps at hand: half of a usual second-level cache.
_STRIP_BYTES = 256 * 1024


def _panels(spec: GemmSpec, tiles: CpuTiles) -> int:
    """Return the panels of a strip.

    Two, which share what was loaded of the left operand. For (K, N) weights eight, if there is
    enough for every core: packing them reads longer runs of the weight's rows.
    """
    if spec.layout != "KN":
        return 2
    if not isinstance(spec.n, int):
        return 8
    share = -(-spec.n // (tiles.columns * tiles.cores))
    return max(2, min(8, share))


def _k_block(k: int, columns: int, panels: int) -> int:
    """Return the length of a block of K: all of it, or equal blocks, multiples of 16."""
    limit = _STRIP_BYTES // (4 * columns * panels)
    if k <= limit:
        return k
    blocks = -(-k // limit)
    length = -(-k // blocks)
    return -(-length // 16) * 16


def _pack_rows(spec: GemmSpec, tiles: CpuTiles, lhs: Any, m: Any) -> Any:
    """Copy the left operand into (M / rows, K, rows); rows beyond M repeat the last."""
    rows, k = tiles.rows, spec.k
    blocks = ceil_div(m, rows)
    pairs = spec.lhs_dtype == PAIRS
    packed = workspace(blocks * (rows * k), "int32" if pairs else "float32")
    with T.parallel(i64(0), blocks) as block:
        starts = [let(tirx.min(block * rows + r, m - 1) * k) for r in range(rows)]
        base = let(block * (rows * k))
        with T.serial(i64(0), i64(k)) as at:
            for r, start in enumerate(starts):
                value = load_pairs(lhs, start + at) if pairs else load(lhs, start + at)
                store(packed, value, base + at * rows + r)
    return packed


def emit_panel_product(spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], m: Any) -> None:
    """Emit the whole product; `m` is the number of rows, an expression."""
    both = spec.lhs_dtype == spec.rhs_dtype == "bfloat16" and spec.layout == "NK"
    pairs = bool(tiles.bf16_dot) and both and spec.k % 2 == 0
    if pairs:
        spec = replace(spec, k=spec.k // 2, lhs_dtype=PAIRS, rhs_dtype=PAIRS)
    dtype = "int32" if pairs else "float32"
    rows, columns, lanes, k = tiles.rows, tiles.columns, tiles.lanes, spec.k
    total_panels = ceil_div(spec.n, columns)
    direct = spec.layout == "packed" and spec.rhs_dtype == "float32"
    width = _panels(spec, tiles)
    block = _k_block(k, columns, width)
    blocks = -(-k // block)
    lhs = _pack_rows(spec, tiles, buffers["lhs"], m)
    row_blocks = ceil_div(m, rows)
    size = rows * columns

    def multiply(
        right: Any, left_at: Any, right_at: Any, k_size: Any, sums: Any, sums_at: Any, first: Any
    ) -> None:
        """Emit sums[tile] (+)= left tile x panel over a block of K."""
        acc = local(size)
        slots = range(0, size, lanes)

        def zero() -> None:
            for slot in slots:
                store(acc, splat(0.0, lanes), slot, lanes)

        def resume() -> None:
            for slot in slots:
                store(acc, load(sums, sums_at + slot, lanes), slot, lanes)

        choose(first, zero, resume)
        with T.serial(i64(0), k_size) as at:
            bs = [
                let(load(right, right_at + at * columns + q * lanes, lanes, dtype))
                for q in range(tiles.vectors)
            ]
            for r in range(rows):
                a = let(splat(load(lhs, left_at + at * rows + r, 1, dtype), lanes))
                for q, b in enumerate(bs):
                    slot = r * columns + q * lanes
                    total = load(acc, slot, lanes)
                    total = bf16_dot(total, a, b, lanes) if pairs else total + a * b
                    store(acc, total, slot, lanes)
        for slot in slots:
            store(sums, load(acc, slot, lanes), sums_at + slot, lanes)

    def finish(sums: Any, sums_at: Any, row_block: Any, panel: Any) -> None:
        with T.serial(i64(0), tirx.min(i64(rows), m - row_block * rows)) as r:
            start = let((row_block * rows + r) * spec.n)
            for q in range(tiles.vectors):
                column = let(panel * columns + q * lanes)
                value = load(sums, sums_at + r * columns + q * lanes, lanes)

                def one(value: Any = value, column: Any = column, start: Any = start) -> None:
                    emit_finish_tail(spec, buffers, let(value), start, column, lanes)

                inside = isinstance(spec.n, int) and 0 < spec.n % columns <= q * lanes
                if inside or not isinstance(spec.n, int):
                    with T.If(column < spec.n):
                        with T.Then():
                            one()
                else:
                    one()

    with T.parallel(i64(0), i64(ceil_div(total_panels, width))) as strip:
        panel = let(strip * width)
        panels: Any = i64(width)
        if not divides(width, total_panels):
            panels = let(tirx.min(i64(width), i64(total_panels) - panel))
        scratch = buffers["rhs"] if direct else workspace(width * block * columns, dtype)
        if blocks == 1:
            sums = local(size)
        else:
            sums = workspace(row_blocks * (width * size))

        def over_k(kb: Any) -> None:
            k_start: Any = i64(0) if blocks == 1 else let(kb * block)
            k_size: Any = i64(block)
            if k % block:
                k_size = let(tirx.min(i64(block), i64(k) - k_start))
            if not direct:
                pack_panels(
                    spec,
                    tiles,
                    buffers,
                    scratch,
                    panel=panel,
                    panels=panels,
                    k_start=k_start,
                    k_size=k_size,
                    capacity=block,
                )
            with T.serial(i64(0), row_blocks) as row_block:
                left_at = let((row_block * k + k_start) * rows)
                with T.serial(i64(0), panels) as p:
                    if direct:
                        right_at = let(((panel + p) * k + k_start) * columns)
                    else:
                        right_at = let(p * (block * columns))
                    at: Any = i64(0)
                    if blocks > 1:
                        at = let((row_block * width + p) * size)
                    first = True if blocks == 1 else tirx.EQ(kb, i64(0))
                    multiply(scratch, left_at, right_at, k_size, sums, at, first)
                    if blocks == 1:
                        finish(sums, at, row_block, panel + p)
                    else:
                        with T.If(tirx.EQ(kb, i64(blocks - 1))):
                            with T.Then():
                                finish(sums, at, row_block, panel + p)

        if blocks == 1:
            over_k(i64(0))
        else:
            with T.serial(i64(0), i64(blocks)) as kb:
                over_k(kb)
