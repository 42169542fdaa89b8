"""Rotary PrimFuncs: read by structure, written out as tables and operators, numbers kept."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (bfloat16 for numpy)
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relax_llm_passes import report
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.fusion.expand_rotary import ExpandRotaryKernels
from relax_llm_passes.patterns.rotary import RotaryMatch, find_rotary
from relax_llm_passes.patterns.rotary_primfunc import RotaryKernel, find_rotary_primfunc
from relax_llm_passes.report import Refusal
from relax_llm_passes.sampling import numpy_dtype
from relax_llm_passes.targets import parse_target
from tests.kernels.attention_reference import rotate

TARGET = parse_target("native")
H, K, D = 4, 2, 8
# Rounded once from float32 arithmetic on values up to about 4; sines of float32 angles.
TOLERANCE = {"float32": 2e-6, "float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}


def prim(
    style: str = "half", width: int = D, *, dtype: str = "float32", factor: float = 1.0,
    scale: float = 1.0, batched: bool = False, sign: int = 1, swap: bool = False,
    by_head: bool = False, gap: int = 0, second_angle: bool = False,
) -> tirx.PrimFunc:  # fmt: skip
    """Split of packed heads and rotation of q and k, as one PrimFunc over all heads."""
    size = tirx.Var("rows", "int64")
    lead = [tirx.Var("batch", "int64")] if batched else []
    qkv = tirx.decl_buffer([*lead, size, H + 2 * K, D], dtype, name="qkv")
    places = tirx.decl_buffer([size], "int32", name="places")
    outs = [tirx.decl_buffer([*lead, size, n, D], dtype, name=f"o{i}") for i, n in
            enumerate((H, K, K))]  # fmt: skip

    def f32(x: Any) -> Any:
        return x if str(x.ty.dtype) == "float32" else tirx.Cast("float32", x)

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("anything")
        T.func_attr({"tirx.noalias": True})
        for name, one in (("a", qkv), ("b", places), ("c", outs[0]), ("d", outs[1]),
                          ("e", outs[2])):  # fmt: skip
            T.arg(name, one)
        shape = [*lead, size, tirx.IntImm("int64", H + 2 * K), tirx.IntImm("int64", D)]
        with T.grid(*shape) as loops, T.sblock("x"):
            index = [T.axis.spatial(n, v) for n, v in zip(shape, loops, strict=True)]
            *front, s, h, d = index
            T.reads()
            T.writes()

            def value(second: bool) -> Any:
                half = width // 2
                number = tirx.floormod(d, half) if style == "half" else tirx.floordiv(d, 2)
                exponent = tirx.Cast("float32", number) / tirx.FloatImm("float32", half)
                base = tirx.FloatImm("float32", 10000.0)
                place = tirx.Cast("float32", places[s]) * tirx.FloatImm("float32", scale)
                if by_head:
                    place = place + tirx.Cast("float32", h)
                if second and second_angle:
                    place = place + tirx.FloatImm("float32", 1.0)
                angle = place / tirx.call_intrin("float32", "tirx.pow", base, exponent)
                if style == "half":
                    low, up, down = d < half, d + half + gap, d - half - gap
                else:
                    low, up, down = tirx.floormod(d, 2) < 1, d + 1, d - 1
                minus = tirx.FloatImm("float32", -float(sign))
                plus = tirx.FloatImm("float32", float(sign))
                other = tirx.if_then_else(
                    low, f32(qkv[(*front, s, h, up)]) * minus, f32(qkv[(*front, s, h, down)]) * plus
                )
                cos, sin = tirx.cos(angle), tirx.sin(angle)
                if swap:
                    cos, sin = sin, cos
                size_of = tirx.FloatImm("float32", factor)
                new = f32(qkv[(*front, s, h, d)]) * (cos * size_of) + other * (sin * size_of)
                new = new if dtype == "float32" else tirx.Cast(dtype, new)
                if width == D:
                    return new
                return tirx.if_then_else(d < width, new, qkv[(*front, s, h, d)])

            with T.If(h < H):
                with T.Then():
                    T.buffer_store(outs[0], value(False), [*front, s, h, d])
                with T.Else():
                    with T.If(h < H + K):
                        with T.Then():
                            T.buffer_store(outs[1], value(True), [*front, s, h - H, d])
                        with T.Else():
                            plain = qkv[(*front, s, h, d)]
                            T.buffer_store(outs[2], plain, [*front, s, h - H - K, d])
    return builder.get()


def module(func: tirx.PrimFunc, dtype: str, batched: bool, calls: int = 1) -> tvm.IRModule:
    size = tirx.Var("n", "int64")
    lead = [tirx.Var("b", "int64")] if batched else []
    types = [relax.TensorType([*lead, size, n, D], dtype) for n in (H, K, K)]
    qkv = relax.Var("qkv", relax.TensorType([*lead, size, H + 2 * K, D], dtype))
    places = relax.Var("places", relax.TensorType([size], "int32"))
    bb = relax.BlockBuilder()
    gvar = bb.add_func(func, "kernel")
    with bb.function("main", [qkv, places]):
        with bb.dataflow():
            results = []
            for _ in range(calls):
                found = bb.emit(relax.call_tir(gvar, [qkv, places], types))
                results += [bb.emit(relax.TupleGetItem(found, i)) for i in range(3)]
            out = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(out)
    return bb.get()


def expand(mod: tvm.IRModule) -> tuple[tvm.IRModule, Any]:
    with report.collect() as found, TARGET:
        new = ExpandRotaryKernels()(mod)
    relax.analysis.well_formed(new)
    return new, found


@pytest.mark.parametrize(
    ("options", "style", "width"),
    [
        (dict(), "half", 8),
        (dict(style="interleaved"), "interleaved", 8),
        (dict(width=4, dtype="float16"), "half", 4),
        (dict(style="interleaved", width=6, dtype="bfloat16", factor=1.25), "interleaved", 6),
        (dict(batched=True, scale=0.25), "half", 8),
    ],
)
def test_numbers_are_those_of_the_rotation(options: dict, style: str, width: int) -> None:
    dtype, batched = options.get("dtype", "float32"), options.get("batched", False)
    mod = module(prim(**options), dtype, batched)
    new, found = expand(mod)
    assert found.matched()["rotary"] == 1 and not found.refused()
    assert "kernel" not in [g.name_hint for g in new.functions]
    assert tvm_ffi.structural_equal(new["main"].ret_ty, mod["main"].ret_ty, map_free_vars=True)
    matches = [m for m in find_rotary(FunctionView(new, "main")) if isinstance(m, RotaryMatch)]
    assert [(m.rotary.style, m.rotary.rotary_dim) for m in matches] == [(style, width)] * 2
    rng = np.random.default_rng(0)
    shape = (*([3] if batched else []), 5, H + 2 * K, D)
    qkv = rng.standard_normal(shape).astype(numpy_dtype(dtype))
    places = np.array([7, 0, 11, 3, 100], "int32")
    vm = relax.VirtualMachine(tvm.compile(new, target=TARGET), tvm.cpu())
    got = [x.numpy() for x in vm["main"](tvm.runtime.tensor(qkv), tvm.runtime.tensor(places))]
    steps = (10000.0 ** (-np.arange(width // 2) * 2.0 / width)).astype("float32")
    angles = places[:, None] * np.float32(options.get("scale", 1.0)) * steps
    factor = options.get("factor", 1.0)
    cos, sin = (f(angles.astype("float64")) * factor for f in (np.cos, np.sin))
    heads = np.moveaxis(qkv.reshape(-1, 5, H + 2 * K, D), 1, 2)
    want = np.moveaxis(rotate(heads, cos, sin, style), 2, 1)
    parts = [want[:, :, :H], want[:, :, H : H + K], qkv.reshape(-1, 5, H + 2 * K, D)[:, :, H + K :]]
    for one, expected in zip(got, parts, strict=True):
        error = np.abs(one.reshape(expected.shape).astype("float64") - expected).max()
        # Angles up to 100 are off by half a unit of 2^-17 in float32, pow by a few units more.
        assert error <= TOLERANCE[dtype] + 5e-5


def test_layers_with_the_same_positions_share_their_tables() -> None:
    new, found = expand(module(prim(), "float32", False, calls=3))
    assert found.matched()["rotary"] == 3
    view = FunctionView(new, "main")
    assert sum(view.call(b.var, "relax.call_tir") is not None for b in view.bindings) == 2
    again, _ = expand(new)
    assert tvm_ffi.structural_equal(again, new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sign=-1), "no rotary"),
        (dict(gap=1, width=6), "depth 0"),
        (dict(swap=True), "not turned as x * cos"),
        (dict(by_head=True), "depends on the head"),
        (dict(second_angle=True), "more than one angle"),
    ],
)
def test_near_misses_are_refused(options: dict, message: str) -> None:
    mod = module(prim(**options), "float32", False)
    new, found = expand(mod)
    assert tvm_ffi.structural_equal(new, mod)
    (refusal,) = found.refused()
    assert isinstance(refusal, Refusal) and message in refusal.reason
    assert refusal.function == "kernel"


def test_other_primfuncs_are_none_of_it() -> None:
    buffer = tirx.decl_buffer([4], "float32", name="x")
    out = tirx.decl_buffer([4], "float32", name="y")
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("copy")
        T.arg("x", buffer)
        T.arg("y", out)
        with T.grid(tirx.IntImm("int64", 4)) as i, T.sblock("y"):
            v = T.axis.spatial(tirx.IntImm("int64", 4), i)
            T.reads(buffer[v])
            T.writes(out[v])
            T.buffer_store(out, buffer[v], [v])
    assert find_rotary_primfunc(builder.get()) is None
    assert isinstance(find_rotary_primfunc(prim()), RotaryKernel)
