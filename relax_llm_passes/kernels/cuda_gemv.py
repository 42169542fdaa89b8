"""Products of one row on CUDA: each weight is read once, in 16-byte pieces, with fp32 sums.

TVM's schedule for these sums bf16 through shared memory without synchronising the warp, writes
beyond the result where N is no multiple of 16, and reads transposed weights after a copy of them.

    (N, K): lanes of a warp along K sum a few rows of the weight and meet through shuffles
    (K, N): a thread sums a few columns over a part of K; the warps of a block meet in shared memory
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from .cuda_matmul import MmaSpec, _finish, _i32, _put, _vector
from .limits import KernelLimits

__all__ = [
    "LIMITS",
    "SPEC_ATTR",
    "Geometry",
    "emit_product",
    "gemv_kernel",
    "geometry_of",
    "shared_buffer",
    "spec_of",
    "tensors_of",
]

# On a kernel's PrimFunc: what it computes, so that kernels can be put together later.
SPEC_ATTR = "relax_llm.gemv"

LIMITS = KernelLimits(registers=64, static_smem=4096, resident_threads=1024)

WARPS = 4  # of a block, for (N, K)
AHEAD = 4  # vectors in flight per lane and row
PARTS = 8  # warps of a block, each with a part of K, for (K, N)
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def _f32(value: Any, dtype: str) -> Any:
    return value if dtype == "float32" else tirx.Cast("float32", value)


def _load(to: Any, first: int, source: Any, at: Any, width: int) -> None:
    _put(to, _vector(source, at, width), _i32(first), width)


def rows_together(n: int, steps: int) -> int:
    """Rows of (N, K) that share a lane's reads of the vector.

    Few where warps would be few, but enough that a lane has 4 vectors of the weight to read.
    """
    return max(4 if n >= 8192 else 2 if n >= 2048 else 1, AHEAD // steps)


def lanes_per_row(vectors: int) -> int:
    """Lanes that share a row of so many vectors: fewer than a warp where some would idle."""

    def idle(lanes: int) -> float:
        return -(-vectors // lanes) * lanes / vectors

    fewest = min(idle(lanes) for lanes in (32, 16, 8, 4))
    return next(lanes for lanes in (32, 16, 8, 4) if idle(lanes) <= max(1.125, fewest))


@dataclass(frozen=True)
class RowGeometry:
    """How threads share a product with weights (N, K)."""

    width: int  # elements of a vector
    lanes: int  # of a warp, that share a row
    each: int  # rows that share a lane's reads of the vector

    @staticmethod
    def of(spec: MmaSpec) -> RowGeometry:
        """Return the geometry for a product."""
        width = math.gcd(16 // _BYTES[spec.dtype], spec.k)
        lanes = lanes_per_row(spec.k // width)
        return RowGeometry(width, lanes, rows_together(spec.n, -(-(spec.k // width) // lanes)))

    threads = 32 * WARPS
    shared = 0  # floats of shared memory

    def blocks(self, n: int) -> int:
        """Return how many blocks have n rows."""
        return -(-n // (WARPS * (32 // self.lanes) * self.each))


def _row_products(
    spec: MmaSpec, geometry: RowGeometry, flat: dict[str, Any], bx: Any, tx: Any
) -> None:
    """Emit what block `bx` and thread `tx` do for a product with weights (N, K).

    Lane r of those that share rows stores row r: products of one geometry have the same thread
    store the same element.
    """
    k, width, lanes, each = spec.k, geometry.width, geometry.lanes, geometry.each
    groups = 32 // lanes  # of lanes in a warp, each with rows of its own
    chunk = lanes * width
    n = tirx.const(spec.n, "int64")
    x = T.alloc_buffer((AHEAD * width,), spec.dtype, scope="local")
    w = T.alloc_buffer((AHEAD * each * width,), spec.dtype, scope="local")
    sums = T.alloc_buffer((each,), "float32", scope="local")
    lane = T.bind(tirx.floormod(tx, _i32(lanes)))
    group = T.bind(tirx.floordiv(tx, _i32(lanes)))
    row0 = T.bind(tirx.Cast("int64", (bx * (WARPS * groups) + group) * each))
    # Rows past the last read it again, so that whole warps reach the shuffles.
    bases = [T.bind(tirx.min(row0 + r, n - 1) * k) for r in range(each)]
    inside = tirx.Cast("int64", lane * width)
    for r in range(each):
        _put(sums, tirx.const(0.0, "float32"), _i32(r), 1)

    def step(first: Any, count: int) -> None:
        for i in range(count):
            at = first + inside + i * chunk
            _load(x, i * width, flat["lhs"], at, width)
            for r in range(each):
                _load(w, (i * each + r) * width, flat["rhs"], bases[r] + at, width)
        for i in range(count):
            for r in range(each):
                for v in range(width):
                    a = _f32(_vector(x, _i32(i * width + v), 1), spec.dtype)
                    b = _f32(_vector(w, _i32((i * each + r) * width + v), 1), spec.dtype)
                    _put(sums, _vector(sums, _i32(r), 1) + a * b, _i32(r), 1)

    whole = k // chunk
    if whole >= AHEAD:
        with T.serial(_i32(0), _i32(whole // AHEAD)) as ko:
            step(tirx.Cast("int64", ko) * (AHEAD * chunk), AHEAD)
    done = whole // AHEAD * AHEAD
    if whole > done:
        step(tirx.const(done * chunk, "int64"), whole - done)
    if k > whole * chunk:
        start = tirx.const(whole * chunk, "int64")
        with T.If(start + inside < k), T.Then():
            step(start, 1)
    mask = tirx.const(0xFFFFFFFF, "uint32")
    for hop in (h for h in (16, 8, 4, 2, 1) if h < lanes):
        for r in range(each):
            mine = _vector(sums, _i32(r), 1)
            other = T.tvm_warp_shuffle_xor(mask, mine, hop, 32, 32)
            _put(sums, mine + other, _i32(r), 1)
    # Lane r has row r, so that one store writes them all.
    total = _vector(sums, _i32(0), 1)
    for r in range(1, each):
        total = tirx.Select(lane == r, _vector(sums, _i32(r), 1), total)
    with T.If(tirx.all(lane < each, row0 + lane < n)), T.Then():
        at = T.bind(row0 + lane)
        _put(flat["out"], _finish(spec, flat, T.bind(total), at, at), at, 1)


def columns_per_thread(spec: MmaSpec) -> int:
    """Columns of (K, N) a thread reads at once: fewer than 16 bytes where blocks would be few."""
    width = math.gcd(16 // _BYTES[spec.dtype], spec.n)
    while width > 1 and spec.n // (32 * width) < 64:
        width //= 2
    return width


@dataclass(frozen=True)
class ColumnGeometry:
    """How threads share a product with weights (K, N)."""

    width: int  # columns of a thread

    threads = 32 * PARTS

    @staticmethod
    def of(spec: MmaSpec) -> ColumnGeometry:
        """Return the geometry for a product."""
        return ColumnGeometry(columns_per_thread(spec))

    @property
    def shared(self) -> int:
        """Floats of shared memory."""
        return PARTS * 32 * self.width

    def blocks(self, n: int) -> int:
        """Return how many blocks have n columns."""
        return -(-n // (32 * self.width))


Geometry = RowGeometry | ColumnGeometry


def geometry_of(spec: MmaSpec) -> Geometry:
    """Return how threads share a product."""
    return RowGeometry.of(spec) if spec.rhs_layout == "NK" else ColumnGeometry.of(spec)


def emit_product(spec: MmaSpec, flat: dict[str, Any], bx: Any, tx: Any, shared: Any) -> None:
    """Emit what block `bx` and thread `tx` do for a product.

    An element of the result is stored by the same thread for all products of one geometry and N.

    Parameters
    ----------
    spec : MmaSpec
        The product.
    flat : dict
        Its tensors by name, as one-dimensional buffers.
    bx, tx : Var or expression
        Block and thread, counted from 0 for this product.
    shared : Buffer or None
        float32, of at least the geometry's `shared` elements.
    """
    geometry = geometry_of(spec)
    if isinstance(geometry, RowGeometry):
        _row_products(spec, geometry, flat, bx, tx)
    else:
        _column_products(spec, geometry, flat, bx, tx, shared)


def shared_buffer(size: int) -> Any:
    """Allocate float32 in shared memory; None for nothing."""
    return T.alloc_buffer((size,), "float32", scope="shared") if size else None


def _column_products(
    spec: MmaSpec,
    geometry: ColumnGeometry,
    flat: dict[str, Any],
    bx: Any,
    tx: Any,
    shared: Any,
) -> None:
    width, k = geometry.width, spec.k
    across = 32 * width
    n = tirx.const(spec.n, "int64")
    x = T.alloc_buffer((AHEAD,), spec.dtype, scope="local")
    w = T.alloc_buffer((AHEAD * width,), spec.dtype, scope="local")
    sums = T.alloc_buffer((width,), "float32", scope="local")
    lane = T.bind(tirx.floormod(tx, _i32(32)))
    part = T.bind(tirx.Cast("int64", tirx.floordiv(tx, _i32(32))))
    column0 = T.bind(tirx.Cast("int64", bx) * across)
    # N is a multiple of the width: a thread's columns are all inside or all outside.
    column = T.bind(tirx.min(column0 + tirx.Cast("int64", lane * width), n - width))
    for v in range(width):
        _put(sums, tirx.const(0.0, "float32"), _i32(v), 1)

    def step(first: Any, count: int) -> None:
        for i in range(count):
            row = first + part + i * PARTS
            _load(x, i, flat["lhs"], row, 1)
            _load(w, i * width, flat["rhs"], row * spec.n + column, width)
        for i in range(count):
            for v in range(width):
                a = _f32(_vector(x, _i32(i), 1), spec.dtype)
                b = _f32(_vector(w, _i32(i * width + v), 1), spec.dtype)
                _put(sums, _vector(sums, _i32(v), 1) + a * b, _i32(v), 1)

    group = AHEAD * PARTS
    if k >= group:
        with T.serial(_i32(0), _i32(k // group)) as ko:
            step(tirx.Cast("int64", ko) * group, AHEAD)
    for i in range(-(-(k % group) // PARTS)):
        first = tirx.const(k // group * group + i * PARTS, "int64")
        with T.If(first + part < k), T.Then():
            step(first, 1)
    slot = tirx.Cast("int32", part) * across
    for v in range(width):  # lanes side by side: no bank conflicts
        _put(shared, _vector(sums, _i32(v), 1), slot + lane + _i32(32 * v), 1)
    T.evaluate(T.tvm_storage_sync("shared"))
    with T.If(tirx.all(tx < across, column0 + tirx.Cast("int64", tx) < n)), T.Then():
        place = tirx.floormod(tx, _i32(width)) * 32 + tirx.floordiv(tx, _i32(width))
        total = _vector(shared, place, 1)
        for p in range(1, PARTS):
            total = total + _vector(shared, place + _i32(p * across), 1)
        at = T.bind(column0 + tirx.Cast("int64", tx))
        _put(flat["out"], _finish(spec, flat, T.bind(total), at, at), at, 1)


def tensors_of(spec: MmaSpec) -> list[tuple[str, tuple[Any, ...], str]]:
    """Return (name, shape, dtype) of a kernel's parameters, the result last."""
    weight = (spec.n, spec.k) if spec.rhs_layout == "NK" else (spec.k, spec.n)
    return [
        ("lhs", (*spec.lead, spec.k), spec.dtype),
        ("rhs", weight, spec.dtype),
        *spec.operands(),
        ("out", (*spec.lead, spec.n), spec.out_dtype),
    ]


def gemv_kernel(spec: MmaSpec) -> tirx.PrimFunc:
    """Return the kernel.

    Parameters
    ----------
    spec : MmaSpec
        What it computes: no batch, row axes that are all 1, operands in fp32, fp16 or bf16.

    Returns
    -------
    PrimFunc
        Scheduled. Parameters: lhs (*lead, K), rhs (N, K) or (K, N), the epilogue's operands in
        order of first use, out (*lead, N).
    """
    geometry = geometry_of(spec)
    tensors = tensors_of(spec)
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(spec.key())
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            T.func_attr({SPEC_ATTR: json.dumps(asdict(spec))})
            buffers = []
            for name, shape, dtype in tensors:
                handle = T.arg(f"p_{name}", T.handle())
                sizes = [tirx.const(d, "int64") for d in shape]
                buffers.append(T.match_buffer(handle, sizes, dtype))
            with T.sblock("root"):
                T.reads()
                T.writes()
                flat = {
                    name: T.decl_buffer((math.prod(shape),), dtype, data=buffer.data)  # type: ignore[arg-type]
                    for (name, shape, dtype), buffer in zip(tensors, buffers, strict=True)
                }
                with (
                    T.launch_thread("blockIdx.x", geometry.blocks(spec.n)) as bx,
                    T.launch_thread("threadIdx.x", geometry.threads) as tx,
                ):
                    emit_product(spec, flat, bx, tx, shared_buffer(geometry.shared))
    return builder.get()


def spec_of(func: Any) -> MmaSpec | None:
    """Return what a kernel of `gemv_kernel` computes; None for other functions."""
    text = func.attrs.get(SPEC_ATTR, None) if func.attrs else None
    if text is None:
        return None
    found = json.loads(str(text))
    for name in ("batch", "lead"):
        found[name] = tuple(found[name])
    found["steps"] = tuple(tuple(s) for s in found["steps"])
    return MmaSpec(**found)
