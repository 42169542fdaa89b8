"""Outlining and inlining: form, order, refusals with reasons, and the way back."""

# ruff: noqa: F841 - unused bindings in TVMScript are part of what is tested

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_llm_passes.errors import UnknownNameError
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.outline import Region, inline, outline
from tests.graph_checks import (
    assert_same,
    composites,
    ops,
    outlined,
    region,
    run,
    var,
)
from tests.interpreter import Interpreter, equal

RNG = np.random.default_rng(11)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


@I.ir_module
class Diamond:
    """matmul and add with two ways between them: a cycle when outlined without relu."""

    @R.function
    def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            m = R.matmul(x, w)
            r = R.nn.relu(m)
            t = R.tanh(r)
            a = R.add(m, t)
            other = R.exp(x)
            R.output(a, other)
        return (a, other)


@I.ir_module
class Founding:
    """The alias between a product and its bias, as importers leave it."""

    @R.function
    def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            m = R.matmul(x, w)
            m2 = m
            a = R.add(m2, x)
            gv = a
            R.output(gv)
        return gv


def test_form_of_a_composite() -> None:
    mod = Founding
    x, w = mod["main"].params
    wanted = region(
        mod,
        "m a",
        roles={"rhs": w, "lhs": x},
        outputs={"out": var(mod, "gv")},
        attrs={"out_dtype": "float32", "epilogue": [{"op": "bias"}]},
    )
    after, refusals = outlined(mod, wanted)
    assert refusals == []
    assert ops(after["main"]) == ["gemm"]
    (func,) = composites(after).values()
    assert func.attrs["Composite"] == "relax_llm.gemm"
    assert json.loads(func.attrs["relax_llm.roles"]) == {"rhs": 0, "lhs": 1}
    assert json.loads(func.attrs["relax_llm.outputs"]) == ["out"]
    assert json.loads(func.attrs["relax_llm.attrs"])["epilogue"] == [{"op": "bias"}]
    assert "global_symbol" not in func.attrs  # private
    assert [p.name for p in func.params] == ["w", "x"]  # in the order of the roles
    assert ops(func) == ["matmul", "add"]
    # The alias between the two is gone, the output has the name its user knows.
    (binding,) = (b for block in after["main"].body.blocks for b in block.bindings)
    assert binding.var.name == "gv"
    a, b = random(4, 4), random(4, 4)
    np.testing.assert_allclose(run(after, a, b), run(mod, a, b), rtol=1e-6)


@pytest.mark.parametrize("names", ["m a", "m r a", "m t a"])
def test_a_value_that_leaves_and_comes_back(names: str) -> None:
    after, (refusal,) = outlined(Diamond, region(Diamond, names))
    assert after.same_as(Diamond)
    assert "comes back" in refusal.reason and " -> " in refusal.reason
    assert (refusal.kind, refusal.function, refusal.binding) == ("gemm", "main", "m")


@pytest.mark.parametrize("names", ["m", "m r", "m r t", "m r t a", "r t", "t a", "m r t a other"])
def test_a_value_that_leaves_is_no_reason_to_refuse(names: str) -> None:
    after, refusals = outlined(Diamond, region(Diamond, names))
    assert refusals == []
    x, w = random(4, 4), random(4, 4)
    for got, want in zip(run(after, x, w), run(Diamond, x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_two_regions_that_close_a_cycle_only_together() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                a = R.exp(x)
                b = R.negative(x)
                c = R.tanh(a)
                d = R.sin(b)
                R.output(c, d)
            return (c, d)

    # {a, d} needs b before it and c after it; {b, c} needs a before it and d after it.
    first, second = region(Mod, "a d", kind="one"), region(Mod, "b c", kind="two")
    after, (refusal,) = outlined(Mod, first, second)
    assert list(composites(after)) == ["one"] and refusal.kind == "two"
    second.priority = 1
    after, (refusal,) = outlined(Mod, first, second)
    assert list(composites(after)) == ["two"] and refusal.kind == "one"
    for alone in (first, second):
        assert outlined(Mod, alone)[1] == []


def test_overlap_is_resolved_by_priority_then_size_then_position() -> None:
    def kinds(*regions: Region) -> list[str]:
        after, refusals = outlined(Diamond, *regions)
        assert all("belongs to a" in r.reason for r in refusals)
        return [f.attrs["Composite"].removeprefix("relax_llm.") for f in composites(after).values()]

    small = region(Diamond, "m", kind="small")
    large = region(Diamond, "m r t", kind="large")
    late = region(Diamond, "t a", kind="late")
    assert kinds(small, large) == ["large"] == kinds(large, small)
    assert kinds(small, large, late) == ["large"]
    assert kinds(small, late) == kinds(late, small) == ["small", "late"]
    small.priority = 1
    assert kinds(large, small) == ["small"]
    twins = [region(Diamond, "m r", kind=k) for k in ("first", "second")]
    assert kinds(*twins) == ["first"]


def test_interleaved_bindings_move_only_as_far_as_needed_and_come_back() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                q = R.matmul(x, w)
                user = R.exp(q)
                apart = R.negative(x)
                needed = R.tanh(x)
                k = R.matmul(needed, w)
                R.output(q, user, apart, k)
            return (q, user, apart, k)

    after, refusals = outlined(Mod, region(Mod, "q k"))
    assert refusals == []
    assert sorted(ops(after["main"])) == sorted(["negative", "tanh", "gemm", "exp"])
    assert ops(after["main"]).index("tanh") < ops(after["main"]).index("gemm")
    assert ops(after["main"]).index("gemm") < ops(after["main"]).index("exp")
    assert_same(inline(after), Mod)  # order and all
    assert "relax_llm.order" not in inline(after)["main"].attrs


def test_the_note_on_order_goes_even_when_nothing_is_left_to_inline() -> None:
    alone = tvm.IRModule({"main": Diamond["main"].with_attr("relax_llm.order", "[]")})
    assert "relax_llm.order" in alone["main"].attrs
    assert "relax_llm.order" not in inline(alone)["main"].attrs


def test_pattern_anchored_outputs_that_are_unused_or_used_twice() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 6), "float32")):
            n = T.int64()
            with R.dataflow():
                qkv = R.split(x, 3, axis=1)
                q = qkv[0]
                k = qkv[1]
                v = qkv[2]
                rq = R.tanh(q)
                rk = R.tanh(k)
                s = R.add(rq, rk)
                u = R.multiply(q, s)
                R.output(s, u)
            return (s, u)

    named = {"q": var(Mod, "rq"), "k": var(Mod, "rk"), "v": var(Mod, "v")}
    after, (refusal,) = outlined(Mod, region(Mod, "qkv q k v rq rk", outputs=named))
    assert refusal.reason.startswith("q is read outside")  # the unrotated q
    named["raw_q"] = var(Mod, "q")
    after, refusals = outlined(Mod, region(Mod, "qkv q k v rq rk", outputs=named))
    assert refusals == []
    (func,) = composites(after).values()
    assert json.loads(func.attrs["relax_llm.outputs"]) == ["q", "k", "v", "raw_q"]
    assert len(func.ret_ty.fields) == 4  # v too, though nothing reads it
    x = random(3, 6)
    for got, want in zip(run(after, x), run(Mod, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_same_value_in_two_roles_and_constants_bound_or_passed() -> None:
    weight = relax.const(random(4, 4))
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4, 4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            m = builder.emit(relax.op.matmul(x, x))
            p = builder.emit(relax.op.matmul(m, weight))
            out = builder.emit_output(relax.op.multiply(p, relax.const(2.0)))
        builder.emit_func_output(out)
    mod = builder.get()
    names = [b.var for b in mod["main"].body.blocks[0].bindings]
    x = mod["main"].params[0]
    after, refusals = outlined(
        mod,
        Region("square", names[:1], {"lhs": x, "rhs": x}),
        Region("scaled", names[1:], {"lhs": names[0], "rhs": weight}),
    )
    assert refusals == []
    found = composites(after)
    assert json.loads(found["square"].attrs["relax_llm.roles"]) == {"lhs": 0, "rhs": 0}
    assert len(found["square"].params) == 1
    assert json.loads(found["scaled"].attrs["relax_llm.roles"]) == {"lhs": 0, "rhs": 1}
    assert [p.name for p in found["scaled"].params] == ["lv", "rhs"]  # the 2.0 stays inside
    data = random(4, 4)
    np.testing.assert_allclose(run(after, data), run(mod, data), rtol=1e-5)


def test_one_value_under_two_output_names() -> None:
    named = {"first": var(Founding, "a"), "second": var(Founding, "gv")}
    after, refusals = outlined(Founding, region(Founding, "m a", outputs=named))
    assert refusals == []
    (func,) = composites(after).values()
    assert json.loads(func.attrs["relax_llm.outputs"]) == ["first", "second"]
    x, w = random(4, 4), random(4, 4)
    np.testing.assert_allclose(run(after, x, w), x @ w + x, rtol=1e-5, atol=1e-6)


def test_groups_equal_but_for_their_constants_stay_apart() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit(relax.op.add(x, relax.const(1.0)))
            b = builder.emit(relax.op.add(x, relax.const(2.0)))
            out = builder.emit_output(relax.Tuple([a, b]))
        builder.emit_func_output(out)
    mod = canonicalize(builder.get())
    a, b = (binding.var for binding in mod["main"].body.blocks[0].bindings[:2])
    after, refusals = outlined(mod, Region("add", [a]), Region("add", [b]))
    assert refusals == [] and list(composites(after)) == ["add", "add_1"]
    got = run(after, np.zeros(2, "float32"))
    np.testing.assert_array_equal(got, [[1, 1], [2, 2]])


def test_no_main_several_functions_and_names_that_are_taken() -> None:
    @I.ir_module
    class Mod:
        @R.function(private=True)
        def gemm(x: R.Tensor((4,), "float32")):
            y = R.exp(x)
            return y

        @R.function
        def prefill(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4, 4), "float32")):
            n = T.int64()
            with R.dataflow():
                m = R.matmul(x, w)
                a = R.add(m, x)
                R.output(a)
            return a

        @R.function
        def decode(x: R.Tensor((1, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            cls = Mod
            with R.dataflow():
                m = R.matmul(x, w)
                a = R.add(m, x)
                R.output(a)
            f = R.reshape(a, R.shape([4]))
            e = cls.gemm(f)
            return e

    after, refusals = outlined(Mod, region(Mod, "m a", "prefill"), function="prefill")
    assert refusals == []
    after, refusals = outlined(after, region(after, "m a", "decode"), function="decode")
    assert refusals == []
    assert sorted(composites(after)) == ["gemm_1", "gemm_2"]
    assert_same(inline(after), Mod)
    x, w = random(3, 4), random(4, 4)
    np.testing.assert_allclose(run(after, x, w, function="prefill"), x @ w + x, rtol=1e-5)
    want = np.exp((x[:1] @ w + x[:1])[0])
    np.testing.assert_allclose(run(after, x[:1], w, function="decode"), want, rtol=1e-5)


def test_code_outside_dataflow_blocks_across_blocks_and_impure_calls() -> None:
    @I.ir_module
    class Mod:
        @R.function(pure=False)
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                m = R.matmul(x, w)
                R.output(m)
            a = R.add(m, x)
            with R.dataflow():
                b = R.nn.relu(a)
                inner = R.exp(b)
                R.output(b)
            _ = R.print(format="between")
            c = R.tanh(b)
            d = R.negative(c)
            return d

    after, refusals = outlined(Mod, region(Mod, "m a"), region(Mod, "c d"))
    assert refusals == [] and len(composites(after)) == 2
    assert_same(inline(after), Mod)
    after, refusals = outlined(Mod, region(Mod, "m a b"))
    assert refusals == []
    after, (refusal,) = outlined(Mod, region(Mod, "b c"))
    assert "comes back" in refusal.reason  # through the print, which must stay between
    after, (refusal,) = outlined(Mod, region(Mod, "_ c"))
    assert "side effects" in refusal.reason


def test_sizes_that_the_parameters_do_not_give_are_passed() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n * 2", 4), "float32"), y: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            with R.dataflow():
                e = R.exp(x)
                o = R.ones(R.shape([n, 4]), "float32")
                s = R.concat((e, o), axis=0)
                R.output(s)
            return s

    after, refusals = outlined(Mod, region(Mod, "e o s"))
    assert refusals == []
    (func,) = composites(after).values()
    assert [p.name for p in func.params] == ["x", "sizes"]
    x, y = random(6, 4), random(3, 4)
    want = np.concatenate([np.exp(x), np.ones((3, 4), "float32")])
    np.testing.assert_allclose(run(after, x, y), want, rtol=1e-6)


def test_match_cast_inside_a_region_defines_sizes_for_the_outside() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor("float32", ndim=2), w: R.Tensor((4, 4), "float32")):
            m = T.int64()
            with R.dataflow():
                e = R.exp(x)
                c = R.match_cast(e, R.Tensor((m, 4), "float32"))
                p = R.matmul(c, w)
                a = R.add(p, c)
                z = R.ones(R.shape([m]), "float32")
                R.output(a, z)
            return (a, z)

    # TVM cannot legalize exp of a tensor of unknown size, so the interpreter runs this one.
    args = [random(3, 4), random(4, 4)]
    want = Interpreter(Mod).run("main", args)
    for names in ("e c p", "c p a", "e c", "e c p a", "c", "e c p a z"):
        after, refusals = outlined(Mod, region(Mod, names))
        assert refusals == [], names
        assert_same(inline(after), canonicalize(Mod))
        assert equal(Interpreter(after).run("main", args), want)


def test_regions_inside_branches_and_regions_with_an_if() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float32"),
            w: R.Tensor((4, 4), "float32"),
            c: R.Tensor((), "bool"),
        ):
            n = T.int64()
            y = R.exp(x)
            if c:
                m = R.matmul(y, w)
                a = R.add(m, x)
                q = a
            else:
                t = R.tanh(y)
                u = R.multiply(t, y)
                q = u
            z = R.negative(q)
            return z

    x, w = random(3, 4), random(4, 4)
    cases = [["m a"], ["t u"], ["m a", "t u"], ["y q z"], ["y q", "m a"], ["q z", "t u", "y"]]
    for names in cases:
        after, refusals = outlined(Mod, *[region(Mod, n) for n in names])
        assert refusals == [], names
        assert len(composites(after)) == len(names)
        assert_same(inline(after), canonicalize(Mod))
        for c in (True, False):
            # TVM's memory planning lets one branch use storage that the other allocates, and the
            # process dies in the branch without: the program as it stands cannot be run by it.
            args = [x, w, np.array(c)]
            assert equal(Interpreter(after).run("main", args), Interpreter(Mod).run("main", args))
    mixed = Region("gemm", [var(Mod, "y"), var(Mod, "m")])
    _, (refusal,) = outlined(Mod, mixed)
    assert "several scopes" in refusal.reason


def test_local_functions() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4, 4), "float32")):
            n = T.int64()

            @R.function
            def local(p: R.Tensor(("k", 4), "float32")) -> R.Tensor(("k", 4), "float32"):
                k = T.int64()
                m = R.matmul(p, w)
                s = R.add(m, p)
                return s

            a = local(x)
            b = R.exp(a)
            return b

    args = [random(3, 4), random(4, 4)]
    for names in ("m s", "local a", "local a b", "b"):
        after, refusals = outlined(Mod, region(Mod, names))
        assert refusals == [], names
        assert equal(Interpreter(after).run("main", args), Interpreter(Mod).run("main", args))
    _, (refusal,) = outlined(Mod, region(Mod, "a b"))
    assert "local function" in refusal.reason
    _, (refusal,) = outlined(Mod, region(Mod, "local"))
    assert "local function" in refusal.reason


def test_refusals_name_what_is_wrong() -> None:
    mod = Diamond
    x = mod["main"].params[0]
    stranger = relax.Var("stranger", relax.TensorType([4, 4], "float32"))
    cases = [
        (Region("gemm", []), "no bindings"),
        (Region("gemm", [stranger]), "stranger is not bound in function main"),
        (Region("gemm", [x]), "x is not bound in function main"),
        (region(mod, "m", roles={"lhs": var(mod, "t")}), "role 'lhs' is not read"),
        (region(mod, "m r", roles={"lhs": var(mod, "m")}), "role 'lhs' is computed inside"),
        (region(mod, "m", roles={"lhs": stranger}), "role 'lhs' is not read"),
        (region(mod, "m", roles={"lhs": relax.Tuple([x])}), "role 'lhs' is a Tuple"),
        (region(mod, "m", outputs={"out": var(mod, "a")}), "output 'out' is not computed in"),
        (region(mod, "m r", outputs={"out": var(mod, "r")}), "m is read outside"),
    ]
    for wanted, text in cases:
        after, (refusal,) = outline(mod, "main", [wanted])
        assert after.same_as(mod) and text in refusal.reason, (text, refusal.reason)
    with pytest.raises(UnknownNameError, match="did you mean 'main'"):
        outline(mod, "mian", [])


def test_dead_code_and_regions_of_aliases_only() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                a = x
                b = a
                dead = R.exp(b)
                y = R.negative(b)
                R.output(y)
            return y

    _, (refusal,) = outlined(Mod, region(Mod, "a b"))
    assert "aliases" in refusal.reason
    _, (refusal,) = outlined(Mod, region(Mod, "dead"))
    assert "nothing reads" in refusal.reason
    after, refusals = outlined(Mod, region(Mod, "a b dead y"))
    assert refusals == [] and ops(composites(after)["gemm"]) == ["exp", "negative"]


def test_grown_in_rounds_and_inlined_by_kind() -> None:
    mod = Diamond
    after, _ = outlined(mod, region(mod, "m r", kind="inner"))
    after, refusals = outlined(after, region(after, "inner m r t a", kind="outer"))
    assert refusals == []
    assert ops(after["main"]) == ["outer", "exp"]
    assert ops(composites(after)["outer"])[0] == "inner"
    assert_same(inline(after), mod)
    only_outer = inline(after, ["outer"])
    relax.analysis.well_formed(only_outer)
    assert list(composites(only_outer)) == ["inner"]
    only_inner = inline(after, ["inner"])
    relax.analysis.well_formed(only_inner)
    assert list(composites(only_inner)) == ["outer"]
    assert_same(inline(only_inner), mod)
    assert inline(mod).same_as(mod)


def test_form_for_external_code_generators() -> None:
    @I.ir_module
    class Mod:
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float16"),
            w: R.Tensor((4, 4), "float16"),
            b: R.Tensor((4,), "float16"),
        ):
            n = T.int64()
            with R.dataflow():
                m = R.matmul(x, w)
                a = R.add(m, b)
                R.output(a)
            return a

    x, w, b = Mod["main"].params
    wanted = region(
        Mod,
        "m a",
        roles={"lhs": x, "rhs": w, "bias": b},
        codegen="cublas",
        composite="cublas.matmul_bias",
        name="fused_relax_matmul_relax_add_cublas",
    )
    after, refusals = outline(Mod, "main", [wanted])
    assert refusals == []
    relax.analysis.well_formed(after)
    func = after["fused_relax_matmul_relax_add_cublas"]
    assert func.attrs["Codegen"] == "cublas"
    assert func.attrs["global_symbol"] == "fused_relax_matmul_relax_add_cublas"
    local = func.body.blocks[0].bindings[0].value
    assert local.attrs["Composite"] == "cublas.matmul_bias"
    from tvm.relax.backend import get_patterns_with_prefix
    from tvm.relax.backend.cuda import cublas  # noqa: F401 - registers the patterns

    theirs = relax.transform.FuseOpsByPattern(
        get_patterns_with_prefix("cublas"), bind_constants=False, annotate_codegen=True
    )(Mod)
    theirs_local = theirs["fused_relax_matmul_relax_add_cublas"].body.blocks[0].bindings[0].value
    assert ops(local) == ops(theirs_local)
    assert [str(p.ty) for p in local.params] == [str(p.ty) for p in theirs_local.params]


def test_prim_funcs_and_calls_of_them() -> None:
    @I.ir_module
    class Mod:
        @T.prim_func(s_tir=True, private=True)
        def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            T.func_attr({"tirx.noalias": True})
            for i in range(4):
                with T.sblock("twice"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            cls = Mod
            with R.dataflow():
                a = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((4,), "float32"))
                b = R.exp(a)
                R.output(b)
            return b

    after, refusals = outlined(Mod, region(Mod, "a b"))
    assert refusals == []
    x = random(4)
    np.testing.assert_allclose(run(after, x), np.exp(2 * x), rtol=1e-6)


def test_size_expressions_with_conditions_survive() -> None:
    """TVM's own copying of functions stops on the length of `x[:-1]`."""

    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            with R.dataflow():
                s = R.strided_slice(x, axes=[0], begin=[0], end=[n - 1])
                e = R.exp(s)
                t = R.tanh(e)
                R.output(t)
            return t

    after, refusals = outlined(Mod, region(Mod, "s e"), region(Mod, "t", kind="act"))
    assert refusals == []
    x = random(5, 4)
    np.testing.assert_allclose(run(after, x), np.tanh(np.exp(x[:-1])), rtol=1e-5)


def test_rwkv_decode_binding_names() -> None:
    """`lv2260 = lv2259` between a product and its use, inside a function called decode."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([1, 8], "float32"))
    w = relax.Var("w", relax.TensorType([8, 8], "float32"))
    with builder.function("decode", [x, w]):
        with builder.dataflow():
            h = x
            for _ in range(6):
                product = builder.emit(relax.op.matmul(h, w))
                alias = builder.emit(product)
                act = builder.emit(relax.op.nn.relu(alias))
                h = builder.emit(builder.emit(relax.op.add(act, alias)))
            out = builder.emit_output(h)
        builder.emit_func_output(out)
    mod = builder.get()
    bound = mod["decode"].body.blocks[0].bindings
    found = [
        Region("gemm", [bound[i].var, bound[i + 2].var, bound[i + 3].var]) for i in range(0, 30, 5)
    ]
    after, refusals = outlined(mod, *found, function="decode")
    assert refusals == []
    assert ops(after["decode"]) == [f"gemm{'' if i == 0 else f'_{i}'}" for i in range(6)]
    x, w = random(1, 8) / 4, random(8, 8) / 4
    np.testing.assert_allclose(
        run(after, x, w, function="decode"), run(mod, x, w, function="decode"), rtol=1e-5
    )


def test_outlining_is_deterministic() -> None:
    wanted = [region(Diamond, "m r", kind="a"), region(Diamond, "t a", kind="b")]
    first, _ = outline(Diamond, "main", wanted)
    second, _ = outline(Diamond, "main", wanted)
    assert first.script(show_meta=False) == second.script(show_meta=False)
    assert isinstance(first, tvm.IRModule)
