"""Attention on tensor cores: which plans they take, the tile, rows in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.op import ptx_legacy_ldmatrix
from tvm.script.ir_builder import tirx as T
from tvm.tirx.script.builder import ir as TX

from ..targets import attribute
from .attention_pieces import uncast
from .attention_plan import AttentionPlan
from .scalar_expr import buffer_loads, depends_on, dtype_of

__all__ = [
    "HALVES",
    "MAX_DEPTH",
    "MmaTile",
    "SharedRows",
    "i32",
    "mma_dtype",
    "mma_tile",
    "put",
    "rolled",
    "supports_mma",
]

HALVES = {"float16": "fp16", "bfloat16": "bf16"}
MAX_DEPTH = 256
PAD = 8  # elements behind a row of shared memory


@dataclass(frozen=True)
class MmaTile:
    """How a block divides its work.

    Attributes
    ----------
    warps : int
        Of 16 query rows each.
    keys : int
        Of one tile, a multiple of 16.
    query_in_registers : bool
        Else the query's fragments are read from shared memory for each tile of keys.
    """

    warps: int
    keys: int
    query_in_registers: bool

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 16 * self.warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps


def mma_tile(plan: AttentionPlan) -> MmaTile:
    """Return the tile: what fits 255 registers a thread and 48 KiB of shared memory."""
    if max(plan.D, plan.E) > 128:
        return MmaTile(2, 16, False)
    # Masks from memory are in registers on their way: then the tile's scores are fewer.
    masked = any(depends_on(load, plan.t) for load in buffer_loads(plan.score))
    return MmaTile(4, 32 if masked else 64, True)


def mma_dtype(plan: AttentionPlan) -> str | None:
    """Return the dtype of the products, or None where rounding to it would lose something.

    Everything that q, k and v read along the depth must be of that one dtype. What a graph computes
    from it in float32 (a rotary, a scale) is rounded to it, as the graph itself does.
    """
    found = set()
    for expr, var in ((plan.q, plan.d), (plan.k, plan.d), (plan.v, plan.e)):
        for load in buffer_loads(expr):
            if depends_on(load, var) and not _is_table(load, plan):
                found.add(dtype_of(load))
    if len(found) != 1:
        return None
    dtype = found.pop()
    return dtype if dtype in HALVES else None


def _is_table(load: Any, plan: AttentionPlan) -> bool:
    """Tell whether a load is the same for all heads: cosines and sines."""
    heads = [var for var, _ in plan.batch]
    return not any(depends_on(load, var) for var in heads[-1:]) and dtype_of(load) == "float32"


def supports_mma(target: tvm.target.Target) -> bool:
    """Tell whether a CUDA target has mma.m16n8k16 and cp.async: sm_80 and newer."""
    digits = "".join(c for c in str(attribute(target, "arch", "") or "") if c.isdigit())
    return bool(digits) and int(digits) >= 80


def i32(value: int) -> Any:
    return tirx.IntImm("int32", value)


def put(buffer: Any, value: Any, index: Any) -> None:
    T.buffer_store(buffer, value, [index])


def rolled(count: int) -> Any:
    """Return a loop that nvcc does not write out either."""
    return T.serial(i32(count), annotations={"disable_unroll": True})


class SharedRows:
    """Rows of one operand in shared memory, and how they come there."""

    def __init__(
        self, tile: MmaTile, rows: int, size: int, dtype: str, shared: SharedRows | None = None
    ) -> None:
        self.rows, self.size, self.dtype, self.threads = rows, size, dtype, tile.threads
        self.padded = -(-size // 16) * 16
        self.stride = self.padded + PAD
        if shared is None:
            self.buffer = T.alloc_buffer((rows * self.stride,), dtype, scope="shared")
        else:
            assert rows <= shared.rows and size == shared.size
            self.buffer = shared.buffer

    def clear_padding(self, thread: Any) -> None:
        """Zero the columns that no copy writes: they meet the other operand's."""
        extra = self.padded - self.size
        if extra:
            self._each(thread, extra, 1, lambda row, col: put(
                self.buffer, tirx.const(0, self.dtype), row * i32(self.stride) + col
                + i32(self.size)))  # fmt: skip

    def _each(self, thread: Any, size: int, width: int, body: Any) -> None:
        across = size // width
        total = self.rows * across
        steps = -(-total // self.threads)
        # Where rows do not end with a quarter of a warp, neighbouring lanes take the same column of
        # different rows: those are in different banks, and a warp reads whole sectors all the same.
        columns = next((c for c in (4, 2) if across % 8 and across % c == 0), 0)
        # Written out, the addresses would take the registers that sums and scores need.
        with rolled(steps) as i:
            number = i * i32(self.threads) + thread
            if columns:
                high = 32 // columns
                chunk, lane = tirx.floordiv(number, i32(32)), tirx.floormod(number, i32(32))
                row = tirx.floordiv(chunk, i32(across // columns)) * i32(high)
                row = row + tirx.floormod(lane, i32(high))
                col = tirx.floormod(chunk, i32(across // columns)) * i32(columns)
                col = (col + tirx.floordiv(lane, i32(high))) * i32(width)
            else:
                row = tirx.floordiv(number, i32(across))
                col = tirx.floormod(number, i32(across)) * i32(width)
            if total % self.threads == 0:
                body(row, col)
            else:
                with T.If(number < i32(total)), T.Then():
                    body(row, col)

    def fill(self, thread: Any, expr: Any, var: Any, width: int, at: Any) -> None:
        """Copy rows; `at(expr, row, depth)` puts the axes in. By cp.async where `width` > 1."""

        def vector(row: Any, col: Any) -> None:
            source = at(expr.value if isinstance(expr, tirx.Cast) else expr, row, col)
            target = tirx.BufferLoad(self.buffer, [row * i32(self.stride) + col])
            kind = "cg" if width == 8 else "ca"
            copy = TX.ptx[f"cp.async.{kind}.shared.global"]
            T.evaluate(copy(T.address_of(target), T.address_of(source), 2 * width))

        def element(row: Any, col: Any) -> None:
            value = uncast(at(expr, row, col), self.dtype)
            put(self.buffer, value, row * i32(self.stride) + col)

        if width > 1:
            self._each(thread, self.size, width, vector)
        else:
            self._each(thread, self.size, 1, element)

    def load(self, registers: Any, offset: Any, row: Any, col: Any, transposed: bool) -> None:
        """Load four 8 x 8 matrices; `row` and `col` are those of this lane's address."""
        at = row * i32(self.stride) + col
        T.evaluate(ptx_legacy_ldmatrix(self.dtype, transposed, 4, ".b16", registers.data,
                                       offset, self.buffer.data, at))  # fmt: skip
