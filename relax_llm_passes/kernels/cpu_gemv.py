"""Products with few rows by weights that lie as (N, K): dot products along the rows.

A weight's rows are read once, a few neighbouring rows at a time. Each weight vector that was loaded
is used for all rows of a tile; nothing is packed or transposed. One row: `cpu_dot_row`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tvm import tirx

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
)
from .cpu_epilogue import Epilogue
from .cpu_spec import GemmSpec
from .cpu_tiles import CpuTiles
from .cpu_weights import row_reader

__all__ = ["emit_dot_rows", "emit_finish_tail"]


class _Product(Protocol):
    """What is read of a product's spec here."""

    @property
    def n(self) -> Any:
        """Columns."""

    @property
    def epilogue(self) -> Epilogue:
        """Steps after the sum."""


def emit_finish_tail(
    spec: _Product,
    buffers: Mapping[str, Any],
    value: Any,
    row_start: Any,
    column: Any,
    lanes: int,
) -> None:
    """Finish a vector of columns, of which the last ones may lie beyond N."""
    if divides(lanes, spec.n):
        spec.epilogue.finish(buffers, value, row_start, column, lanes)
        return

    def whole() -> None:
        spec.epilogue.finish(buffers, value, row_start, column, lanes)

    def part() -> None:
        spare = local(lanes)
        store(spare, value, 0, lanes)
        with T.serial(i64(0), i64(spec.n) - column) as j:
            spec.epilogue.finish(buffers, let(load(spare, j)), row_start, let(column + j), 1)

    if isinstance(spec.n, int) and spec.n < lanes:
        part()
    else:
        choose(column + lanes <= spec.n, whole, part)


def emit_dot_rows(
    spec: GemmSpec,
    tiles: CpuTiles,
    buffers: Mapping[str, Any],
    lhs: Any,
    m: Any,
    *,
    rows: int,
    columns: int,
) -> None:
    """Emit the whole product as dot products.

    Parameters
    ----------
    lhs : Buffer
        The left operand in fp32, rows of length K.
    m : Expr or int
        Rows of the left operand.
    rows, columns : int
        Tile: rows of the left operand, rows of the weight.
    """
    lanes, n, k = tiles.lanes, spec.n, spec.k
    read = row_reader(spec, buffers)

    def tile(block: Any, group: Any, sums: Any) -> None:
        left = [let(tirx.min(block * rows + r, m - 1) * k) for r in range(rows)]
        with T.serial(i64(0), i64(lanes)) as part:
            right = []
            for c in range(columns):
                column = group * (lanes * columns) + c * lanes + part
                if not divides(lanes * columns, n):
                    column = tirx.min(column, i64(n - 1))
                right.append(let(column))
            acc = local(rows * columns * lanes)
            for slot in range(rows * columns):
                store(acc, splat(0.0, lanes), slot * lanes, lanes)
            if k >= lanes:
                with T.serial(i64(0), i64(k // lanes)) as ko:
                    at = let(ko * lanes)
                    xs = [let(load(lhs, start + at, lanes)) for start in left]
                    for c, row in enumerate(right):
                        w = let(read(row, at, lanes))
                        for r, x in enumerate(xs):
                            slot = (r * columns + c) * lanes
                            store(acc, load(acc, slot, lanes) + w * x, slot, lanes)
            for slot in range(rows * columns):
                total = load(acc, slot * lanes, lanes)
                store(sums, total, let((slot * lanes + part) * lanes), lanes)
            if k % lanes:
                with T.serial(i64(0), i64(k % lanes)) as ki:
                    at = let(ki + k // lanes * lanes)
                    for r in range(rows):
                        for c in range(columns):
                            slot = let(((r * columns + c) * lanes + part) * lanes)
                            product = load(lhs, left[r] + at) * read(right[c], at, 1)
                            store(sums, load(sums, slot) + product, slot)

    def finish(row: Any, group: Any, sums: Any, r: Any) -> None:
        first = let(group * (lanes * columns))
        vectors = tirx.min(i64(columns), i64(ceil_div(n, lanes)) - group * columns)
        with T.serial(i64(0), vectors) as c:
            at = let((r * columns + c) * (lanes * lanes))
            total = add_lanes([load(sums, at + j * lanes, lanes) for j in range(lanes)], lanes)
            emit_finish_tail(spec, buffers, total, let(row * n), let(first + c * lanes), lanes)

    work = m * n * k if isinstance(m, int) and isinstance(n, int) else None
    with tasks(i64(ceil_div(n, lanes * columns)), work) as group:
        sums = local(rows * columns * lanes * lanes)
        with T.serial(i64(0), ceil_div(m, rows)) as block:
            tile(block, group, sums)
            with T.serial(i64(0), tirx.min(i64(rows), m - block * rows)) as r:
                finish(block * rows + r, group, sums, r)
