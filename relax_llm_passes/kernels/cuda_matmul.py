"""fp16 and bf16 products on CUDA tensor cores, with epilogues, on the stock wheel.

TVM schedules bf16 products as scalar code, and its fp16 rule crashes the process with some versions
of tvm-ffi. This kernel is written out, not scheduled: `mma.sync.m16n8k16` (sm_80 and newer) with
fp32 sums, for static N and K and any number of rows.

    grid (N tiles, M tiles, batch); a block of warps computes a tile of the result
    for each 32 of K:  global -> registers (next tile) | shared -> fragments -> mma

Fragments follow the PTX ISA, "Matrix Fragments for mma.m16n8k16": with g = lane / 4 and
t = lane % 4, a thread holds A[g, 2t..], A[g+8, 2t..], A[g, 2t+8..], A[g+8, 2t+8..],
B[2t.., g], B[2t+8.., g] and C[g, 2t..], C[g+8, 2t..]. Rows in shared
memory are 40 elements apart, so that the 32 words that a
warp reads are in 32 banks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import ptx_legacy_mma
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from .limits import KernelLimits

__all__ = ["LIMITS", "MmaSpec", "Tile", "choose_tile", "mma_kernel"]

# What ptxas may say that it needs; tests/cuda/test_limits.py holds it to that.
# 128 registers are two blocks of 256 threads on a multiprocessor.
LIMITS = KernelLimits(registers=128, static_smem=24576, resident_threads=512)

BK = 32  # of K at a time
PAD = 8  # keeps fragment loads free of bank conflicts
_SHORT = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Tile:
    """How a block divides its part of the result: `warps_m * warps_n` warps."""

    m: int
    n: int
    warps_m: int
    warps_n: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        """Rows of a warp."""
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of a warp."""
        return self.n // self.warps_n


@dataclass(frozen=True)
class MmaSpec:
    """Everything the kernel is built for.

    Attributes
    ----------
    batch : tuple
        Sizes of the batch axes of the right operand; texts are symbolic. Empty: all leading axes
        of the left operand count rows.
    lead : tuple
        Sizes of the row axes of the left operand (one, with a batch).
    n, k : int
        Columns and length of the sums.
    rhs_layout : str
        "NK" or "KN".
    dtype, out_dtype : str
        Of the operands (float16 or bfloat16) and of the result.
    steps : tuple
        Epilogue: (op, operand name, operand dtype, number).
    lhs_batched : bool
        False when one left operand goes with every right one.
    prefix : str
        Of the kernel's name.
    """

    batch: tuple[int | str, ...]
    lead: tuple[int | str, ...]
    n: int
    k: int
    rhs_layout: str = "NK"
    dtype: str = "float16"
    out_dtype: str = "float16"
    steps: tuple[tuple[str, str, str, float], ...] = ()
    lhs_batched: bool = True
    prefix: str = "mma"

    @property
    def static_m(self) -> int | None:
        """Rows of one product, or None."""
        sizes = [d for d in self.lead if isinstance(d, int)]
        return math.prod(sizes) if len(sizes) == len(self.lead) else None

    def operands(self) -> list[tuple[str, tuple[int | str, ...], str]]:
        """Return (name, shape, dtype) of the epilogue's operands in the order of first use."""
        found: dict[str, tuple[str, tuple[int | str, ...], str]] = {}
        for op, name, dtype, _ in self.steps:
            if name:
                shape = (self.n,) if op == "bias" else (*self.batch, *self.lead, self.n)
                found.setdefault(name, (name, shape, dtype))
        return list(found.values())

    def key(self) -> str:
        """Return a name: readable, and different where the sizes differ."""
        sizes = "x".join(str(d) for d in (*self.batch, *self.lead)) or "1"
        steps = "".join("_" + op for op, *_ in self.steps if op != "cast")
        types = f"{self.dtype}_{self.out_dtype}".replace("float", "f").replace("bf", "bf")
        return f"{self.prefix}_{self.rhs_layout}_{sizes}_{self.n}_{self.k}_{types}{steps}"


def choose_tile(spec: MmaSpec) -> Tile:
    """Return the tile: small where the rows are few, or where large ones would leave cores idle."""
    m = spec.static_m
    if m is not None and m <= 16:
        return Tile(16, 64, 1, 4)
    if spec.n >= 128 and (m is None or m >= 1024):
        return Tile(128, 128, 2, 4)
    return Tile(64, 64, 2, 2)


def _i32(value: Any) -> Any:
    return tirx.IntImm("int32", value) if isinstance(value, int) else value


def _vector(buffer: Any, index: Any, lanes: int) -> Any:
    at = tirx.Ramp(index, tirx.const(1, index.ty.dtype), lanes) if lanes > 1 else index
    return tirx.BufferLoad(buffer, [at])


def _put(buffer: Any, value: Any, index: Any, lanes: int) -> None:
    at = tirx.Ramp(index, tirx.const(1, index.ty.dtype), lanes) if lanes > 1 else index
    T.buffer_store(buffer, value, [at])


class _Loader:
    """Brings a (rows, BK) tile from global memory through registers to shared memory.

    `along_k` says which axis is contiguous in global memory; in shared memory K always is.
    """

    def __init__(
        self, source: Any, shared: Any, rows: int, along_k: bool, spec: MmaSpec, threads: int
    ) -> None:
        self.source, self.shared, self.rows, self.along_k = source, shared, rows, along_k
        self.dtype = spec.dtype
        contiguous = spec.k if along_k else spec.n
        self.width = math.gcd(8, contiguous)
        self.length = BK if along_k else rows
        total = rows * BK // self.width
        self.each = -(-total // threads)
        self.exact = total % threads == 0
        self.total, self.threads = total, threads
        self.registers = T.alloc_buffer((self.each * self.width,), spec.dtype, scope="local")

    def _places(self, tx: Any, body: Callable[[int, Any, Any, Any], None]) -> None:
        """Call `body(i, number, outer, inner)` for the vectors of this thread."""
        across = self.length // self.width
        for i in range(self.each):
            number = tx + _i32(i * self.threads)
            outer, inner = (
                tirx.floordiv(number, _i32(across)),
                tirx.floormod(number, _i32(across)) * _i32(self.width),
            )
            if self.exact:
                body(i, number, outer, inner)
            else:
                with T.If(number < self.total), T.Then():
                    body(i, number, outer, inner)

    def fetch(self, tx: Any, base: Any, row0: Any, row_limit: Any, k0: Any, spec: MmaSpec) -> None:
        """Global memory to registers; zeros beyond the edges."""
        k_limit = tirx.const(spec.k, "int64")

        def one(i: int, number: Any, outer: Any, inner: Any) -> None:
            row, kk = (outer, inner) if self.along_k else (inner, outer)
            row = row0 + tirx.Cast("int64", row)
            kk = k0 + tirx.Cast("int64", kk)
            at = row * spec.k + kk if self.along_k else kk * spec.n + row
            zero = tirx.const(0, self.dtype)
            empty = tirx.Broadcast(zero, self.width) if self.width > 1 else zero
            with T.If(tirx.all(row < row_limit, kk < k_limit)):
                with T.Then():
                    value = _vector(self.source, base + at, self.width)
                    _put(self.registers, value, _i32(i * self.width), self.width)
                with T.Else():
                    _put(self.registers, empty, _i32(i * self.width), self.width)

        self._places(tx, one)

    def deposit(self, tx: Any) -> None:
        """Registers to shared memory."""
        stride = BK + PAD

        def one(i: int, number: Any, outer: Any, inner: Any) -> None:
            if self.along_k:
                value = _vector(self.registers, _i32(i * self.width), self.width)
                _put(self.shared, value, outer * stride + inner, self.width)
                return
            for j in range(self.width):
                value = _vector(self.registers, _i32(i * self.width + j), 1)
                _put(self.shared, value, (inner + _i32(j)) * stride + outer, 1)

        self._places(tx, one)


_GELU = math.sqrt(2.0 / math.pi)


def _sigmoid(x: Any) -> Any:
    return tirx.const(1.0, "float32") / (tirx.const(1.0, "float32") + tirx.exp(-x))


def _tanh_gelu(x: Any) -> Any:
    f = lambda v: tirx.const(v, "float32")  # noqa: E731
    return f(0.5) * x * (f(1.0) + tirx.tanh(f(_GELU) * (x + f(0.044715) * x * x * x)))


def _erf_gelu(x: Any) -> Any:
    f = lambda v: tirx.const(v, "float32")  # noqa: E731
    return f(0.5) * x * (f(1.0) + tirx.erf(x * f(math.sqrt(0.5))))


def _relu(x: Any) -> Any:
    zero = tirx.const(0.0, "float32")
    return tirx.Select(x < zero, zero, x)  # NaN stays NaN


_UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": _relu,
    "relu_squared": lambda x: _relu(x) * _relu(x),
    "gelu_erf": _erf_gelu,
    "gelu_tanh": _tanh_gelu,
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": tirx.tanh,
}
STEPS = (*_UNARY, "bias", "residual", "multiply", "scale", "cast")


def _finish(spec: MmaSpec, flat: Mapping[str, Any], value: Any, at: Any, column: Any) -> Any:
    """Return the result of the epilogue for one sum; rounded once, at the end."""
    for op, name, _, number in spec.steps:
        if op == "bias":
            value = value + tirx.Cast("float32", _vector(flat[name], column, 1))
        elif op == "residual":
            value = value + tirx.Cast("float32", _vector(flat[name], at, 1))
        elif op == "multiply":
            value = value * tirx.Cast("float32", _vector(flat[name], at, 1))
        elif op == "scale":
            value = value * tirx.const(number, "float32")
        elif op != "cast":
            value = T.bind(_UNARY[op](T.bind(value)))
    return tirx.Cast(spec.out_dtype, value) if spec.out_dtype != "float32" else value


def _product(dims: Sequence[Any]) -> Any:
    total: Any = tirx.const(1, "int64")
    for dim in dims:
        total = total * dim
    return total


def _emit(spec: MmaSpec, tile: Tile, flat: Mapping[str, Any], size: Callable[[Any], Any]) -> None:
    m = _product([size(d) for d in spec.lead])
    batch = _product([size(d) for d in spec.batch])
    n64, stride = tirx.const(spec.n, "int64"), BK + PAD
    tiles_m = tirx.floordiv(m + (tile.m - 1), tirx.const(tile.m, "int64"))
    mt, nt = tile.warp_m // 16, tile.warp_n // 8
    with (
        T.launch_thread("blockIdx.x", -(-spec.n // tile.n)) as bx,
        T.launch_thread("blockIdx.y", tiles_m) as by,
        T.launch_thread("blockIdx.z", batch) as bz,
        T.launch_thread("threadIdx.x", tile.threads) as tx,
    ):
        shared_a = T.alloc_buffer((tile.m * stride,), spec.dtype, scope="shared")
        shared_b = T.alloc_buffer((tile.n * stride,), spec.dtype, scope="shared")
        sums = T.alloc_buffer((mt * nt * 4,), "float32", scope="local")
        a_regs = T.alloc_buffer((mt * 8,), spec.dtype, scope="local")
        b_regs = T.alloc_buffer((nt * 4,), spec.dtype, scope="local")
        load_a = _Loader(flat["lhs"], shared_a, tile.m, True, spec, tile.threads)
        load_b = _Loader(flat["rhs"], shared_b, tile.n, spec.rhs_layout == "NK", spec, tile.threads)
        lane = T.bind(tirx.floormod(tx, _i32(32)))
        warp = T.bind(tirx.floordiv(tx, _i32(32)))
        g, t = T.bind(tirx.floordiv(lane, _i32(4))), T.bind(tirx.floormod(lane, _i32(4)))
        warp_row = T.bind(tirx.floordiv(warp, _i32(tile.warps_n)) * _i32(tile.warp_m))
        warp_col = T.bind(tirx.floormod(warp, _i32(tile.warps_n)) * _i32(tile.warp_n))
        row0 = T.bind(tirx.Cast("int64", by) * tile.m)
        col0 = T.bind(tirx.Cast("int64", bx) * tile.n)
        b64 = tirx.Cast("int64", bz)
        zero64 = tirx.const(0, "int64")
        lhs_base = T.bind(b64 * (m * spec.k) if spec.batch and spec.lhs_batched else zero64)
        rhs_base = T.bind(b64 * (spec.n * spec.k) if spec.batch else zero64)
        for i in range(mt * nt * 4):
            _put(sums, tirx.const(0.0, "float32"), _i32(i), 1)

        def fetch(k0: Any) -> None:
            load_a.fetch(tx, lhs_base, row0, m, k0, spec)
            load_b.fetch(tx, rhs_base, col0, n64, k0, spec)

        fetch(zero64)
        steps = -(-spec.k // BK)
        with T.serial(_i32(0), _i32(steps)) as ko:
            load_a.deposit(tx)
            load_b.deposit(tx)
            T.evaluate(T.tvm_storage_sync("shared"))
            with T.If(ko + 1 < steps), T.Then():
                fetch(tirx.Cast("int64", ko + 1) * BK)
            for k16 in range(0, BK, 16):
                for i in range(mt):
                    for half, (dr, dk) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                        row = warp_row + g + _i32(i * 16 + dr)
                        at = row * stride + t * _i32(2) + _i32(k16 + dk)
                        _put(a_regs, _vector(shared_a, at, 2), _i32(i * 8 + half * 2), 2)
                for j in range(nt):
                    for half, dk in enumerate((0, 8)):
                        col = warp_col + g + _i32(j * 8)
                        at = col * stride + t * _i32(2) + _i32(k16 + dk)
                        _put(b_regs, _vector(shared_b, at, 2), _i32(j * 4 + half * 2), 2)
                short = _SHORT[spec.dtype]
                for i in range(mt):
                    for j in range(nt):
                        T.evaluate(
                            ptx_legacy_mma(
                                "m16n8k16",
                                "row",
                                "col",
                                short,
                                short,
                                "fp32",
                                a_regs.data,
                                _i32(i * 8),
                                b_regs.data,
                                _i32(j * 4),
                                sums.data,
                                _i32((i * nt + j) * 4),
                                False,
                            )
                        )
            T.evaluate(T.tvm_storage_sync("shared"))
        out_base = T.bind(b64 * (m * spec.n) if spec.batch else zero64)
        for i in range(mt):
            for j in range(nt):
                for r in range(4):
                    row = row0 + tirx.Cast("int64", warp_row + g + _i32(i * 16 + 8 * (r // 2)))
                    col = col0 + tirx.Cast("int64", warp_col + t * _i32(2) + _i32(j * 8 + r % 2))
                    with T.If(tirx.all(row < m, col < n64)), T.Then():
                        at = T.bind(out_base + row * spec.n + col)
                        value = _vector(sums, _i32((i * nt + j) * 4 + r), 1)
                        _put(flat["out"], _finish(spec, flat, value, at, col), at, 1)


def mma_kernel(spec: MmaSpec, tile: Tile | None = None) -> tirx.PrimFunc:
    """Return the kernel.

    Parameters
    ----------
    spec : MmaSpec
        What it computes.
    tile : Tile, optional
        Instead of the one that `choose_tile` gives.

    Returns
    -------
    PrimFunc
        Scheduled. Parameters: lhs (*batch, *lead, K), rhs (*batch, N, K) or (*batch, K, N), the
        epilogue's operands in order of first use, out (*batch, *lead, N).
    """
    tile = tile or choose_tile(spec)
    weight = (spec.n, spec.k) if spec.rhs_layout == "NK" else (spec.k, spec.n)
    lhs_lead = (*spec.batch, *spec.lead) if spec.lhs_batched else spec.lead
    tensors = [
        ("lhs", (*lhs_lead, spec.k), spec.dtype),
        ("rhs", (*spec.batch, *weight), spec.dtype),
        *spec.operands(),
        ("out", (*spec.batch, *spec.lead, spec.n), spec.out_dtype),
    ]
    symbols: dict[str, Any] = {}

    def size(dim: int | str) -> Any:
        return symbols[dim] if isinstance(dim, str) else tirx.const(dim, "int64")

    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(spec.key())
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            buffers = []
            for name, shape, dtype in tensors:
                handle = T.arg(f"p_{name}", T.handle())
                for dim in shape:
                    if isinstance(dim, str) and dim not in symbols:
                        symbols[dim] = T.int64()
                        IRBuilder.name(dim, symbols[dim])
                buffers.append(T.match_buffer(handle, [size(d) for d in shape], dtype))
            with T.sblock("root"):
                T.reads()
                T.writes()
                flat = {}
                for (name, shape, dtype), buffer in zip(tensors, buffers, strict=True):
                    total = _product([size(d) for d in shape])
                    flat[name] = T.decl_buffer((total,), dtype, data=buffer.data)
                _emit(spec, tile, flat, size)
    return builder.get()
