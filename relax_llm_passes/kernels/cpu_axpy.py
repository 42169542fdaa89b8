"""Matrix-vector products by weights whose columns lie together: rows of the weight added up.

(K, N) weights are walked in wide strips of columns: the sums of a strip stay in the first-level
cache while the strip's part of every row of the weight streams by, several rows at a time so that a
sum is loaded and stored once for all of them. These rows lie far apart, so that with one strip each
is one stream of memory (three times the bandwidth of neighbouring short rows). With few strips the
cores share out the rows, not the columns, and their sums are added at the end. Packed panels are
narrower: their sums stay in registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from .cpu_build import T, ceil_div, divides, i64, let, load, local, splat, store, tasks, workspace
from .cpu_gemv import emit_finish_tail
from .cpu_spec import GemmSpec
from .cpu_tiles import CpuTiles

__all__ = ["MAX_PARTS", "STRIP", "emit_axpy", "emit_axpy_panels", "emit_axpy_rows", "strips_of"]

# Columns of a strip at most: 16 KiB of fp32 sums, half a small first-level cache.
STRIP = 4096
# Rows of the weight added up at a time.
_DEPTH = 8
# Rows that a core gets at least, and cores that share one strip at most.
_MIN_ROWS, MAX_PARTS = 64, 16


def strips_of(n: Any, step: int, wanted: int) -> tuple[int, Any]:
    """Return (columns of a strip, strips): `wanted` equal ones, or the widest for a symbolic N."""
    if not isinstance(n, int):
        return STRIP, ceil_div(n, STRIP)
    strip = -(-n // (wanted * step)) * step
    return strip, -(-n // strip)


def emit_axpy(spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any) -> None:
    """Emit `out[n] = sum over k of lhs[k] * rhs[k, n]` for one row; `lhs` is fp32."""
    n, k, lanes = spec.n, spec.k, tiles.lanes
    strip, strips = strips_of(n, lanes, -(-n // STRIP) if isinstance(n, int) else 1)
    parts = 1
    if isinstance(strips, int):
        parts = max(1, min(-(-tiles.cores // strips), k // _MIN_ROWS, MAX_PARTS))
    share = -(-k // parts)
    share = -(-share // _DEPTH) * _DEPTH
    padded = strips * strip
    rhs = buffers["rhs"]
    sums = workspace(parts * padded) if parts > 1 else None

    def add(acc: Any, xs: list[Any], starts: list[Any], at: Any, width: int) -> None:
        total = load(acc, at, width)
        for x, start in zip(xs, starts, strict=True):
            total = total + splat(x, width) * load(rhs, start + at, width)
        store(acc, total, at, width)

    def rows(acc: Any, row: Any, depth: int, apart: Any, column: Any, width: Any) -> None:
        each = [let(row + d * apart) for d in range(depth)]
        xs = [let(load(lhs, at)) for at in each]
        starts = [let(at * n + column) for at in each]
        whole = tirx.floordiv(width, i64(lanes))
        with T.serial(i64(0), whole) as v:
            add(acc, xs, starts, let(v * lanes), lanes)
        if not divides(lanes, n):
            with T.serial(i64(0), width - whole * lanes) as v:
                add(acc, xs, starts, let(whole * lanes + v), 1)

    with tasks(i64(strips * parts), n * k) as task:
        acc = local(strip)
        part = let(tirx.floordiv(task, i64(strips)))
        column = let((task - part * strips) * strip)
        first = let(part * share)
        size = let(tirx.max(tirx.min(i64(share), i64(k) - first), i64(0)))
        width = let(tirx.min(i64(strip), i64(n) - column)) if not divides(strip, n) else i64(strip)
        with T.serial(i64(0), i64(strip // lanes)) as v:
            store(acc, splat(0.0, lanes), v * lanes, lanes)
        blocks = let(tirx.floordiv(size, i64(_DEPTH)))
        with T.serial(i64(0), blocks) as ko:
            rows(acc, let(first + ko), _DEPTH, blocks, column, width)
        if k % _DEPTH:
            with T.serial(blocks * _DEPTH, size) as ki:
                rows(acc, let(first + ki), 1, i64(0), column, width)
        with T.serial(i64(0), ceil_div(width, lanes)) as v:
            value = let(load(acc, v * lanes, lanes))
            at = let(column + v * lanes)
            if sums is None:
                emit_finish_tail(spec, buffers, value, i64(0), at, lanes)
            else:
                store(sums, value, part * padded + at, lanes)
    if sums is not None:
        with T.serial(i64(0), i64(-(-n // lanes))) as v:
            total = load(sums, v * lanes, lanes)
            for p in range(1, parts):
                total = total + load(sums, v * lanes + p * padded, lanes)
            emit_finish_tail(spec, buffers, let(total), i64(0), let(v * lanes), lanes)


def emit_axpy_rows(
    spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, m: Any, limit: int
) -> None:
    """Emit the same for `m` rows, at most `limit`: each weight vector is used for all of them."""
    n, k, lanes = spec.n, spec.k, tiles.lanes
    wanted = 1
    if isinstance(n, int):
        wanted = max(-(-n // STRIP), min(tiles.cores, max(1, n // (4 * lanes))))
    strip, strips = strips_of(n, lanes, wanted)
    blocks = k // _DEPTH
    rhs = buffers["rhs"]

    def add(acc: Any, xs: Any, starts: list[Any], at: Any, width: int) -> None:
        weights = [let(load(rhs, start + at, width)) for start in starts]
        with T.serial(i64(0), m) as r:
            total = load(acc, r * strip + at, width)
            for d, weight in enumerate(weights):
                total = total + splat(let(load(xs, r * _DEPTH + d)), width) * weight
            store(acc, total, r * strip + at, width)

    def rows(acc: Any, xs: Any, row: Any, depth: int, column: Any, width: Any) -> None:
        each = [let(row + d * blocks) for d in range(depth)]
        with T.serial(i64(0), m) as r:
            for d, at in enumerate(each):
                store(xs, load(lhs, r * k + at), r * _DEPTH + d)
        starts = [let(at * n + column) for at in each]
        whole = tirx.floordiv(width, i64(lanes))
        with T.serial(i64(0), whole) as v:
            add(acc, xs, starts, let(v * lanes), lanes)
        if not divides(lanes, n):
            with T.serial(i64(0), width - whole * lanes) as v:
                add(acc, xs, starts, let(whole * lanes + v), 1)

    with T.parallel(i64(0), i64(strips)) as task:
        acc, xs = workspace(limit * strip), local(limit * _DEPTH)
        column = let(task * strip)
        width = let(tirx.min(i64(strip), i64(n) - column)) if not divides(strip, n) else i64(strip)
        with T.serial(i64(0), m * (strip // lanes)) as v:
            store(acc, splat(0.0, lanes), v * lanes, lanes)
        with T.serial(i64(0), i64(blocks)) as ko:
            rows(acc, xs, ko, _DEPTH, column, width)
        with T.serial(i64(blocks * _DEPTH), i64(k)) as ki:
            rows(acc, xs, ki, 1, column, width)
        with T.serial(i64(0), m) as r:
            with T.serial(i64(0), ceil_div(width, lanes)) as v:
                value = let(load(acc, r * strip + v * lanes, lanes))
                at = let(column + v * lanes)
                emit_finish_tail(spec, buffers, value, let(r * n), at, lanes)


def emit_axpy_panels(spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any) -> None:
    """Emit the same for a weight packed as (N / columns, K, columns), some panels at a time."""
    n, k, lanes, columns = spec.n, spec.k, tiles.lanes, tiles.columns
    panels = -(-n // columns)
    together = max(1, min(tiles.streams // tiles.vectors, panels // max(1, tiles.cores)))
    rhs = buffers["rhs"]

    with tasks(i64(ceil_div(panels, together)), n * k) as group:
        acc = local(together * columns)
        for slot in range(together * tiles.vectors):
            store(acc, splat(0.0, lanes), slot * lanes, lanes)
        first, starts = let(group * together), []
        for p in range(together):
            panel = first + p
            if panels % together:
                panel = tirx.min(panel, i64(panels - 1))
            starts.append(let(panel * (k * columns)))
        with T.serial(i64(0), i64(k)) as row:
            x = let(load(lhs, row))
            for p, start in enumerate(starts):
                for q in range(tiles.vectors):
                    slot = (p * tiles.vectors + q) * lanes
                    weight = load(rhs, start + row * columns + q * lanes, lanes)
                    store(acc, load(acc, slot, lanes) + splat(x, lanes) * weight, slot, lanes)
        spare = local(together * columns)
        for slot in range(together * tiles.vectors):
            store(spare, load(acc, slot * lanes, lanes), slot * lanes, lanes)
        vectors = tirx.min(
            i64(together * tiles.vectors), i64(-(-n // lanes)) - first * tiles.vectors
        )
        with T.serial(i64(0), vectors) as v:
            column = let(first * columns + v * lanes)
            value = let(load(spare, v * lanes, lanes))
            emit_finish_tail(spec, buffers, value, i64(0), column, lanes)
