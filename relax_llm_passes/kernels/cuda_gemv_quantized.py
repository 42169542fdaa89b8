"""Products of one row by group-quantised weights on CUDA: words are unpacked in registers.

TVM unpacks the whole weight to memory, and reads it again: 4-bit weights move nine times.

    (N, K): lanes along K sum a few rows of the weight, up to 4 words each, and meet by shuffles
    (K, N): a thread sums a column over a part of K; the warps of a block meet in shared memory

An integer becomes a float without a conversion, of which a multiprocessor does few: its bits are
those of a float between 2^23 and 2^24 whose lowest bit is worth 1.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from .cpu_spec import GemmSpec
from .cuda_gemv import AHEAD, PARTS, WARPS, lanes_per_row, rows_together
from .cuda_matmul import MmaSpec, _finish, _i32, _put, _vector
from .limits import KernelLimits

__all__ = ["LIMITS", "quantized_gemv_kernel", "quantized_gemv_name"]

LIMITS = KernelLimits(registers=80, static_smem=1024, resident_threads=768)

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_EXPONENT = 0x4B000000  # the float 2^23


class _Product:
    """What both layouts share: registers, loads, the sum of some words.

    A thread reads `together` words of a row at once, of one group, for up to `ahead` times before
    it adds up; `rows` rows share what it reads of the left operand.
    """

    def __init__(
        self, spec: GemmSpec, flat: dict[str, Any], rows: int, together: int, ahead: int
    ) -> None:
        assert spec.quant is not None
        self.spec, self.flat, self.rows, self.together = spec, flat, rows, together
        self.quant, self.per_word = spec.quant, spec.quant.per_word
        self.words = spec.k // self.per_word  # along K
        self.values = together * self.per_word  # of the left operand, at once
        self.x = T.alloc_buffer((ahead * self.values,), spec.lhs_dtype, scope="local")
        self.w = T.alloc_buffer((ahead * rows * together,), "uint32", scope="local")
        self.scale = T.alloc_buffer((ahead * rows,), self.quant.scale_dtype, scope="local")
        self.sums = T.alloc_buffer((rows,), "float32", scope="local")
        for r in range(rows):
            _put(self.sums, tirx.const(0.0, "float32"), _i32(r), 1)

    def load_x(self, i: int, word: Any) -> None:
        """Bring the left operand's values of the words from `word` on, 16 bytes at a time."""
        width = min(self.per_word, 16 // _BYTES[self.spec.lhs_dtype])
        for first in range(0, self.values, width):
            value = _vector(self.flat["lhs"], word * self.per_word + first, width)
            _put(self.x, value, _i32(i * self.values + first), width)

    def load_w(self, slot: int, word_at: Any, scale_at: Any) -> None:
        """Bring words of a row and their group's scale into registers."""
        words = _vector(self.flat["rhs_packed"], word_at, self.together)
        _put(self.w, words, _i32(slot * self.together), self.together)
        _put(self.scale, _vector(self.flat["rhs_scale"], scale_at, 1), _i32(slot), 1)

    def group(self, word: Any) -> Any:
        """Return which scale along K is a word's."""
        return tirx.floordiv(word, tirx.const(self.quant.group // self.per_word, "int64"))

    def add(self, i: int, row: int) -> None:
        """Add the products of some words to the sum of a row."""
        bits, slot = self.quant.bits, i * self.rows + row
        total: Any = None
        for j in range(self.values):
            at, low = slot * self.together + j // self.per_word, bits * (j % self.per_word)
            word = _vector(self.w, _i32(at), 1)
            field = word >> tirx.const(low, "uint32") if low else word
            field = field & tirx.const((1 << bits) - 1, "uint32")
            value = tirx.reinterpret("float32", field | tirx.const(_EXPONENT, "uint32"))
            value = value - tirx.const(float(2**23 + self.quant.offset), "float32")
            x = _vector(self.x, _i32(i * self.values + j), 1)
            product = value * (x if x.ty.dtype == "float32" else tirx.Cast("float32", x))
            total = product if total is None else total + product
        scale = _vector(self.scale, _i32(slot), 1)
        if self.quant.scale_dtype != "float32":
            scale = tirx.Cast("float32", scale)
        _put(self.sums, _vector(self.sums, _i32(row), 1) + total * scale, _i32(row), 1)

    def store(self, value: Any, at: Any) -> None:
        """Store a result after its epilogue."""
        steps = tuple((o.op, o.operand, o.dtype, o.value) for o in self.spec.epilogue.ops)
        out = MmaSpec((), (1,), 1, 1, out_dtype=self.spec.out_dtype, steps=steps)
        _put(self.flat["out"], _finish(out, self.flat, T.bind(value), at, at), at, 1)


def words_together(words: int, per_group: int, columns: int) -> int:
    """Words of a row that a lane reads at once: 16 bytes where a warp's lanes have as many.

    Half of it where four rows share the reads of the left operand, to fit the registers.
    """
    fits = (
        t
        for t in ((2,) if columns >= 8192 else (4, 2))
        if words % t == 0 and words // t >= 32 and per_group % t == 0
    )
    return next(fits, 1)


def _by_rows(spec: GemmSpec, flat: dict[str, Any], n: Any) -> None:
    assert spec.quant is not None
    words, groups_k = spec.k // spec.quant.per_word, -(-spec.k // spec.quant.group)
    # A symbolic N is a vocabulary's.
    columns = spec.n if isinstance(spec.n, int) else 8192
    together = words_together(words, spec.quant.group // spec.quant.per_word, columns)
    vectors = words // together
    lanes = lanes_per_row(vectors)
    each = rows_together(columns, -(-vectors // lanes))
    ahead = max(1, min(AHEAD // min(together, 2), 4 // each)) if together > 1 else AHEAD
    per_block = WARPS * (32 // lanes) * each
    with (
        T.launch_thread("blockIdx.x", tirx.floordiv(n + (per_block - 1), _i64(per_block))) as bx,
        T.launch_thread("threadIdx.x", 32 * WARPS) as tx,
    ):
        it = _Product(spec, flat, each, together, ahead)
        lane = T.bind(tirx.floormod(tx, _i32(lanes)))
        team = T.bind(tirx.Cast("int64", tirx.floordiv(tx, _i32(lanes))))
        row0 = T.bind(tirx.Cast("int64", bx) * per_block + team * each)
        # Rows past the last read it again, so that whole warps reach the shuffles.
        rows = [T.bind(tirx.min(row0 + r, n - 1)) for r in range(each)]
        inside = tirx.Cast("int64", lane)

        def step(first: Any, count: int) -> None:
            for i in range(count):
                word = T.bind((first + inside + i * lanes) * together)
                it.load_x(i, word)
                group = it.group(word)
                for r, row in enumerate(rows):
                    it.load_w(i * each + r, row * words + word, row * groups_k + group)
            for i in range(count):
                for r in range(each):
                    it.add(i, r)

        whole = vectors // lanes
        if whole >= ahead:
            with T.serial(_i32(0), _i32(whole // ahead)) as ko:
                step(tirx.Cast("int64", ko) * (ahead * lanes), ahead)
        done = whole // ahead * ahead
        if whole > done:
            step(_i64(done * lanes), whole - done)
        if vectors > whole * lanes:
            start = _i64(whole * lanes)
            with T.If(start + inside < vectors), T.Then():
                step(start, 1)
        mask = tirx.const(0xFFFFFFFF, "uint32")
        for hop in (h for h in (16, 8, 4, 2, 1) if h < lanes):
            for r in range(each):
                mine = _vector(it.sums, _i32(r), 1)
                other = T.tvm_warp_shuffle_xor(mask, mine, hop, 32, 32)
                _put(it.sums, mine + other, _i32(r), 1)
        total = _vector(it.sums, _i32(0), 1)
        for r in range(1, each):
            total = tirx.Select(lane == r, _vector(it.sums, _i32(r), 1), total)
        with T.If(tirx.all(lane < each, row0 + lane < n)), T.Then():
            it.store(total, T.bind(row0 + lane))


def _by_columns(spec: GemmSpec, flat: dict[str, Any], n: Any) -> None:
    with (
        T.launch_thread("blockIdx.x", tirx.floordiv(n + 31, _i64(32))) as bx,
        T.launch_thread("threadIdx.x", 32 * PARTS) as tx,
    ):
        it = _Product(spec, flat, 1, 1, AHEAD)
        shared = T.alloc_buffer((PARTS * 32,), "float32", scope="shared")
        lane = T.bind(tirx.floormod(tx, _i32(32)))
        part = T.bind(tirx.Cast("int64", tirx.floordiv(tx, _i32(32))))
        column0 = T.bind(tirx.Cast("int64", bx) * 32)
        column = T.bind(tirx.min(column0 + tirx.Cast("int64", lane), n - 1))

        def step(first: Any, count: int) -> None:
            for i in range(count):
                word = T.bind(first + part + i * PARTS)
                it.load_x(i, word)
                it.load_w(i, word * n + column, it.group(word) * n + column)
            for i in range(count):
                it.add(i, 0)

        group = AHEAD * PARTS
        if it.words >= group:
            with T.serial(_i32(0), _i32(it.words // group)) as ko:
                step(tirx.Cast("int64", ko) * group, AHEAD)
        for i in range(-(-(it.words % group) // PARTS)):
            first = _i64(it.words // group * group + i * PARTS)
            with T.If(first + part < it.words), T.Then():
                step(first, 1)
        _put(shared, _vector(it.sums, _i32(0), 1), tx, 1)
        T.evaluate(T.tvm_storage_sync("shared"))
        with T.If(tirx.all(tx < 32, column0 + tirx.Cast("int64", tx) < n)), T.Then():
            total = _vector(shared, tx, 1)
            for p in range(1, PARTS):
                total = total + _vector(shared, tx + _i32(32 * p), 1)
            it.store(total, T.bind(column0 + tirx.Cast("int64", tx)))


def _i64(value: int) -> Any:
    return tirx.const(value, "int64")


def quantized_gemv_name(spec: GemmSpec) -> str:
    """Return a name: readable, and different where the sizes differ."""
    return "gemv" + spec.key().removeprefix("gemm")


def quantized_gemv_kernel(spec: GemmSpec) -> tirx.PrimFunc:
    """Return the kernel.

    Parameters
    ----------
    spec : GemmSpec
        What it computes: `quant` is set, the leading sizes are all 1, K is a whole number of words
        and a group too. N may be symbolic.

    Returns
    -------
    PrimFunc
        Scheduled. Parameters: lhs (*lead, K), rhs_packed (N, K / per_word) or its transpose,
        rhs_scale (N, K / group) or its transpose, the epilogue's operands, out (*lead, N).
    """
    inputs, outputs = spec.tensors(1)
    symbols: dict[str, Any] = {}
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(quantized_gemv_name(spec))
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            buffers, sizes = [], []
            for tensor in [*inputs, *outputs]:
                handle = T.arg(f"p_{tensor.name}", T.handle())
                for dim in tensor.shape:
                    if isinstance(dim, str) and dim not in symbols:
                        symbols[dim] = T.int64()
                        IRBuilder.name(dim, symbols[dim])
                shape = [symbols[d] if isinstance(d, str) else _i64(d) for d in tensor.shape]
                sizes.append(shape)
                buffers.append(T.match_buffer(handle, shape, tensor.dtype))
            with T.sblock("root"):
                T.reads()
                T.writes()
                flat = {}
                for tensor, shape, buffer in zip([*inputs, *outputs], sizes, buffers, strict=True):
                    total = math.prod(shape[1:], start=shape[0])
                    flat[tensor.name] = T.decl_buffer((total,), tensor.dtype, data=buffer.data)
                n = symbols[spec.n] if isinstance(spec.n, str) else _i64(spec.n)
                (_by_rows if spec.layout == "NK" else _by_columns)(spec, flat, n)
    return builder.get()
