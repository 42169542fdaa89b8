"""How a CPU kernel is written down: flat buffers, vector loads and stores, loops.

The kernels of this folder are built statement by statement instead of scheduled, because a
register tile is exactly what they are about. TVM's builder does the work; this module adds the few
words the kernels use, so that they read like loops over vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

__all__ = [
    "T",
    "TensorSpec",
    "add_lanes",
    "build_kernel",
    "cast",
    "ceil_div",
    "choose",
    "divides",
    "i64",
    "let",
    "load",
    "local",
    "prefetch",
    "reduce_lanes",
    "splat",
    "store",
    "workspace",
]

Dim = int | str


@dataclass(frozen=True)
class TensorSpec:
    """A kernel's tensor: its name, shape (a text is a symbolic size) and dtype."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str


def i64(value: Any) -> Any:
    """Return `value` as a 64-bit index; expressions pass unchanged."""
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def ceil_div(a: Any, b: int) -> Any:
    """Return a / b rounded up, for an int or an expression a."""
    if isinstance(a, int):
        return -(-a // b)
    return tirx.floordiv(a + (b - 1), i64(b))


def divides(step: int, size: Any) -> bool:
    """Tell whether `step` is known to divide `size`; of an expression nothing is known."""
    return isinstance(size, int) and size % step == 0


def splat(value: Any, lanes: int, dtype: str = "float32") -> Any:
    """Return a vector with `value` in every lane."""
    if isinstance(value, (int, float)):
        value = tirx.const(value, dtype)
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


def cast(value: Any, dtype: str, lanes: int) -> Any:
    """Convert a vector to the element type `dtype`."""
    full = f"{dtype}x{lanes}" if lanes > 1 else dtype
    return value if str(value.ty.dtype) == full else tirx.Cast(full, value)


def load(buffer: Any, index: Any, lanes: int = 1, dtype: str = "float32") -> Any:
    """Load `lanes` neighbours from a flat buffer, converted to `dtype`."""
    at = tirx.Ramp(i64(index), i64(1), lanes) if lanes > 1 else i64(index)
    value = cast(tirx.BufferLoad(buffer, [at]), dtype, lanes)
    # Not for a `let`: TVM's bfloat16 passes then take the bits for an integer's.
    from_bfloat16 = str(buffer.dtype) == "bfloat16" and dtype == "float32"
    return keep(value, lanes) if from_bfloat16 else value


def store(buffer: Any, value: Any, index: Any, lanes: int = 1) -> None:
    """Store a vector to a flat buffer, converted to the buffer's type."""
    at = tirx.Ramp(i64(index), i64(1), lanes) if lanes > 1 else i64(index)
    T.buffer_store(buffer, cast(value, str(buffer.dtype), lanes), [at])


def prefetch(buffer: Any, index: Any) -> None:
    """Ask for the cache line of an element to be read later; the index may lie outside."""
    address = tirx.address_of(tirx.BufferLoad(buffer, [i64(index)]))
    read, keep_it, data = (tirx.const(value, "int32") for value in (0, 3, 1))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, read, keep_it, data))


def let(value: Any) -> Any:
    """Bind a value, so that it is computed once."""
    return T.bind(i64(value)) if isinstance(value, int) else T.bind(value)


def keep(value: Any, lanes: int, dtype: str = "float32") -> Any:
    """Hold a vector in a local buffer, so that no later pass writes its expression out again.

    TVM's simplifiers replace a bound variable by its expression wherever it is read. A chain of
    `let`s that reads each value twice then grows as 2^length: a GELU took 20 s to compile.
    """
    buffer = local(lanes, dtype)
    store(buffer, value, 0, lanes)
    return load(buffer, 0, lanes, dtype)


def local(size: int, dtype: str = "float32") -> Any:
    """Allocate on the stack; with constant indices LLVM keeps it in registers."""
    return T.alloc_buffer((i64(size),), dtype, scope="local")


# Waking threads takes 1 to 3 microseconds on idle cores, and a scheduler turn (milliseconds)
# on busy ones; one thread does this many multiply-adds in about 6 microseconds.
_SERIAL_WORK = 1 << 16


def is_little(work: Any) -> Any:
    """Tell, by a bool or an expression, whether so many multiply-adds are too few for threads."""
    if isinstance(work, (int, tirx.IntImm)):
        return int(work) <= _SERIAL_WORK
    return work <= i64(_SERIAL_WORK)


def tasks(extent: Any, work: Any) -> Any:
    """Loop in parallel, or serially where `work` (multiply-adds) is known to be too little."""
    small = isinstance(work, int) and is_little(work)
    return T.serial(i64(0), extent) if small else T.parallel(i64(0), extent)


def workspace(size: Any, dtype: str = "float32") -> Any:
    """Allocate from TVM's pool of the current thread."""
    return T.alloc_buffer((i64(size),), dtype, scope="global")


def choose(condition: Any, then: Callable[[], None], other: Callable[[], None]) -> None:
    """Emit `then` or `other` by a condition that may be known now."""
    if isinstance(condition, bool):
        (then if condition else other)()
        return
    with T.If(condition):
        with T.Then():
            then()
        with T.Else():
            other()


def add_lanes(vectors: Sequence[Any], lanes: int) -> Any:
    """Return the vector whose lane j is the sum of vector j's lanes; takes `lanes` vectors."""
    return reduce_lanes(vectors, lanes, lambda a, b: a + b)


def reduce_lanes(vectors: Sequence[Any], lanes: int, join: Callable[[Any, Any], Any]) -> Any:
    """Return the vector whose lane j joins the lanes of vector j; takes `lanes` vectors.

    A tree of shuffles: each level makes two vectors one, which holds what their neighbouring lanes
    give.
    """
    level = list(vectors)
    even = list(range(0, 2 * lanes, 2))
    odd = list(range(1, 2 * lanes, 2))
    while len(level) > 1:
        joined = []
        for a, b in zip(level[::2], level[1::2], strict=True):
            a, b = let(a), let(b)
            joined.append(let(join(tirx.Shuffle([a, b], even), tirx.Shuffle([a, b], odd))))
        level = joined
    return level[0]


def build_kernel(
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    body: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
) -> tirx.PrimFunc:
    """Build a PrimFunc over contiguous tensors.

    Parameters
    ----------
    name : str
        Its global symbol.
    inputs, outputs : sequence of TensorSpec
        Parameters in order; equal symbolic names are one size.
    body : callable
        Emits the statements, given the tensors as flat buffers by name and the symbolic sizes
        by name (int64 expressions).

    Returns
    -------
    PrimFunc
        Marked as scheduled; its tensors do not overlap.
    """
    sizes: dict[str, Any] = {}
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": name})
            tensors = []
            for spec in (*inputs, *outputs):
                handle = T.arg(spec.name, T.handle())
                shape = []
                for dim in spec.shape:
                    if isinstance(dim, str):
                        if dim not in sizes:
                            sizes[dim] = T.int64()
                            IRBuilder.name(dim, sizes[dim])
                        shape.append(sizes[dim])
                    else:
                        shape.append(i64(dim))
                buffer = T.match_buffer(handle, shape, spec.dtype)
                IRBuilder.name(spec.name + "_nd", buffer)
                tensors.append((spec, buffer, shape))
            with T.sblock(name):
                # Declared, not detected: the body reaches the tensors through flat views.
                regions = [b[tuple(slice(0, d) for d in s)] for _, b, s in tensors]
                T.reads(*regions[: len(inputs)])
                T.writes(*regions[len(inputs) :])
                flat = {}
                for spec, buffer, shape in tensors:
                    total: Any = i64(1)
                    for dim in shape:
                        total = total * dim
                    view = T.decl_buffer((total,), spec.dtype, data=buffer.data)
                    IRBuilder.name(spec.name, view)
                    flat[spec.name] = view
                body(flat, sizes)
    return builder.get()
