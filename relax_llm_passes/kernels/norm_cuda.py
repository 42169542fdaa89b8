"""Row programs as CUDA PrimFuncs: who holds what, and how partial results meet.

Three shapes of block, chosen in `norm_cuda_plan` from static facts only:

* *lanes*: the last axis is reduced. 1 to 32 lanes of a warp share a row and meet through
  `__shfl_xor_sync`; no barrier. Longer rows take several warps, which meet once per stage through
  shared memory.
* *columns*: the last axis is outer (channel first). Neighbouring threads take neighbouring rows,
  so that loads coalesce; the row is shared by threads in the other direction.
* *split*: rows are too few to fill the machine. Each row is cut into chunks, a first kernel
  writes (shift, mean, sum of squares) per chunk, a second combines them and normalises.

Each thread keeps its elements in registers, so the input is read once (twice when split). A row
longer than the registers reach reads only the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .flat_kernel import flat_kernel
from .limits import KernelLimits
from .norm_cuda_plan import CudaPlan
from .norm_program import Load, RowProgram, Stage, identity_of, merge_of

__all__ = ["LIMITS", "emit_cuda"]

# What ptxas may say that it needs; tests/cuda/test_limits.py holds it to that.
LIMITS = KernelLimits(registers=96, static_smem=8192, resident_threads=512)


@dataclass
class _Ctx:
    """Names in scope while one kernel is emitted."""

    prog: RowProgram
    plan: CudaPlan
    flat: list[Any]  # 1-D views of the parameters
    shared: list[Any]
    row: Any
    row_ok: Any  # None when always inside
    lane: Any
    row_in_block: Any
    begin: Any  # first element of this block's part of the row
    stop: Any  # one past its last

    def element(self, chunk: Any) -> Any:
        return self.begin + (chunk * self.plan.lanes + self.lane) * self.plan.vector


def _guard(cond: Any, body: Callable[[], None]) -> None:
    if cond is None:
        body()
        return
    with T.If(cond), T.Then():
        body()


def _read(ctx: _Ctx, loads: list[Load], element: Any, inside: Any) -> list[list[Any]]:
    """Load every operand's vector at `element`; returns [operand][lane] in the accumulator."""
    prog, vec = ctx.prog, ctx.plan.vector
    out: list[list[Any]] = []
    for ld in loads:
        t = prog.tensors[ld.tensor]
        buf = ctx.flat[ld.tensor]
        n = vec if ld.follows_last else 1
        raw = T.alloc_buffer((n,), t.dtype, scope="local")

        def fetch(ld: Load = ld, buf: Any = buf, raw: Any = raw, n: int = n) -> None:
            if n == 1:
                T.buffer_store(raw, buf[ld.index(prog.coords(ctx.row, element))], [0])
            else:
                with T.vectorized(n) as v:
                    T.buffer_store(raw, buf[ld.index(prog.coords(ctx.row, element, v))], [v])

        if inside is not None:
            # Lanes past the end hold zeros; the reductions mask them out.
            for j in range(n):
                T.buffer_store(raw, tirx.const(0, t.dtype), [j])
        _guard(inside, fetch)
        vals = [tirx.Cast(prog.acc, raw[j]) if t.dtype != prog.acc else raw[j] for j in range(n)]
        out.append(vals if n == vec else vals * vec)
    return out


class _Row:
    """The statements of one row in one kernel: load, reduce, store."""

    def __init__(self, ctx: _Ctx, whole: bool) -> None:
        self.ctx = ctx
        self.whole = whole  # the static chunks cover the row exactly: no masks
        self.scalars: list[Any] = []
        self.updates: list[Any] = []

    def inside(self, element: Any) -> Any:
        return None if self.whole else element < self.ctx.stop

    def load(self, covers: bool) -> None:
        ctx, prog, plan = self.ctx, self.ctx.prog, self.ctx.plan
        self.covers = covers  # the chunks reach the end of the row
        self.kept: list[list[Any]] = []  # [chunk*vector] -> kept values
        self.regs: list[Any] = []
        for c in range(plan.chunks):
            e = ctx.element(c)
            raw = _read(ctx, prog.loads, e, self.inside(e))
            for v in range(plan.vector):
                vals = prog.init([r[v] for r in raw])
                if not self.regs:
                    self.regs = [
                        T.alloc_buffer((plan.chunks * plan.vector,), prog.acc, scope="local")
                        for _ in vals
                    ]
                for k, x in enumerate(vals):
                    T.buffer_store(self.regs[k], x, [c * plan.vector + v])
        self.slots = len(self.regs)

    def _rest(self, body: Callable[[Any, list[list[Any]]], None]) -> None:
        """Loop over what the registers do not hold; `body(element, kept values per lane)`."""
        ctx, prog, plan = self.ctx, self.ctx.prog, self.ctx.plan
        if self.covers:
            return
        span = plan.lanes * plan.vector
        count = tirx.floordiv(ctx.stop - ctx.begin + (span - 1), span) - plan.chunks
        with T.serial(tirx.max(count, tirx.const(0, count.ty.dtype))) as it:
            e = ctx.element(it + plan.chunks)
            raw = _read(ctx, prog.loads, e, e < ctx.stop)
            lanes = []
            for v in range(plan.vector):
                vals = prog.init([r[v] for r in raw])
                for upd, scal in self.updates:
                    vals = upd(vals, scal)
                lanes.append(vals)
            body(e, lanes)

    def reduce(self, k: int, stage: Stage | None = None) -> None:
        ctx, prog, plan = self.ctx, self.ctx.prog, self.ctx.plan
        stage = prog.stages[k] if stage is None else stage
        acc = [T.alloc_buffer((1,), prog.acc, scope="local") for _ in stage.combine]
        for op, a in zip(stage.combine, acc, strict=True):
            T.buffer_store(a, identity_of(op, prog.acc), [0])

        def add(values: list[Any], ok: Any) -> None:
            for op, a, x in zip(stage.combine, acc, values, strict=True):
                if ok is not None:
                    x = tirx.Select(ok, x, identity_of(op, prog.acc))
                T.buffer_store(a, merge_of(op, a[0], x), [0])

        for c in range(plan.chunks):
            ok = self.inside(ctx.element(c))
            for v in range(plan.vector):
                i = c * plan.vector + v
                add(stage.value([r[i] for r in self.regs], self.scalars), ok)

        def add_rest(e: Any, lanes: list[list[Any]]) -> None:
            for vals in lanes:
                add(stage.value(vals, self.scalars), e < ctx.stop)

        self._rest(add_rest)
        reduced = self._meet(k, stage.combine, acc)
        post = stage.post(reduced, self.scalars)
        for x in post:
            s = T.alloc_buffer((1,), prog.acc, scope="local")
            T.buffer_store(s, x, [0])
            self.scalars.append(s[0])
        if stage.update is not None:
            frozen = list(self.scalars)
            self.updates.append((stage.update, frozen))
            for i in range(plan.chunks * plan.vector):
                new = stage.update([r[i] for r in self.regs], frozen)
                temps = []
                if len(new) > 1:
                    for x in new:
                        t = T.alloc_buffer((1,), prog.acc, scope="local")
                        T.buffer_store(t, x, [0])
                        temps.append(t[0])
                    new = temps
                for r, x in zip(self.regs, new, strict=True):
                    T.buffer_store(r, x, [i])

    def _meet(self, k: int, combine: tuple[str, ...], acc: list[Any]) -> list[Any]:
        """Combine the lanes' partial results; every lane ends with the total."""
        ctx, plan = self.ctx, self.ctx.plan
        if plan.lanes == 1:
            return [a[0] for a in acc]
        if plan.columns:
            return self._meet_columns(k, combine, acc)
        shuffle_add(combine, acc, min(32, plan.lanes))
        if plan.lanes <= 32:
            return [a[0] for a in acc]
        warps = plan.lanes // 32
        for j, a in enumerate(acc):
            buf = ctx.shared[k][j]
            with T.If(tirx.floormod(ctx.lane, 32) == 0), T.Then():
                T.buffer_store(buf, a[0], [ctx.row_in_block * warps + tirx.floordiv(ctx.lane, 32)])
        for j, a in enumerate(acc):
            buf = ctx.shared[k][j]
            T.buffer_store(a, buf[ctx.row_in_block * warps + tirx.floormod(ctx.lane, warps)], [0])
        shuffle_add(combine, acc, warps)
        return [a[0] for a in acc]

    def _meet_columns(self, k: int, combine: tuple[str, ...], acc: list[Any]) -> list[Any]:
        ctx, plan = self.ctx, self.ctx.plan
        across = plan.rows_per_block
        for j, a in enumerate(acc):
            T.buffer_store(ctx.shared[k][j], a[0], [ctx.lane * across + ctx.row_in_block])
        for j, (op, a) in enumerate(zip(combine, acc, strict=True)):
            T.buffer_store(a, identity_of(op, ctx.prog.acc), [0])
            for i in range(plan.lanes):
                T.buffer_store(
                    a, merge_of(op, a[0], ctx.shared[k][j][i * across + ctx.row_in_block]), [0]
                )
        return [a[0] for a in acc]

    def store(self) -> None:
        ctx, prog, plan = self.ctx, self.ctx.prog, self.ctx.plan
        per_element = [s for s in prog.stores if not s.per_row]
        if per_element:
            for c in range(plan.chunks):
                e = ctx.element(c)
                kept = [[r[c * plan.vector + v] for r in self.regs] for v in range(plan.vector)]
                self._store_vector(per_element, e, kept, self.inside(e))
            self._rest(lambda e, lanes: self._store_vector(per_element, e, lanes, e < ctx.stop))
        per_row = [s for s in prog.stores if s.per_row]
        if per_row:

            def write() -> None:
                for s in per_row:
                    value = tirx.Cast(prog.tensors[s.tensor].dtype, s.value(self.scalars))
                    at = s.index(prog.coords(ctx.row, tirx.const(0, "int32")))
                    T.buffer_store(ctx.flat[s.tensor], value, [at])

            first = ctx.lane == 0
            _guard(first if ctx.row_ok is None else tirx.all(first, ctx.row_ok), write)

    def _store_vector(
        self, stores: list[Any], element: Any, kept: list[list[Any]], inside: Any
    ) -> None:
        ctx, prog, plan = self.ctx, self.ctx.prog, self.ctx.plan
        conds = [c for c in (ctx.row_ok, inside) if c is not None]
        cond = None if not conds else conds[0] if len(conds) == 1 else tirx.all(*conds)

        def write() -> None:
            late = _read(ctx, prog.late, element, None)
            for s in stores:
                dtype = prog.tensors[s.tensor].dtype
                values = [
                    s.value(kept[v], [x[v] for x in late], self.scalars) for v in range(plan.vector)
                ]
                buf = ctx.flat[s.tensor]
                if plan.vector == 1:
                    at = s.index(prog.coords(ctx.row, element))
                    T.buffer_store(buf, tirx.Cast(dtype, values[0]), [at])
                    continue
                out = T.alloc_buffer((plan.vector,), dtype, scope="local")
                for v, x in enumerate(values):
                    T.buffer_store(out, tirx.Cast(dtype, x), [v])
                with T.vectorized(plan.vector) as v:
                    T.buffer_store(buf, out[v], [s.index(prog.coords(ctx.row, element, v))])

        _guard(cond, write)


def shuffle_add(combine: tuple[str, ...], acc: list[Any], width: int) -> None:
    """Butterfly over `width` lanes: afterwards every lane's `acc` holds the total."""
    mask = tirx.const(0xFFFFFFFF, "uint32")
    step = 1
    while step < width:
        for op, a in zip(combine, acc, strict=True):
            other = T.tvm_warp_shuffle_xor(mask, a[0], step, 32, 32)
            T.buffer_store(a, merge_of(op, a[0], other), [0])
        step *= 2


def emit_cuda(prog: RowProgram, plan: CudaPlan) -> tirx.PrimFunc:
    """Return the scheduled PrimFunc of `prog` laid out by `plan`."""

    def body(flat: list[Any]) -> None:
        if plan.split > 1:
            _emit_split(prog, plan, flat)
        else:
            _emit_single(prog, plan, flat)

    return flat_kernel(prog.name, prog.tensors, body)


def _blocks(rows: Any, per_block: int) -> Any:
    if isinstance(rows, int):
        return -(-rows // per_block)
    return tirx.floordiv(rows + (per_block - 1), per_block) if per_block > 1 else rows


def _emit_single(prog: RowProgram, plan: CudaPlan, flat: list[Any]) -> None:
    rows, length = prog.rows, prog.length
    with (
        T.launch_thread("blockIdx.x", _blocks(rows, plan.rows_per_block)) as bx,
        T.launch_thread("threadIdx.x", plan.threads) as tx,
    ):
        if plan.columns:
            in_block, lane = (
                tirx.floormod(tx, plan.rows_per_block),
                tirx.floordiv(tx, plan.rows_per_block),
            )
        else:
            in_block, lane = tirx.floordiv(tx, plan.lanes), tirx.floormod(tx, plan.lanes)
        row = bx * plan.rows_per_block + in_block
        exact = plan.rows_per_block == 1 or (
            isinstance(rows, int) and rows % plan.rows_per_block == 0
        )
        row_ok = None
        if not exact:
            # Threads past the last row work on it again, so that whole warps reach the shuffles,
            # and only keep from storing.
            row_ok = row < rows
            row = tirx.min(row, rows - 1)
        ctx = _Ctx(
            prog,
            plan,
            flat,
            _shared(prog, plan, len(prog.stages)),
            row,
            row_ok,
            lane,
            in_block,
            0,
            length,
        )
        span = plan.lanes * plan.vector * plan.chunks
        body = _Row(ctx, isinstance(length, int) and span == length)
        body.load(isinstance(length, int) and span >= length)
        for k in range(len(prog.stages)):
            body.reduce(k)
        body.store()


def _shared(prog: RowProgram, plan: CudaPlan, stages: int) -> list[list[Any]]:
    """One array per stage and value: no stage waits for the reads of the one before."""
    out: list[list[Any]] = []
    for k in range(stages):
        n = 0
        if plan.columns and plan.lanes > 1:
            n = plan.threads
        elif plan.lanes > 32:
            n = plan.rows_per_block * plan.lanes // 32
        out.append(
            [T.alloc_buffer((n,), prog.acc, scope="shared") for _ in prog.stages[k].combine]
            if n
            else []
        )
    return out


def _emit_split(prog: RowProgram, plan: CudaPlan, flat: list[Any]) -> None:
    """Two kernels: statistics per chunk of a row, then combine them and normalise the chunk."""
    rows, length, parts = prog.rows, prog.length, plan.split
    unit = plan.vector
    if isinstance(length, int):
        per_part: Any = -(-length // (parts * unit)) * unit
    else:
        per_part = tirx.floordiv(length + (parts * unit - 1), parts * unit) * unit
    # Per chunk: the shift that was subtracted, the mean and the sum of squares of what is left.
    work = T.sblock_alloc_buffer((rows * parts * 3,), prog.acc, scope="global")
    span = plan.lanes * plan.vector * plan.chunks
    covers = isinstance(per_part, int) and span >= per_part
    whole = covers and span == per_part and per_part * parts == length

    def context(bx: Any, tx: Any) -> tuple[_Ctx, Any, Any]:
        row, part = tirx.floordiv(bx, parts), tirx.floormod(bx, parts)
        begin = part * per_part
        stop = length if whole else tirx.min(begin + per_part, length)
        stop = begin + per_part if whole else stop
        shared = _shared(prog, plan, len(prog.stages))
        return _Ctx(prog, plan, flat, shared, row, None, tx, 0, begin, stop), row, part

    def size(part: Any) -> Any:
        n = per_part if whole else tirx.min(per_part, length - part * per_part)
        n = n if whole else tirx.max(n, 0)
        return tirx.Cast(prog.acc, n) if not isinstance(n, int) else tirx.const(n, prog.acc)

    one = tirx.const(1, prog.acc)
    with (
        T.launch_thread("blockIdx.x", rows * parts) as bx,
        T.launch_thread("threadIdx.x", plan.threads) as tx,
    ):
        ctx, row, part = context(bx, tx)
        body = _Row(ctx, whole)
        body.load(covers)
        n = tirx.max(size(part), one)
        zero = tirx.const(0, prog.acc)
        body.reduce(0, Stage(("sum",), lambda v, s: [v[0]], lambda r, s: [r[0] / n]))
        body.reduce(
            1,
            Stage(
                ("sum", "sum"),
                lambda v, s: [v[0] - s[0], (v[0] - s[0]) * (v[0] - s[0])],
                lambda r, s: [r[0] / n, tirx.max(r[1] - r[0] * (r[0] / n), zero)],
            ),
        )
        with T.If(tx == 0), T.Then():
            for j, x in enumerate(body.scalars):
                T.buffer_store(work, x, [(row * parts + part) * 3 + j])
    with (
        T.launch_thread("blockIdx.x", rows * parts) as bx,
        T.launch_thread("threadIdx.x", plan.threads) as tx,
    ):
        ctx, row, part = context(bx, tx)
        body = _Row(ctx, whole)
        body.load(covers)
        # Every warp combines the chunks' statistics for itself: one lane a chunk, no barrier.
        which = tirx.floormod(tx, parts)
        n = size(which)
        base = T.alloc_buffer((1,), prog.acc, scope="local")
        T.buffer_store(base, work[row * parts * 3], [0])
        off = T.alloc_buffer((1,), prog.acc, scope="local")
        at = (row * parts + which) * 3
        T.buffer_store(off, (work[at] - base[0]) + work[at + 1], [0])
        total = T.alloc_buffer((1,), prog.acc, scope="local")
        T.buffer_store(total, tirx.Select(n > 0, off[0] * n, tirx.const(0, prog.acc)), [0])
        shuffle_add(("sum",), [total], parts)
        count = (
            tirx.Cast(prog.acc, length)
            if not isinstance(length, int)
            else tirx.const(length, prog.acc)
        )
        delta = T.alloc_buffer((1,), prog.acc, scope="local")
        T.buffer_store(delta, total[0] / count, [0])
        dev = off[0] - delta[0]
        T.buffer_store(
            total, tirx.Select(n > 0, work[at + 2] + n * dev * dev, tirx.const(0, prog.acc)), [0]
        )
        shuffle_add(("sum",), [total], parts)
        rstd = T.alloc_buffer((1,), prog.acc, scope="local")
        T.buffer_store(rstd, prog.finish_moments(total[0] / count), [0])
        body.scalars = [base[0], delta[0], rstd[0]]
        update = prog.stages[0].update
        if update is not None:
            body.updates = [(update, body.scalars)]
            for i in range(plan.chunks * plan.vector):
                new = update([r[i] for r in body.regs], body.scalars)
                for r, x in zip(body.regs, new, strict=True):
                    T.buffer_store(r, x, [i])
        body.store()
