"""How the old rows of a cache go to the new one in a CPU attention with a functional append.

Rows are copied where the attention has just read them. Caches that do not fit the processor's
go past it: a store that does not read the line first leaves two thirds of the memory traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from .attention_pieces import AttentionKernel, cast_to, static_int, uncast, vector_width
from .attention_plan import Append
from .scalar_expr import TensorLoad, bound_analyzer, dtype_of, i64, substitute

__all__ = ["RowCopy", "copied", "past_the_caches", "with_copies", "write_new_row"]

_NAME = "relax_llm_copy"
# Bytes of keys and values from which on what is written would not stay in the processor until the
# next token reads it: a third-level cache's 32 MB hold both, and other layers' caches.
_STREAM_BYTES = 6 << 20

# What TVM cannot say: stores that bypass the caches. Lines of 64 bytes are written whole.
_SOURCE = f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define linkonce_odr i32 @{_NAME}(ptr %to, ptr %from, i64 %bytes, i32 %past) alwaysinline {{
entry:
  %stream = icmp ne i32 %past, 0
  %address = ptrtoint ptr %to to i64
  %negative = sub i64 0, %address
  %offset = and i64 %negative, 63
  %start = select i1 %stream, i64 %offset, i64 0
  %short = icmp ult i64 %bytes, %start
  %first = select i1 %short, i64 %bytes, i64 %start
  %some = icmp ne i64 %first, 0
  br i1 %some, label %head, label %middle
head:
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %first, i1 false)
  br label %middle
middle:
  %rest = sub i64 %bytes, %first
  %whole = and i64 %rest, -64
  %to1 = getelementptr i8, ptr %to, i64 %first
  %from1 = getelementptr i8, ptr %from, i64 %first
  %any = icmp ne i64 %whole, 0
  br i1 %any, label %kind, label %tail
kind:
  br i1 %stream, label %streams, label %keeps
streams:
  %i = phi i64 [ 0, %kind ], [ %i2, %streams ]
  %source = getelementptr i8, ptr %from1, i64 %i
  %target = getelementptr i8, ptr %to1, i64 %i
  %line = load <16 x i32>, ptr %source, align 2
  store <16 x i32> %line, ptr %target, align 64, !nontemporal !0
  %i2 = add i64 %i, 64
  %more = icmp ult i64 %i2, %whole
  br i1 %more, label %streams, label %tail
keeps:
  %j = phi i64 [ 0, %kind ], [ %j2, %keeps ]
  %source1 = getelementptr i8, ptr %from1, i64 %j
  %target1 = getelementptr i8, ptr %to1, i64 %j
  %line1 = load <16 x i32>, ptr %source1, align 2
  store <16 x i32> %line1, ptr %target1, align 2
  %j2 = add i64 %j, 64
  %more1 = icmp ult i64 %j2, %whole
  br i1 %more1, label %keeps, label %tail
tail:
  %left = and i64 %rest, 63
  %none = icmp eq i64 %left, 0
  br i1 %none, label %done, label %last
last:
  %to2 = getelementptr i8, ptr %to1, i64 %whole
  %from2 = getelementptr i8, ptr %from1, i64 %whole
  call void @llvm.memcpy.p0.p0.i64(ptr %to2, ptr %from2, i64 %left, i1 false)
  br label %done
done:
  ret i32 0
}}

define linkonce_odr i32 @{_NAME}d() alwaysinline {{
  fence seq_cst
  ret i32 0
}}

!0 = !{{i32 1}}
"""


def with_copies(body: Callable[[], None]) -> None:
    """Emit `body`, in which rows may be copied."""
    with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", _SOURCE):
        body()


def past_the_caches(kernel: AttentionKernel) -> Any:
    """Return whether the caches are so large that what goes out should not be kept (int32)."""
    plan = kernel.plan
    append = plan.append_k
    assert append is not None
    size = DataType(str(append.cache.dtype)).bits // 8
    total = i64(plan.T) * i64((plan.D + plan.E) * size)
    for extent in kernel.extents:
        total = total * extent
    return tirx.Cast("int32", bound_analyzer({}).simplify(total) > i64(_STREAM_BYTES))


def copied() -> None:
    """Wait until what went past the caches is there: ordinary stores behind it tell of it."""
    T.evaluate(tirx.call_extern("int32", f"{_NAME}d"))


class RowCopy:
    """Copies rows of one of the caches. `axis` is "d" (keys) or "e" (values)."""

    def __init__(self, kernel: AttentionKernel, append: Append, axis: str, past: Any) -> None:
        self.kernel, self.append, self.axis, self.past_caches = kernel, append, axis, past
        plan = kernel.plan
        self.size = plan.D if axis == "d" else plan.E
        self.dtype = str(append.cache.dtype)
        old = append.past.value if isinstance(append.past, tirx.Cast) else append.past
        self.whole_rows = self.whole_runs = False
        if isinstance(old, TensorLoad) and dtype_of(old) == self.dtype:
            self.old = old
            offsets = [
                _offset(old.indices, old.source.shape),
                _offset(append.index, append.cache.shape),
            ]
            along = plan.d if axis == "d" else plan.e
            self.whole_rows = all(_step(x, along) == 1 for x in offsets)
            self.whole_runs = all(_step(x, plan.t) == self.size for x in offsets)

    def emit(self, first: Any, count: Any) -> None:
        """Copy the rows of [first, first + count)."""
        count = count if static_int(count) else tirx.Max(count, i64(0))
        if self.whole_rows and self.whole_runs:
            self._call(first, count)
            return
        with T.serial(count) as row:
            if self.whole_rows:
                self._call(first + row, i64(1))
            else:
                self._elements(first + row)

    def _call(self, first: Any, count: Any) -> None:
        at = {self.axis: i64(0), "t": first}
        new = tirx.BufferLoad(
            self.append.cache, [self.kernel.at(x, **at) for x in self.append.index]
        )
        old = self.kernel.at(self.old, **at)
        size = self.size * DataType(self.dtype).bits // 8
        T.evaluate(
            tirx.call_extern(
                "int32", _NAME, tirx.address_of(new), tirx.address_of(old),
                count * i64(size), self.past_caches,
            )
        )  # fmt: skip

    def _elements(self, t: Any) -> None:
        width = vector_width(self.size, self.kernel.lanes)
        with T.serial(i64(self.size // width)) as o, T.vectorized(i64(width)) as lane:
            at = {self.axis: o * i64(width) + lane, "t": t}
            where = [self.kernel.at(i, **at) for i in self.append.index]
            value = uncast(self.kernel.at(self.append.past, **at), self.dtype)
            T.buffer_store(self.append.cache, value, where)


def _offset(indices: Any, shape: Any) -> Any:
    flat: Any = i64(0)
    for index, extent in zip(indices, shape, strict=True):
        flat = flat * i64(extent) + i64(index)
    return flat


def _step(offset: Any, var: Any) -> int | None:
    step = substitute(offset, {var: var + i64(1)}) - offset
    return static_int(bound_analyzer({}).simplify(step))


def write_new_row(kernel: AttentionKernel, t: Any, start: Any) -> None:
    """Write row t of both caches from the new keys (rotated) and values, which begin at `start`."""

    plan = kernel.plan
    for append, axis, size in ((plan.append_k, "d", plan.D), (plan.append_v, "e", plan.E)):
        assert append is not None
        with T.serial(i64(size)) as c:
            where = [kernel.at(i, **{axis: c, "t": t}) for i in append.index]
            value = kernel.at(append.new, **{axis: c, "t": t - start})
            T.buffer_store(append.cache, cast_to(value, str(append.cache.dtype)), where)
