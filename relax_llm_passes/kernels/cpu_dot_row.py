"""Matrix-vector products by weights that lie as (N, K): dot products along a few runs of rows.

Each task takes some runs of neighbouring rows, far apart, and reads them together: a run is one
stream of memory, and several streams keep more reads under way than one. A vector of the left
operand is loaded once for all of them.

bfloat16 is the upper half of fp32, so that a vector of pairs becomes two of fp32 by a shift and a
mask. They hold every second value; the left operand is put into that order beforehand. Processors
with an instruction for pairs take both as they are (`cpu_bf16_dot`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from .cpu_bf16_dot import bf16_dot
from .cpu_build import (
    T,
    add_lanes,
    ceil_div,
    choose,
    divides,
    i64,
    let,
    load,
    local,
    splat,
    store,
    tasks,
    workspace,
)
from .cpu_gemv import emit_finish_tail
from .cpu_spec import GemmSpec
from .cpu_tiles import CpuTiles

__all__ = ["emit_dot_row", "runs_of"]

# Runs of a task: 20.9 GB/s on Zen 3, with two 18.3 and with eight 19.7 (shorter ones).
_RUNS = 4


def runs_of(blocks: Any, cores: int, wanted: int) -> tuple[int, int, Any]:
    """Return (tasks, runs of a task, blocks of a run): at most `wanted` runs, none of them empty.

    The last runs may reach beyond `blocks`, an int or an expression.
    """
    if not isinstance(blocks, int):
        return cores, wanted, ceil_div(blocks, cores * wanted)
    parts = max(1, min(cores, blocks))
    streams = max(1, min(wanted, blocks // parts))
    return parts, streams, -(-blocks // (parts * streams))


def emit_dot_row(spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any) -> None:
    """Emit the product of one row; `lhs` is fp32."""
    lanes, n, k, rhs = tiles.lanes, spec.n, spec.k, buffers["rhs"]
    dot = bool(tiles.bf16_dot) and spec.lhs_dtype == spec.rhs_dtype == "bfloat16"
    pairs = spec.rhs_dtype == "bfloat16"
    step = lanes * (2 if pairs else 1)
    steps = k // step
    x = _in_pairs(lhs, steps, lanes) if pairs and steps and not dot else lhs
    sums = 2 if pairs and not dot else 1
    blocks = ceil_div(n, lanes)
    parts, runs, share = runs_of(blocks, tiles.cores, _RUNS)
    # Sums of a run: with those of the other runs, enough to hide the latency of an add.
    accs = max(1, tiles.streams // (runs * sums))
    whole = isinstance(blocks, int) and parts * runs * share == blocks

    def words(buffer: Any, at: Any, kind: str) -> Any:
        both = tirx.BufferLoad(buffer, [tirx.Ramp(i64(at), i64(1), step)])
        return tirx.reinterpret(f"{kind}x{lanes}", both)

    def vectors(row: Any, at: Any) -> list[Any]:
        if not pairs:
            return [load(rhs, row * k + at, lanes)]
        word = let(words(rhs, row * k + at, "uint32"))
        low = word << splat(16, lanes, "uint32")
        high = word & splat(0xFFFF0000, lanes, "uint32")
        return [let(tirx.reinterpret(f"float32x{lanes}", v)) for v in (low, high)]

    def some(acc: Any, rows: list[Any], at: Any, count: int) -> None:
        for s in range(count):
            start = let(at + s * step)
            if dot:
                left = let(words(buffers["lhs"], start, "int32"))
            else:
                xs = [let(load(x, start + i * lanes, lanes)) for i in range(sums)]
            for c, row in enumerate(rows):
                slot = (c * accs + s % accs) * sums * lanes
                if dot:
                    total = load(acc, slot, lanes)
                    total = bf16_dot(total, left, words(rhs, row * k + start, "int32"), lanes)
                    store(acc, total, slot, lanes)
                    continue
                for i, (a, w) in enumerate(zip(xs, vectors(row, start), strict=True)):
                    total = load(acc, slot + i * lanes, lanes) + w * a
                    store(acc, total, slot + i * lanes, lanes)

    with tasks(i64(parts), n * k if isinstance(n, int) else None) as task:
        folded = local(runs * lanes * lanes)
        with T.serial(i64(0), i64(share)) as i:
            own = [let((task * runs + c) * share + i) for c in range(runs)]
            with T.serial(i64(0), i64(lanes)) as part:
                rows = []
                for block in own:
                    row = block * lanes + part
                    rows.append(
                        let(row if whole and divides(lanes, n) else tirx.min(row, i64(n - 1)))
                    )
                slots = accs * sums
                acc = local(runs * slots * lanes)
                for s in range(runs * slots):
                    store(acc, splat(0.0, lanes), s * lanes, lanes)
                many = steps // accs
                if many:
                    with T.serial(i64(0), i64(many)) as j:
                        some(acc, rows, let(j * (accs * step)), accs)
                if steps % accs:
                    with T.serial(i64(many * accs), i64(steps)) as j:
                        some(acc, rows, let(j * step), 1)
                for c in range(runs):
                    total = load(acc, c * slots * lanes, lanes)
                    for s in range(1, slots):
                        total = total + load(acc, (c * slots + s) * lanes, lanes)
                    store(folded, total, let((c * lanes + part) * lanes), lanes)
                if k % step:
                    with T.serial(i64(steps * step), i64(k)) as at:
                        for c, row in enumerate(rows):
                            slot = let((c * lanes + part) * lanes)
                            product = load(lhs, at) * load(rhs, row * k + at)
                            store(folded, load(folded, slot) + product, slot)
            for c, block in enumerate(own):
                parts_of = [load(folded, (c * lanes + j) * lanes, lanes) for j in range(lanes)]
                column = let(block * lanes)

                def finish(vectors: list[Any] = parts_of, column: Any = column) -> None:
                    total = add_lanes(vectors, lanes)
                    emit_finish_tail(spec, buffers, total, i64(0), column, lanes)

                choose(True if whole else column < n, finish, lambda: None)


def _in_pairs(lhs: Any, steps: int, lanes: int) -> Any:
    """Copy every two vectors of the left operand as one of even and one of odd places."""
    copy = workspace(steps * 2 * lanes)
    with T.serial(i64(0), i64(steps)) as j:
        at = let(j * (2 * lanes))
        a, b = let(load(lhs, at, lanes)), let(load(lhs, at + lanes, lanes))
        for i in range(2):
            places = list(range(i, 2 * lanes, 2))
            store(copy, tirx.Shuffle([a, b], places), at + i * lanes, lanes)
    return copy
