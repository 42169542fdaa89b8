"""The GEMM recogniser: every spelling with its attributes, every near miss with its reason."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.patterns.gemm import find_gemm, match_gemms
from relax_llm_passes.report import Refusal

from .gemm_cases import ACCEPTED, NEAR_MISSES, PAIRS, Case, Graph, _silu_wide, _t


def _find(mod, copy_shared=False):
    found = match_gemms(FunctionView(mod, "main"), copy_shared)
    matches = [f for f in found if not isinstance(f, Refusal)]
    return matches, [f for f in found if isinstance(f, Refusal)]


def _check(case, region, mod):
    steps = region.attrs["epilogue"]
    got = [s["op"] if isinstance(w, str) else s for s, w in zip(steps, case.steps, strict=True)]
    assert got == case.steps
    for key, value in (case.attrs or {}).items():
        assert region.attrs[key] == value, key
    if case.bindings is not None:
        assert len(region.bindings) == case.bindings
    for role, parameter in case.roles.items():
        assert region.roles[role].same_as(mod["main"].params[parameter])


# A cast to the dtype that the product has already is no step.
FORMS = [
    (c, d)
    for c in ACCEPTED
    for d in ("float32", "float16", "bfloat16")
    if (c.name, d) != ("cast", "float16")
]


@pytest.mark.parametrize("case, dtype", FORMS, ids=lambda p: getattr(p, "name", p))
def test_accepted(case, dtype):
    mod = case.module(dtype)
    matches, refusals = _find(mod)
    assert refusals == []
    assert len(matches) == 1
    _check(case, matches[0].region, mod)
    assert matches[0].copies == []


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda c: c.name)
def test_near_miss(case):
    mod = case.module()
    matches, refusals = _find(mod)
    if case.attrs is None:
        assert matches == []
    else:
        (match,) = matches
        _check(case, match.region, mod)
    if case.refused:
        (refusal,) = refusals
        assert case.refused in refusal.reason
        assert refusal.binding and refusal.function == "main" and refusal.kind == "gemm"


@pytest.mark.parametrize("case, expected", PAIRS, ids=lambda p: getattr(p, "name", ""))
def test_two_products(case, expected):
    matches, refusals = _find(case.module())
    assert refusals == []
    got = [(len(m.region.bindings), [s["op"] for s in m.region.attrs["epilogue"]]) for m in matches]
    assert got == expected
    claimed = [v for m in matches for v in m.region.bindings]
    assert len(claimed) == len(set(claimed)), "no binding belongs to two regions"


def test_wide_silu_of_a_half_product_keeps_its_casts():
    case = Case(
        "silu_wide", [(("n", 24),), ((24, 16),)], lambda g, x, w: _silu_wide(g, g(O.matmul(x, w)))
    )
    (match,), _ = _find(case.module("float16"))
    assert match.region.attrs["epilogue"] == [
        {"op": "cast", "dtype": "float32"},
        {"op": "silu"},
        {"op": "cast", "dtype": "float16"},
    ]


def test_sums_in_a_wider_dtype_are_stated():
    case = Case(
        "wide",
        [(("n", 24),), ((24, 16),)],
        lambda g, x, w: g(O.astype(g(O.matmul(x, w, out_dtype="float32")), "float16")),
    )
    (match,), _ = _find(case.module("float16"))
    assert match.region.attrs["acc_dtype"] == "float32"
    assert match.region.attrs["out_dtype"] == "float16"


def test_int8_with_int32_sums():
    case = Case(
        "int8",
        [(("n", 24), "int8"), ((24, 16), "int8")],
        lambda g, x, w: g(O.matmul(x, w, out_dtype="int32")),
    )
    (match,), refusals = _find(case.module())
    assert refusals == [] and match.region.attrs["acc_dtype"] == "int32"


def _shared_transpose(g: Graph, x, y, w):
    wt = g(_t(w, 1, 0))
    return g(O.matmul(x, wt)), g(O.matmul(y, wt)), wt


SHARED = Case("shared", [(("n", 24),), (("b", 24),), ((16, 24),)], _shared_transpose)


def test_a_shared_transpose_stays_outside_unless_copies_are_allowed():
    mod = SHARED.module()
    matches, _ = _find(mod)
    assert [m.region.attrs["rhs_layout"] for m in matches] == ["KN", "KN"]
    matches, _ = _find(mod, copy_shared=True)
    assert [m.region.attrs["rhs_layout"] for m in matches] == ["NK", "NK"]
    assert [len(m.copies) for m in matches] == [1, 1]
    assert all(m.region.roles["rhs"].same_as(mod["main"].params[2]) for m in matches)


def test_a_dataflow_variable_of_another_block_is_not_reached():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4, 24), "float32"), w: R.Tensor((16, 24), "float32")):
            with R.dataflow():
                w2 = R.add(w, w)
                wt = R.permute_dims(w2)
                R.output(wt)
            y = R.add(x, x)
            with R.dataflow():
                m = R.matmul(y, wt)
                R.output(m)
            return m

    (match,), _ = _find(Mod, copy_shared=True)
    assert match.region.attrs["rhs_layout"] == "KN"
    assert len(match.region.bindings) == 1


def test_find_gemm_is_in_program_order():
    view = FunctionView(SHARED.module(), "main")
    matches = [r for r in find_gemm(view) if not isinstance(r, Refusal)]
    assert [r.outputs["out"].name for r in matches] == [
        b.var.name
        for b in view.bindings
        if getattr(b.value, "op", None) == tvm.ir.Op.get("relax.matmul")
    ]


def quantised(
    n=16,
    k=96,
    bits=4,
    group=32,
    layout="NK",
    zero=7,
    dtype="float16",
    word="uint32",
    spelling=0,
    transpose=True,
):
    """Return a module with a group-quantised product, as exporters write it (several ways)."""
    per_word = int(word.lstrip("uint")) // bits
    full = (n, k) if layout == "NK" else (k, n)
    axis = 1 if layout == "NK" else 0
    cut = lambda d: tuple(-(-s // d) if i == axis else s for i, s in enumerate(full))  # noqa: E731
    mask = (1 << bits) - 1

    def unpack(w, s):
        te = tvm.te

        def at(t, i, j, d):
            return t[i, j // d] if axis == 1 else t[i // d, j]

        def field(i, j):
            pos = (j if axis == 1 else i) % per_word
            value = at(w, i, j, per_word) >> (pos * bits).astype(word)
            return (value & tvm.tirx.const(mask, word)).astype(dtype)

        if spelling == 0:
            return te.compute(
                full,
                lambda i, j: (field(i, j) - tvm.tirx.const(zero, dtype)) * at(s, i, j, group),
                name="dequantize",
            )
        raw = te.compute(full, lambda i, j: field(i, j), name="raw")
        return te.compute(
            full,
            lambda i, j: (
                at(s, i, j, group) * raw[i, j] - at(s, i, j, group) * tvm.tirx.const(zero, dtype)
            ),
            name="scaled",
        )

    bb = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor([tvm.tirx.Var("n", "int64"), k], dtype))
    w = relax.Var("w", R.Tensor(list(cut(per_word)), word))
    s = relax.Var("s", R.Tensor(list(cut(group)), dtype))
    b = relax.Var("b", R.Tensor([n], dtype))
    with bb.function("main", [x, w, s, b]):
        with bb.dataflow():
            weight = bb.emit(bb.call_te(unpack, w, s, primfunc_name_hint="unpack"))
            if transpose:
                weight = bb.emit(O.permute_dims(weight))
            out = bb.emit_output(O.add(bb.emit(O.matmul(x, weight)), b))
        bb.emit_func_output(out)
    return bb.get()


@pytest.mark.parametrize("spelling", [0, 1])
@pytest.mark.parametrize(
    "bits, group, word, layout, zero, k",
    [
        (4, 32, "uint32", "NK", 7, 96),
        (4, 32, "uint32", "KN", 8, 96),
        (3, 40, "uint32", "NK", 3, 120),
        (8, 128, "uint32", "NK", 127, 256),
        (4, 64, "uint8", "KN", 7, 128),
        (2, 16, "uint16", "NK", 1, 48),
        (4, 32, "uint32", "NK", 7, 100),
    ],
)
def test_group_quantised(bits, group, word, layout, zero, k, spelling):
    mod = quantised(
        16, k, bits, group, layout, zero, word=word, spelling=spelling, transpose=layout == "NK"
    )
    (match,), refusals = _find(mod)
    assert refusals == []
    region, params = match.region, mod["main"].params
    assert region.attrs["quant"] == {
        "bits": bits,
        "group": group,
        "scale_dtype": "float16",
        "packed_dtype": word,
        "max_int": zero,
        "layout": layout,
    }
    assert region.attrs["rhs_layout"] == layout
    assert region.roles["rhs_packed"].same_as(params[1])
    assert region.roles["rhs_scale"].same_as(params[2])
    assert "rhs" not in region.roles
    assert [s["op"] for s in region.attrs["epilogue"]] == ["bias"]


def test_packed_along_the_columns_is_refused():
    mod = quantised(96, 96, layout="NK", transpose=False)
    (match,), (refusal,) = _find(mod)
    assert "packed along the columns" in refusal.reason
    assert match.region.attrs["quant"] is None and "rhs" in match.region.roles


def test_a_function_that_only_looks_like_unpacking_is_refused():
    @I.ir_module
    class Mod:
        @T.prim_func(private=True, s_tir=True)
        def unpack(
            w: T.Buffer((16, 4), "uint32"),
            s: T.Buffer((16, 1), "float16"),
            out: T.Buffer((16, 32), "float16"),
        ):
            for i, j in T.grid(16, 32):
                with T.sblock("dequantize"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    # the fields of a word in the other order
                    out[vi, vj] = (
                        T.Cast(
                            "float16",
                            (w[vi, vj // 8] >> T.Cast("uint32", 28 - vj % 8 * 4)) & T.uint32(15),
                        )
                        - T.float16(7)
                    ) * s[vi, vj // 32]

        @R.function
        def main(
            x: R.Tensor((4, 32), "float16"),
            w: R.Tensor((16, 4), "uint32"),
            s: R.Tensor((16, 1), "float16"),
        ):
            cls = Mod
            with R.dataflow():
                d = R.call_tir(cls.unpack, (w, s), R.Tensor((16, 32), "float16"))
                m = R.matmul(x, R.permute_dims(d))
                R.output(m)
            return m

    (match,), (refusal,) = _find(Mod)
    assert "field of a word" in refusal.reason
    assert match.region.attrs["quant"] is None and match.region.attrs["rhs_layout"] == "NK"


def test_the_two_gelus_differ_more_than_the_tolerance():
    from relax_llm_passes.patterns import scalar_function as S

    x = S._SAMPLES
    gap = np.abs(S._gelu_erf(x) - S._gelu_tanh(x)).max()
    assert gap > 20 * 5e-6, "fp32 tolerance must tell them apart by value alone"
