"""Row programs as CPU PrimFuncs: rows in parallel, partial results in vector registers.

LLVM keeps the order of floating-point sums, so a plain loop is scalar; here a row's partial sums
are an explicit vector (several, to hide the adder's latency), folded by halves at the end. When
the last axis is outer, neighbouring rows fill the vector instead. The row is read again for each
stage: it is in the first- or second-level cache by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..targets import num_threads, vector_lanes
from .flat_kernel import flat_kernel
from .norm_program import RowProgram, extent_product, identity_of, merge_of, unravel

__all__ = ["TASKS_PER_THREAD", "CpuPlan", "emit_cpu", "plan_cpu", "split_loop"]

# Vector additions before a partial sum is added to a second one: keeps the rounding error of a long
# sum near that of a short one.
SUM_BLOCK = 64
# Vectors in a row that is written out without a loop.
SHORT_VECTORS = 16
# More tasks than threads even out what else the machine does.
TASKS_PER_THREAD = 2
# Below this many elements starting threads (1 to 3 microseconds) costs more than it gains.
PARALLEL_ELEMENTS = 16384


@dataclass(frozen=True)
class CpuPlan:
    """Vector width, vectors in flight, and into how many tasks the rows are cut (1: no threads)."""

    lanes: int
    unroll: int
    chunks: int


def plan_cpu(prog: RowProgram, target: tvm.target.Target) -> CpuPlan:
    """Choose the plan from the target's vector width and the extents."""
    lanes = vector_lanes(target, prog.acc)
    last = prog.axes[-1].extent
    unroll = 4
    if isinstance(last, int):
        while lanes > 1 and lanes > last:
            lanes //= 2
        while unroll > 1 and lanes * unroll > last:
            unroll //= 2
    total = prog.rows * prog.length
    many = not isinstance(total, int) or total >= PARALLEL_ELEMENTS
    return CpuPlan(lanes, unroll, TASKS_PER_THREAD * num_threads(target) if many else 1)


@contextmanager
def split_loop(extent: Any, chunks: int) -> Iterator[Any]:
    """Loop over [0, extent), cut into `chunks` parallel tasks.

    Each iteration of `T.parallel` is a task of its own, at about 0.3 microseconds: as much as a
    short row takes.
    """
    if isinstance(extent, int):
        chunks = min(chunks, extent)
    if chunks <= 1:
        with T.serial(extent) as i:
            yield i
        return
    if isinstance(extent, int):
        per: Any = -(-extent // chunks)
        chunks = -(-extent // per)
        rest = extent % per
    else:
        per, rest = tirx.floordiv(extent + (chunks - 1), chunks), 1
    with T.parallel(chunks) as task:
        count = (
            per
            if isinstance(rest, int) and rest == 0
            else tirx.max(tirx.min(per, extent - task * per), 0)
        )
        with T.serial(count) as i:
            yield task * per + i


def emit_cpu(prog: RowProgram, plan: CpuPlan) -> tirx.PrimFunc:
    """Return the scheduled PrimFunc of `prog`."""

    def body(flat: list[Any]) -> None:
        if prog.axes[-1].reduced:
            _emit_rows(prog, plan, flat)
        else:
            _emit_columns(prog, plan, flat)

    return flat_kernel(prog.name, prog.tensors, body)


@dataclass
class _Place:
    """Where a kernel is: fixed outer coordinates, and which lane dimension is vectorised."""

    prog: RowProgram
    flat: list[Any]
    outer: list[Any]  # coordinates of the outer axes but the last, or of all

    def coords(self, reduced: list[Any], last_outer: Any = None) -> list[Any]:
        outer = list(self.outer) + ([] if last_outer is None else [last_outer])
        out, i, j = [], 0, 0
        for a in self.prog.axes:
            if a.reduced:
                out.append(reduced[j])
                j += 1
            else:
                out.append(outer[i])
                i += 1
        return out

    def values(self, coords: list[Any], updates: list[Any]) -> list[Any]:
        raw = [self._load(ld, coords) for ld in self.prog.loads]
        vals = self.prog.init(raw)
        for update, scalars in updates:
            vals = update(vals, scalars())
        return vals

    def late(self, coords: list[Any]) -> list[Any]:
        return [self._load(ld, coords) for ld in self.prog.late]

    def _load(self, ld: Any, coords: list[Any]) -> Any:
        t = self.prog.tensors[ld.tensor]
        x = self.flat[ld.tensor][ld.index(coords)]
        return tirx.Cast(self.prog.acc, x) if t.dtype != self.prog.acc else x


def _lanes(width: int) -> Any:
    return T.vectorized(width) if width > 1 else nullcontext(0)


def _span(
    extent: Any,
    width: int,
    unroll: int,
    body: Callable[[Any, int, int], None],
    flush: Callable[[], None] | None = None,
) -> None:
    """Call `body(start, width, slot)` over [0, extent): wide steps, then single elements.

    `flush` is called after each `SUM_BLOCK` wide steps and at the end.
    """
    step = width * unroll
    count = extent // step if isinstance(extent, int) else tirx.floordiv(extent, step)

    def steps(first: Any, n: Any) -> None:
        with T.serial(n) as i:
            for u in range(unroll):
                body((first + i) * step + u * width, width, u)

    if (isinstance(count, int) and count <= SUM_BLOCK) or flush is None:
        if not isinstance(count, int) or count > 0:
            steps(0, count)
    else:
        blocks = (count + SUM_BLOCK - 1) // SUM_BLOCK
        with T.serial(blocks) as k:
            steps(k * SUM_BLOCK, tirx.min(SUM_BLOCK, count - k * SUM_BLOCK))
            flush()
    done = count * step
    if isinstance(extent, int):
        for _ in range((extent - done) // width if width > 1 else 0):
            body(done, width, 0)
            done += width
    rest = extent - done
    if not isinstance(rest, int) or rest > 0:
        with T.serial(rest) as i:
            body(done + i, 1, 0)
    if flush is not None:
        flush()


def _emit_rows(prog: RowProgram, plan: CpuPlan, flat: list[Any]) -> None:
    reduced = [a.extent for a in prog.reduced]
    inner, beside = reduced[-1], extent_product(reduced[:-1])
    rows = prog.rows
    # A row of a few vectors is written out: one sum as a tree, no loop, no partial sums in memory.
    short = (
        len(reduced) == 1
        and isinstance(inner, int)
        and plan.lanes > 1
        and inner % plan.lanes == 0
        and inner // plan.lanes <= SHORT_VECTORS
    )

    def each_element(
        place: _Place,
        body: Callable[[list[Any], int, int], None],
        flush: Callable[[], None] | None = None,
    ) -> None:
        def run(j: Any) -> None:
            before = unravel(j, reduced[:-1]) if len(reduced) > 1 else []
            _span(
                inner,
                plan.lanes,
                plan.unroll,
                lambda start, width, slot: body([*before, start], width, slot),
                flush,
            )

        if isinstance(beside, int) and beside == 1:
            run(0)
        else:
            with T.serial(beside) as j:
                run(j)

    with split_loop(rows, plan.chunks) as row:
        place = _Place(prog, flat, unravel(row, [a.extent for a in prog.outer]))
        scalars: list[Any] = []
        updates: list[Any] = []
        for stage in prog.stages:
            if short:
                folded = [
                    _short_sum(place, prog, k, op, stage, updates, scalars, plan.lanes, inner)
                    for k, op in enumerate(stage.combine)
                ]
                _keep_scalars(prog, stage, folded, scalars, updates)
                continue
            size = plan.lanes * plan.unroll
            accs = [T.alloc_buffer((size,), prog.acc, scope="local") for _ in stage.combine]
            totals = [T.alloc_buffer((size,), prog.acc, scope="local") for _ in stage.combine]

            def reset(bufs: list[Any], stage: Any = stage) -> None:
                for op, buf in zip(stage.combine, bufs, strict=True):
                    for u in range(plan.unroll):
                        with _lanes(plan.lanes) as v:
                            T.buffer_store(buf, identity_of(op, prog.acc), [u * plan.lanes + v])

            def flush(
                stage: Any = stage, accs: Any = accs, totals: Any = totals, reset: Any = reset
            ) -> None:
                for op, acc, total in zip(stage.combine, accs, totals, strict=True):
                    for u in range(plan.unroll):
                        with _lanes(plan.lanes) as v:
                            i = u * plan.lanes + v
                            T.buffer_store(total, merge_of(op, total[i], acc[i]), [i])
                reset(accs)

            reset(accs)
            reset(totals)

            def accumulate(
                at: list[Any], width: int, slot: int, stage: Any = stage, accs: Any = accs
            ) -> None:
                for k, (op, acc) in enumerate(zip(stage.combine, accs, strict=True)):
                    with _lanes(width) as v:
                        coords = place.coords([*at[:-1], at[-1] + v])
                        x = stage.value(place.values(coords, updates), list(scalars))[k]
                        i = slot * plan.lanes + v
                        T.buffer_store(acc, merge_of(op, acc[i], x), [i])

            each_element(place, accumulate, flush)
            folded = [
                _fold(op, buf, size, plan.lanes, prog.acc)
                for op, buf in zip(stage.combine, totals, strict=True)
            ]
            _keep_scalars(prog, stage, folded, scalars, updates)

        def write(at: list[Any], width: int, _slot: int) -> None:
            for st in prog.stores:
                if st.per_row:
                    continue
                with _lanes(width) as v:
                    coords = place.coords([*at[:-1], at[-1] + v])
                    x = st.value(place.values(coords, updates), place.late(coords), scalars)
                    T.buffer_store(
                        flat[st.tensor],
                        tirx.Cast(prog.tensors[st.tensor].dtype, x),
                        [st.index(coords)],
                    )

        if short:
            for i in range(inner // plan.lanes):
                write([i * plan.lanes], plan.lanes, 0)
        elif any(not st.per_row for st in prog.stores):
            each_element(place, write)
        for st in prog.stores:
            if st.per_row:
                coords = place.coords([tirx.const(0, "int32")] * len(reduced))
                x = tirx.Cast(prog.tensors[st.tensor].dtype, st.value(scalars))
                T.buffer_store(flat[st.tensor], x, [st.index(coords)])


def _keep_scalars(
    prog: RowProgram, stage: Any, folded: list[Any], scalars: list[Any], updates: list[Any]
) -> None:
    """Append a stage's results to the row's scalars, and its update to those that follow."""
    for x in stage.post(folded, list(scalars)):
        s = T.alloc_buffer((1,), prog.acc, scope="local")
        T.buffer_store(s, x, [0])
        scalars.append(s[0])
    if stage.update is not None:
        frozen = list(scalars)
        updates.append((stage.update, lambda: frozen))


def _tree(op: str, parts: list[Any]) -> Any:
    """Combine by halves."""
    while len(parts) > 1:
        pairs = [merge_of(op, a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) // 2 * 2 :]
    return parts[0]


def _fold(op: str, buf: Any, size: int, lanes: int, dtype: str) -> Any:
    """Combine a buffer's partial results in registers; returns one value, stored once."""
    out = T.alloc_buffer((1,), dtype, scope="local")
    if lanes == 1:
        T.buffer_store(out, _tree(op, [buf[i] for i in range(size)]), [0])
        return out[0]
    vec = _tree(
        op,
        [tirx.BufferLoad(buf, [tirx.Ramp(start, 1, lanes)]) for start in range(0, size, lanes)],
    )
    width = lanes
    while width > 2:
        width //= 2
        half = f"{dtype}x{width}"
        vec = merge_of(op, tirx.vectorlow(half, vec), tirx.vectorhigh(half, vec))
    pair = T.alloc_buffer((2,), dtype, scope="local")
    T.buffer_store(pair, vec, [tirx.Ramp(0, 1, 2)])
    T.buffer_store(out, merge_of(op, pair[0], pair[1]), [0])
    return out[0]


def _short_sum(
    place: _Place,
    prog: RowProgram,
    k: int,
    op: str,
    stage: Any,
    updates: list[Any],
    scalars: list[Any],
    lanes: int,
    extent: int,
) -> Any:
    """Reduce the k-th value of a stage over a row of a few whole vectors."""
    acc = T.alloc_buffer((lanes,), prog.acc, scope="local")
    with _lanes(lanes) as v:
        parts = [
            stage.value(place.values(place.coords([start + v]), updates), list(scalars))[k]
            for start in range(0, extent, lanes)
        ]
        T.buffer_store(acc, _tree(op, parts), [v])
    return _fold(op, acc, lanes, lanes, prog.acc)


def _emit_columns(prog: RowProgram, plan: CpuPlan, flat: list[Any]) -> None:
    outer = [a.extent for a in prog.outer]
    last, beside = outer[-1], extent_product(outer[:-1])
    length = prog.length
    reduced = [a.extent for a in prog.reduced]

    def tile(place: _Place, start: Any, width: int) -> None:
        scalars: list[Any] = []  # buffers of `width`
        updates: list[Any] = []
        for stage in prog.stages:
            accs = [T.alloc_buffer((width,), prog.acc, scope="local") for _ in stage.combine]
            for op, acc in zip(stage.combine, accs, strict=True):
                with _lanes(width) as v:
                    T.buffer_store(acc, identity_of(op, prog.acc), [v])
            with T.serial(length) as e:
                at = unravel(e, reduced)
                for k, (op, acc) in enumerate(zip(stage.combine, accs, strict=True)):
                    with _lanes(width) as v:
                        coords = place.coords(at, start + v)
                        ups = [
                            (u, lambda bufs=bufs, v=v: [b[v] for b in bufs]) for u, bufs in updates
                        ]
                        x = stage.value(place.values(coords, ups), [s[v] for s in scalars])[k]
                        T.buffer_store(acc, merge_of(op, acc[v], x), [v])
            count = len(stage.post([a[0] for a in accs], [s[0] for s in scalars]))
            known = list(scalars)
            for k in range(count):
                s = T.alloc_buffer((width,), prog.acc, scope="local")
                with _lanes(width) as v:
                    x = stage.post([a[v] for a in accs], [b[v] for b in known])[k]
                    T.buffer_store(s, x, [v])
                scalars.append(s)
            if stage.update is not None:
                updates.append((stage.update, list(scalars)))
        for st in prog.stores:
            dtype = prog.tensors[st.tensor].dtype
            if st.per_row:
                with _lanes(width) as v:
                    coords = place.coords([tirx.const(0, "int32")] * len(reduced), start + v)
                    x = st.value([s[v] for s in scalars])
                    T.buffer_store(flat[st.tensor], tirx.Cast(dtype, x), [st.index(coords)])
                continue
            with T.serial(length) as e, _lanes(width) as v:
                coords = place.coords(unravel(e, reduced), start + v)
                ups = [(u, lambda bufs=bufs, v=v: [b[v] for b in bufs]) for u, bufs in updates]
                x = st.value(place.values(coords, ups), place.late(coords), [s[v] for s in scalars])
                T.buffer_store(flat[st.tensor], tirx.Cast(dtype, x), [st.index(coords)])

    if isinstance(beside, int) and beside == 1:
        # One plane: the tiles themselves go to the threads.
        place = _Place(prog, flat, [0] * (len(outer) - 1))
        tiles = last // plan.lanes if isinstance(last, int) else tirx.floordiv(last, plan.lanes)
        if not isinstance(tiles, int) or tiles > 0:
            with split_loop(tiles, plan.chunks) as i:
                tile(place, i * plan.lanes, plan.lanes)
        rest = last - tiles * plan.lanes
        if not isinstance(rest, int) or rest > 0:
            with T.serial(rest) as i:
                tile(place, tiles * plan.lanes + i, 1)
        return
    with split_loop(beside, plan.chunks) as o:
        place = _Place(prog, flat, unravel(o, outer[:-1]))
        _span(last, plan.lanes, 1, lambda start, width, _slot: tile(place, start, width))
