"""How CPU kernels read a weight: rows as fp32 vectors, panels packed into fp32 scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from .cpu_bf16_dot import PAIRS, load_pairs
from .cpu_build import T, cast, choose, divides, i64, let, load, splat, store
from .cpu_spec import GemmSpec, QuantSpec
from .cpu_tiles import CpuTiles

__all__ = ["column_reader", "pack_panels", "row_reader", "transpose"]

RowReader = Callable[[Any, Any, int], Any]


def row_reader(spec: GemmSpec, buffers: Mapping[str, Any]) -> RowReader:
    """Return `read(row, k, lanes)`: fp32 values k.. of one row of an (N, K) weight.

    Of a weight of `PAIRS` it gives pairs of bfloat16 as int32, and K counts pairs.
    """
    if spec.quant is not None:
        return _quantised_reader(spec, spec.quant, buffers)
    rhs = buffers["rhs"]

    def read(row: Any, k: Any, lanes: int) -> Any:
        if spec.rhs_dtype == PAIRS:
            return load_pairs(rhs, row * spec.k + k, lanes)
        return load(rhs, row * spec.k + k, lanes)

    return read


def _quantised_reader(spec: GemmSpec, quant: QuantSpec, buffers: Mapping[str, Any]) -> RowReader:
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    words = -(-spec.k // quant.per_word)
    groups = -(-spec.k // quant.group)
    mask = (1 << quant.bits) - 1

    def integers(row: Any, k: Any, lanes: int) -> Any:
        """Return integers k.. of a row as int32; k is a multiple of lanes, or lanes is 1."""
        per = quant.per_word
        first = row * words + tirx.floordiv(k, i64(per))
        if lanes >= per:
            parts = [
                splat(let(load(packed, first + w, 1, "uint32")), per) for w in range(lanes // per)
            ]
            shifts = _vector([quant.bits * j for j in range(per)])
            parts = [(p >> shifts) & splat(mask, per, "uint32") for p in parts]
            whole = parts[0] if len(parts) == 1 else _join(parts, lanes)
            return tirx.Cast(f"int32x{lanes}", whole)
        word = let(load(packed, first, 1, "uint32"))
        base = tirx.Cast("uint32", tirx.floormod(k, i64(per)) * quant.bits)
        word = let(word >> base)
        if lanes == 1:
            return tirx.Cast("int32", word & tirx.const(mask, "uint32"))
        shifts = _vector([quant.bits * j for j in range(lanes)])
        value = (splat(word, lanes) >> shifts) & splat(mask, lanes, "uint32")
        return tirx.Cast(f"int32x{lanes}", value)

    def read(row: Any, k: Any, lanes: int) -> Any:
        value = cast(integers(row, k, lanes), "float32", lanes)
        scale = let(load(scales, row * groups + tirx.floordiv(k, i64(quant.group))))
        return (value - splat(float(quant.offset), lanes)) * splat(scale, lanes)

    return read


def column_reader(spec: GemmSpec, buffers: Mapping[str, Any]) -> RowReader:
    """Return `read(k, column, lanes)`: fp32 values of neighbouring columns of a (K, N) weight."""
    n, quant = spec.n, spec.quant
    if quant is None:
        rhs = buffers["rhs"]
        return lambda k, column, lanes: load(rhs, k * n + column, lanes)
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    mask = (1 << quant.bits) - 1

    def read(k: Any, column: Any, lanes: int) -> Any:
        word = load(packed, tirx.floordiv(k, i64(quant.per_word)) * n + column, lanes, "uint32")
        shift = tirx.Cast("uint32", tirx.floormod(k, i64(quant.per_word)) * quant.bits)
        value = let((word >> splat(shift, lanes)) & splat(mask, lanes, "uint32"))
        value = cast(tirx.Cast(f"int32x{lanes}" if lanes > 1 else "int32", value), "float32", lanes)
        scale = let(load(scales, tirx.floordiv(k, i64(quant.group)) * n + column, lanes))
        return (value - splat(float(quant.offset), lanes)) * scale

    return read


def _vector(values: Sequence[int]) -> Any:
    if len(values) == 1:
        return tirx.const(values[0], "uint32")
    step = values[1] - values[0]
    return tirx.Ramp(tirx.const(values[0], "uint32"), tirx.const(step, "uint32"), len(values))


def _join(parts: Sequence[Any], lanes: int) -> Any:
    return tirx.Shuffle([let(p) for p in parts], list(range(lanes)))


def transpose(rows: Sequence[Any], lanes: int) -> list[Any]:
    """Transpose `lanes` vectors of `lanes` values.

    First 4 x 4 blocks inside the 128-bit parts of the vectors (one instruction a shuffle on every
    x86), then the blocks change places between vectors.
    """
    blocks = lanes // 4
    low, high, first, second = [], [], [], []
    for b in range(0, lanes, 4):
        low += [b, lanes + b, b + 1, lanes + b + 1]
        high += [b + 2, lanes + b + 2, b + 3, lanes + b + 3]
        first += [b, b + 1, lanes + b, lanes + b + 1]
        second += [b + 2, b + 3, lanes + b + 2, lanes + b + 3]

    def shuffle(a: Any, b: Any, indices: list[int]) -> Any:
        return let(tirx.Shuffle([a, b], indices))

    out: list[list[Any]] = []
    for g in range(blocks):
        r = [let(v) for v in rows[4 * g : 4 * g + 4]]
        t0, t1 = shuffle(r[0], r[1], low), shuffle(r[0], r[1], high)
        t2, t3 = shuffle(r[2], r[3], low), shuffle(r[2], r[3], high)
        out.append(
            [
                shuffle(t0, t2, first),
                shuffle(t0, t2, second),
                shuffle(t1, t3, first),
                shuffle(t1, t3, second),
            ]
        )
    step = 1
    while step < blocks:
        mine, other = [], []
        for block in range(blocks):
            for e in range(4):
                swapped = (block ^ step) * 4 + e
                own = block * 4 + e
                mine.append(lanes + swapped if block & step else own)
                other.append(lanes + own if block & step else swapped)
        for g in range(blocks):
            if g & step:
                continue
            for i in range(4):
                a, b = out[g][i], out[g + step][i]
                out[g][i], out[g + step][i] = shuffle(a, b, mine), shuffle(a, b, other)
        step *= 2
    return [vector for group in out for vector in group]


def pack_panels(
    spec: GemmSpec,
    tiles: CpuTiles,
    buffers: Mapping[str, Any],
    scratch: Any,
    *,
    panel: Any,
    panels: Any,
    k_start: Any,
    k_size: Any,
    capacity: int,
) -> None:
    """Emit the packing of some panels, as fp32, of a part of K.

    `scratch` gets (panels, capacity, columns), of which k_size rows are filled. Columns beyond N
    get any numbers: nobody stores what they give.

    Parameters
    ----------
    panel, panels : Expr
        First panel and how many.
    k_start, k_size : Expr
        Part of K.
    capacity : int
        Rows of a panel in the scratch.
    """
    columns = tiles.columns
    if spec.layout == "KN":
        _copy_columns(spec, tiles, buffers, scratch, panel, panels, k_start, k_size, capacity)
        return
    with T.serial(i64(0), panels) as p:
        base = let(p * (capacity * columns))
        if spec.layout == "packed":
            _copy_panel(spec, tiles, buffers, scratch, base, panel + p, k_start, k_size)
        else:
            first = let((panel + p) * columns)
            _transpose_rows(spec, tiles, buffers, scratch, base, first, k_start, k_size)


def _copy_panel(
    spec: GemmSpec,
    tiles: CpuTiles,
    buffers: Mapping[str, Any],
    scratch: Any,
    base: Any,
    panel: Any,
    k_start: Any,
    k_size: Any,
) -> None:
    columns, lanes = tiles.columns, tiles.lanes
    start = let((panel * spec.k + k_start) * columns)
    with T.serial(i64(0), k_size) as k:
        for q in range(tiles.vectors):
            at = k * columns + q * lanes
            store(scratch, load(buffers["rhs"], start + at, lanes), base + at, lanes)


def _copy_columns(
    spec: GemmSpec,
    tiles: CpuTiles,
    buffers: Mapping[str, Any],
    scratch: Any,
    panel: Any,
    panels: Any,
    k_start: Any,
    k_size: Any,
    capacity: int,
) -> None:
    """Copy row by row of the weight, so that all panels of a row are one run of memory."""
    columns, lanes, n = tiles.columns, tiles.lanes, spec.n
    read = column_reader(spec, buffers)
    first = let(panel * columns)

    def at(p: Any, k: Any) -> Any:
        return (p * capacity + k) * columns

    def whole() -> None:
        with T.serial(i64(0), k_size) as k:
            row = let(k_start + k)
            with T.serial(i64(0), panels) as p:
                for q in range(tiles.vectors):
                    value = read(row, first + p * columns + q * lanes, lanes)
                    store(scratch, value, at(p, k) + q * lanes, lanes)

    def part() -> None:
        with T.serial(i64(0), k_size) as k:
            row = let(k_start + k)
            with T.serial(i64(0), panels) as p:
                with T.serial(i64(0), i64(columns)) as j:
                    column = tirx.min(first + p * columns + j, i64(n - 1))
                    store(scratch, read(row, column, 1), at(p, k) + j)

    if divides(columns, n):
        whole()
    elif isinstance(n, int) and n < columns:
        part()
    else:
        choose(first + panels * columns <= n, whole, part)


def _transpose_rows(
    spec: GemmSpec,
    tiles: CpuTiles,
    buffers: Mapping[str, Any],
    scratch: Any,
    base: Any,
    first: Any,
    k_start: Any,
    k_size: Any,
) -> None:
    columns, lanes, n = tiles.columns, tiles.lanes, spec.n
    read = row_reader(spec, buffers)
    rows = []
    for j in range(columns):
        row = first + j
        rows.append(let(tirx.min(row, i64(n - 1)) if not divides(columns, n) else row))
    whole = let(tirx.floordiv(k_size, i64(lanes)))
    # All rows of the panel in one pass: whole cache lines of the scratch are written.
    with T.serial(i64(0), whole) as ko:
        k = let(ko * lanes)
        for q in range(0, columns, lanes):
            some = [read(row, k_start + k, lanes) for row in rows[q : q + lanes]]
            for i, vector in enumerate(transpose(some, lanes)):
                store(scratch, vector, base + (k + i) * columns + q, lanes)
    if spec.k % lanes:
        with T.serial(whole * lanes, k_size) as k:
            for j, row in enumerate(rows):
                store(scratch, read(row, k_start + k, 1), base + k * columns + j)
