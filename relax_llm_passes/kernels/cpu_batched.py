"""Products of two activations on the CPU: a batch of small matrices, any size symbolic.

The matrices of a batch are small (the keys of one head, a chunk of a recurrence) and read once or
a few times, so that nothing is packed. (K, N) right operands are read as rows of columns: a tile
of rows of the left operand times some vectors of columns, its sums in registers. (N, K) ones are
read along K: dot products, a tile of rows by some columns. Batches and tiles of rows are shared
out among the threads. For many rows (N, K) matrices are turned, some columns at a time. Sums are
fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import tvm
from tvm import tirx

from ..errors import InputError
from .cpu_build import (
    T,
    TensorSpec,
    add_lanes,
    build_kernel,
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
from .cpu_epilogue import Epilogue
from .cpu_gemv import emit_finish_tail
from .cpu_tiles import CpuTiles, cpu_tiles
from .cpu_weights import transpose

__all__ = ["BatchSpec", "batched_kernel"]

_FLOATS = ("float32", "float16", "bfloat16")
# Columns of (N, K) operands at a time; vectors of columns of (K, N) ones for a single row.
_COLUMNS, _SINGLE = 4, 8
# Rows up to which (N, K) operands are read along K; tiles of columns that are turned at a time.
_FEW, _STRIP = 8, 4


@dataclass(frozen=True)
class BatchSpec:
    """`out[b, m, n] = epilogue(sum over k of lhs[b, m, k] * rhs[b, n, k])`.

    Attributes
    ----------
    batch : tuple
        Axes before the matrices; texts are symbolic.
    m, n, k : int or str
        Rows, columns, length of the sums; texts are symbolic.
    lhs_batch, rhs_batch : bool
        Whether that operand has the batch axes (with axes of 1 in their place it does not).
    lhs_layout, rhs_layout : str
        "MK" or "KM"; "KN" or "NK". KM goes with KN only.
    lhs_dtype, rhs_dtype, out_dtype : str
        float32, float16 or bfloat16.
    epilogue : Epilogue
        Steps between the sum and the store.
    """

    batch: tuple[int | str, ...]
    m: Any
    n: Any
    k: Any
    lhs_batch: bool = True
    rhs_batch: bool = True
    lhs_layout: str = "MK"
    rhs_layout: str = "KN"
    lhs_dtype: str = "float32"
    rhs_dtype: str = "float32"
    out_dtype: str = "float32"
    epilogue: Epilogue = field(default_factory=Epilogue)

    def tensors(self) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return inputs (lhs, rhs, the epilogue's operands) and outputs."""
        ones = tuple(1 for _ in self.batch)
        left = (self.m, self.k) if self.lhs_layout == "MK" else (self.k, self.m)
        right = (self.n, self.k) if self.rhs_layout == "NK" else (self.k, self.n)
        shape = (*self.batch, self.m, self.n)
        inputs = [
            TensorSpec("lhs", (self.batch if self.lhs_batch else ones) + left, self.lhs_dtype),
            TensorSpec("rhs", (self.batch if self.rhs_batch else ones) + right, self.rhs_dtype),
            *self.epilogue.tensors(shape, self.n),
        ]
        return inputs, [TensorSpec("out", shape, self.out_dtype)]

    def key(self) -> str:
        """Return a name for the kernel: readable, and different where anything differs."""
        batch = "x".join(str(d) for d in self.batch) or "1"
        if not (self.lhs_batch and self.rhs_batch):
            batch += "_shared_lhs" if self.rhs_batch else "_shared_rhs"
        steps = "".join("_" + op.op for op in self.epilogue.ops if op.op != "cast")
        short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
        kinds = "_".join(short[d] for d in (self.lhs_dtype, self.rhs_dtype, self.out_dtype))
        sizes = f"{self.m}_{self.n}_{self.k}"
        return f"batched_{self.lhs_layout}_{self.rhs_layout}_{batch}_{sizes}_{kinds}{steps}"


def _check(spec: BatchSpec) -> None:
    for what, dtype in (("lhs", spec.lhs_dtype), ("rhs", spec.rhs_dtype), ("out", spec.out_dtype)):
        if dtype not in _FLOATS:
            raise InputError(f"batched product: {what} is {dtype}, expected one of {_FLOATS}")
    if spec.rhs_layout not in ("NK", "KN") or spec.lhs_layout not in ("MK", "KM"):
        raise InputError(f"batched product: layouts {spec.lhs_layout}, {spec.rhs_layout}")
    if spec.rhs_layout == "NK" and spec.lhs_layout == "KM":
        raise InputError("batched product: both operands lie across their sums (KM and NK)")


def batched_kernel(spec: BatchSpec, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the kernel of a batched product for an llvm target.

    Returns
    -------
    PrimFunc
        Parameters: lhs, rhs, the epilogue's operands in order of first use, out.

    Raises
    ------
    InputError
        For dtypes or layouts that it does not have.
    """
    _check(spec)
    return _build(spec, cpu_tiles(target))


@lru_cache(maxsize=512)
def _build(whole: BatchSpec, tiles: CpuTiles) -> tirx.PrimFunc:
    def body(buffers: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        known = {name: sizes.get(getattr(whole, name), getattr(whole, name)) for name in "mnk"}
        spec = replace(whole, **known)
        batch: Any = i64(1)
        for dim in whole.batch:
            batch = batch * (sizes[dim] if isinstance(dim, str) else i64(dim))
        ways: list[tuple[int | None, Any, int]] = [(1, _emit_outer, 1), (None, _emit_outer, 0)]
        if spec.rhs_layout == "NK":
            ways = [
                (1, _emit_dots, 1),
                (_FEW, _emit_dots, tiles.dot_rows),
                (None, _emit_strips, 0),
            ]
        emit(spec, buffers, batch, ways)

    def emit(spec: BatchSpec, buffers: Mapping[str, Any], batch: Any, ways: list[Any]) -> None:
        (limit, way, rows), *others = ways
        most = spec.m if isinstance(spec.m, int) else tiles.rows
        rows = max(1, min(rows or tiles.rows, most))
        choose(
            True if limit is None else spec.m <= limit,
            lambda: way(spec, tiles, buffers, batch, rows),
            lambda: emit(spec, buffers, batch, others),
        )

    return build_kernel(whole.key(), *whole.tensors(), body)


def _blocks(spec: BatchSpec, batch: Any, rows: int) -> tuple[Any, Any, Any]:
    """Return (tiles of rows of a matrix, tasks, multiply-adds where they are known)."""
    blocks = ceil_div(spec.m, rows)
    sizes = [*spec.batch, spec.m, spec.n, spec.k]
    work = math.prod(sizes) if all(isinstance(s, int) for s in sizes) else None
    return blocks, let(batch * blocks), work


def _left_rows(spec: BatchSpec, matrix: Any, block: Any, rows: int) -> list[Any]:
    """Return where each row of a tile begins; rows beyond M repeat the last."""
    first = matrix * (i64(spec.m) * spec.k) if spec.lhs_batch else i64(0)
    found = []
    for r in range(rows):
        row = tirx.min(block * rows + r, i64(spec.m) - 1)
        found.append(let(first + row * (spec.k if spec.lhs_layout == "MK" else 1)))
    return found


def _tile(
    spec: BatchSpec,
    buffers: Mapping[str, Any],
    left: list[Any],
    right: Callable[[Any, int], Any],
    width: int,
    size: int,
    finish: Callable[[Any, int, Any], None],
    inside: Any,
) -> None:
    """Emit the sums of a tile of rows times `size` vectors of `width` columns.

    `left` is where each row begins, `right(k, v)` loads a vector, `finish(row, v, sums)` takes the
    first `inside` rows.
    """
    rows = len(left)
    step = 1 if spec.lhs_layout == "MK" else spec.m
    acc = local(rows * size * width)
    for slot in range(rows * size):
        store(acc, splat(0.0, width), slot * width, width)
    with T.serial(i64(0), i64(spec.k)) as at:
        bs = [let(right(at, v)) for v in range(size)]
        for r, row in enumerate(left):
            a = let(splat(load(buffers["lhs"], row + at * step), width))
            for v, b in enumerate(bs):
                slot = (r * size + v) * width
                store(acc, load(acc, slot, width) + a * b, slot, width)
    if rows == 1:
        for v in range(size):
            finish(i64(0), v, let(load(acc, v * width, width)))
        return
    spare = local(rows * size * width)
    for slot in range(rows * size):
        store(spare, load(acc, slot * width, width), slot * width, width)
    with T.serial(i64(0), inside) as r:
        for v in range(size):
            finish(r, v, let(load(spare, (r * size + v) * width, width)))


def _emit_outer(
    spec: BatchSpec, tiles: CpuTiles, buffers: Mapping[str, Any], batch: Any, rows: int
) -> None:
    """Emit the product by (K, N) matrices."""
    lanes, m, n, k, rhs = tiles.lanes, spec.m, spec.n, spec.k, buffers["rhs"]
    together = _SINGLE if rows == 1 else tiles.vectors
    blocks, count, work = _blocks(spec, batch, rows)

    with tasks(count, work) as task:
        matrix = let(tirx.floordiv(task, i64(blocks)))
        block = let(task - matrix * blocks)
        left = _left_rows(spec, matrix, block, rows)
        start = let(matrix * (i64(k) * n) if spec.rhs_batch else i64(0))
        inside = let(tirx.min(i64(rows), i64(m) - block * rows))
        out = let((matrix * m + block * rows) * n)

        def tile(column: Any, size: int, width: int) -> None:
            def right(at: Any, v: int) -> Any:
                return load(rhs, start + at * n + column + v * width, width)

            def finish(row: Any, v: int, value: Any) -> None:
                at = let(column + v * width)
                spec.epilogue.finish(buffers, value, let(out + row * n), at, width)

            _tile(spec, buffers, left, right, width, size, finish, inside)

        def tails(whole: Any) -> None:
            vectors = let(tirx.floordiv(i64(n), i64(lanes)))
            with T.serial(whole * together, vectors) as c:
                tile(let(c * lanes), 1, lanes)
            # The last vector again, a little further left: what it shares is computed twice.
            with T.If(vectors * lanes < n):
                with T.Then():
                    tile(let(i64(n) - lanes), 1, lanes)

        def single() -> None:
            with T.serial(i64(0), i64(n)) as c:
                tile(c, 1, 1)

        whole = let(tirx.floordiv(i64(n), i64(lanes * together)))
        with T.serial(i64(0), whole) as c:
            tile(let(c * (lanes * together)), together, lanes)
        if not divides(lanes * together, n):
            choose(n >= lanes, lambda: tails(whole), single)


def _emit_strips(
    spec: BatchSpec, tiles: CpuTiles, buffers: Mapping[str, Any], batch: Any, rows: int
) -> None:
    """Emit the product of many rows by (N, K) matrices, turned strip by strip."""
    lanes, m, n, k, rhs = tiles.lanes, spec.m, spec.n, spec.k, buffers["rhs"]
    strip = tiles.columns * _STRIP
    strips, blocks = ceil_div(n, strip), ceil_div(m, rows)
    whole = let(tirx.floordiv(i64(k), i64(lanes)))

    with T.parallel(i64(0), batch * strips) as task:
        matrix = let(tirx.floordiv(task, i64(strips)))
        first = let((task - matrix * strips) * strip)
        start = let(matrix * (i64(n) * k) if spec.rhs_batch else i64(0))
        turned = workspace(i64(k) * strip)
        vectors = let(tirx.min(i64(strip // lanes), ceil_div(i64(n) - first, lanes)))
        with T.serial(i64(0), vectors) as v:
            lines = []
            for c in range(lanes):
                column = tirx.min(first + v * lanes + c, i64(n) - 1)
                lines.append(let(start + column * k))
            with T.serial(i64(0), whole) as j:
                some = [load(rhs, line + j * lanes, lanes) for line in lines]
                for i, vector in enumerate(transpose(some, lanes)):
                    store(turned, vector, (j * lanes + i) * strip + v * lanes, lanes)
            if not divides(lanes, k):
                with T.serial(whole * lanes, i64(k)) as at:
                    for c, line in enumerate(lines):
                        store(turned, load(rhs, line + at), at * strip + v * lanes + c)
        with T.serial(i64(0), i64(blocks)) as block:
            left = _left_rows(spec, matrix, block, rows)
            inside = let(tirx.min(i64(rows), i64(m) - block * rows))
            out = let((matrix * m + block * rows) * n)

            def tile(
                c: Any, size: int, left: Any = left, inside: Any = inside, out: Any = out
            ) -> None:
                def right(at: Any, v: int) -> Any:
                    return load(turned, at * strip + c + v * lanes, lanes)

                def finish(row: Any, v: int, value: Any) -> None:
                    at = let(first + c + v * lanes)
                    emit_finish_tail(spec, buffers, value, let(out + row * n), at, lanes)

                _tile(spec, buffers, left, right, lanes, size, finish, inside)

            pairs = let(tirx.floordiv(vectors, i64(tiles.vectors)))
            with T.serial(i64(0), pairs) as c:
                tile(let(c * tiles.columns), tiles.vectors)
            with T.serial(pairs * tiles.vectors, vectors) as c:
                tile(let(c * lanes), 1)


def _emit_dots(
    spec: BatchSpec, tiles: CpuTiles, buffers: Mapping[str, Any], batch: Any, rows: int
) -> None:
    """Emit the product by (N, K) matrices."""
    lanes, m, n, k = tiles.lanes, spec.m, spec.n, spec.k
    lhs, rhs = buffers["lhs"], buffers["rhs"]
    blocks, count, work = _blocks(spec, batch, rows)
    groups = ceil_div(n, lanes)

    with tasks(count, work) as task:
        matrix = let(tirx.floordiv(task, i64(blocks)))
        block = let(task - matrix * blocks)
        left = _left_rows(spec, matrix, block, rows)
        right = let(matrix * (i64(n) * k) if spec.rhs_batch else i64(0))
        whole = let(tirx.floordiv(i64(k), i64(lanes)))
        sums = local(rows * lanes * lanes)
        with T.serial(i64(0), i64(groups)) as group:
            for part in range(0, lanes, _COLUMNS):
                starts = []
                for c in range(_COLUMNS):
                    column = group * lanes + (part + c)
                    column = column if divides(lanes, n) else tirx.min(column, i64(n) - 1)
                    starts.append(let(right + column * k))
                acc = local(rows * _COLUMNS * lanes)
                for slot in range(rows * _COLUMNS):
                    store(acc, splat(0.0, lanes), slot * lanes, lanes)
                with T.serial(i64(0), whole) as j:
                    at = let(j * lanes)
                    xs = [let(load(lhs, row + at, lanes)) for row in left]
                    for c, start in enumerate(starts):
                        b = let(load(rhs, start + at, lanes))
                        for r, x in enumerate(xs):
                            slot = (r * _COLUMNS + c) * lanes
                            store(acc, load(acc, slot, lanes) + x * b, slot, lanes)
                for r in range(rows):
                    for c in range(_COLUMNS):
                        value = load(acc, (r * _COLUMNS + c) * lanes, lanes)
                        store(sums, value, (r * lanes + part + c) * lanes, lanes)
                if not divides(lanes, k):
                    with T.serial(whole * lanes, i64(k)) as at:
                        for r, row in enumerate(left):
                            x = let(load(lhs, row + at))
                            for c, start in enumerate(starts):
                                slot = (r * lanes + part + c) * lanes
                                total = load(sums, slot) + x * load(rhs, start + at)
                                store(sums, total, slot)
            with T.serial(i64(0), tirx.min(i64(rows), i64(m) - block * rows)) as r:
                at = let(r * (lanes * lanes))
                vectors = [load(sums, at + j * lanes, lanes) for j in range(lanes)]
                out = let((matrix * m + block * rows + r) * n)
                total = add_lanes(vectors, lanes)
                emit_finish_tail(spec, buffers, total, out, let(group * lanes), lanes)
