"""CanonicalizeBindings: what goes, what stays, and that a second run changes nothing."""

# ruff: noqa: F841 - unused bindings in TVMScript are what is tested
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_llm_passes import report
from relax_llm_passes.fusion.canonicalize_bindings import CanonicalizeBindings, canonicalize
from tests.graph_checks import assert_same, assert_signatures_kept, ops, run
from tests.interpreter import Interpreter

RNG = np.random.default_rng(7)


def check(before: tvm.IRModule, expected: tvm.IRModule | None, **counts: int) -> tvm.IRModule:
    """Canonicalize, compare with `expected` (None: unchanged) and with the counts."""
    relax.analysis.well_formed(before)
    found: Counter[str] = Counter()
    after = canonicalize(before, found)
    relax.analysis.well_formed(after)
    assert_signatures_kept(before, after)
    if expected is None:
        assert after.same_as(before)
    else:
        assert_same(after, expected)
    assert canonicalize(after).same_as(after)
    assert dict(found) == counts
    return after


def names(mod: tvm.IRModule, function: str = "main") -> list[str]:
    return [b.var.name for block in mod[function].body.blocks for b in block.bindings]


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


def test_alias_between_matmul_and_add() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                m = R.matmul(x, w)
                m2 = m
                m3 = m2
                a = R.add(m3, x)
                gv = a
                R.output(gv)
            return gv

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                m = R.matmul(x, w)
                gv = R.add(m, x)
                R.output(gv)
            return gv

    after = check(Before, After, variable=3)
    assert names(after) == ["m", "gv"]  # the output keeps the name its user knows


def test_two_outputs_of_one_value_and_aliases_of_outputs() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                lv = R.exp(x)
                first = lv
                second = lv
                R.output(first, second)
            third = second
            return (first, second, third)

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                first = R.exp(x)
                R.output(first)
            return (first, first, first)

    assert names(check(Before, After, variable=3)) == ["first"]


def test_aliases_of_parameters_and_constants_up_to_the_result() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                a = x
                b = a
                k = R.const(2.0, "float32")
                k2 = k
                y = R.multiply(b, k2)
                R.output(b, k2, y)
            out = b
            return (out, k2, y)

    after = check(Before, _constants_expected(), variable=4, constant=1)
    x = random(4)
    for got, want in zip(run(after, x), (x, np.float32(2), 2 * x), strict=True):
        np.testing.assert_array_equal(got, want)


def _constants_expected() -> tvm.IRModule:
    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.multiply(x, R.const(2.0, "float32"))
                R.output(y)
            return (x, R.const(2.0, "float32"), y)

    return After


def test_only_an_alias_is_left() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                gv = x
                R.output(gv)
            return gv

    after = check(Before, canonicalize(Before), variable=1)
    assert len(after["main"].body.blocks) == 0
    x = random(4)
    np.testing.assert_array_equal(run(after, x), x)


def test_across_dataflow_blocks_with_an_impure_call_between() -> None:
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                a = R.exp(x)
                b = R.negative(x)
                t = (a, b)
                R.output(t)
            _ = R.print(format="between")
            with R.dataflow():
                f = t[0]
                g = t[1]
                s = R.add(f, g)
                R.output(s)
            return s

    @I.ir_module
    class After:
        @R.function(pure=False)
        def main(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                a = R.exp(x)
                b = R.negative(x)
                R.output(a, b)
            _ = R.print(format="between")
            with R.dataflow():
                s = R.add(a, b)
                R.output(s)
            return s

    after = check(Before, After, tuple=3)
    x = random(4, 4)
    np.testing.assert_allclose(run(after, x), np.exp(x) - x, rtol=1e-6)


def test_tuples_nested_rebuilt_and_read_whole() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                t = R.split(x, 2, axis=1)
                a = t[0]
                b = t[1]
                again = (a, b)
                inner = (again, x)
                c = inner[0]
                d = c[1]
                whole = R.concat(c, axis=1)
                e = R.add(d, a)
                R.output(whole, e)
            return (whole, e)

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                t = R.split(x, 2, axis=1)
                a = t[0]
                b = t[1]
                whole = R.concat(t, axis=1)
                e = R.add(b, a)
                R.output(whole, e)
            return (whole, e)

    check(Before, After, tuple=4)


def test_match_cast_that_adds_nothing_and_those_that_do() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor("float32", ndim=2)):
            n = T.int64()
            m = T.int64()
            k = T.int64()
            with R.dataflow():
                same = R.match_cast(x, R.Tensor((n, 4), "float32"))
                unused_definition = R.match_cast(y, R.Tensor((m, 4), "float32"))
                check_again = R.match_cast(y, R.Tensor((m, 4), "float32"))
                z = R.match_cast(y, R.Tensor((k, 4), "float32"))
                o = R.zeros(R.shape([m, 4]), "float32")
                p = R.add(same, x)
                R.output(z, o, p)
            return (z, o, p)

    found: Counter[str] = Counter()
    after = canonicalize(Before, found)
    relax.analysis.well_formed(after)
    assert dict(found) == {"match_cast": 1}
    # The cast nothing reads defines m; the next one checks y at run time.
    assert names(after) == ["unused_definition", "check_again", "z", "o", "p"]
    assert canonicalize(after).same_as(after)
    x, y = random(2, 4), random(3, 4)
    z, o, p = run(after, x, y)
    np.testing.assert_array_equal(z, y)
    np.testing.assert_array_equal(o, np.zeros((3, 4), "float32"))
    np.testing.assert_array_equal(p, x + x)


def test_operators_that_return_their_argument() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), s: R.Tensor((4, 4), "float32")):
            n = T.int64()
            with R.dataflow():
                a = R.reshape(x, R.shape([n, 4]))
                b = R.broadcast_to(a, R.shape([n, 4]))
                c = R.permute_dims(b, axes=[0, 1])
                d = R.astype(c, "float32")
                e = R.exp(d)
                # These change something, though the type stays the same.
                f = R.permute_dims(s, axes=[1, 0])
                g = R.permute_dims(s)
                h = R.reshape(x, R.shape([n * 2, 2]))
                i = R.astype(x, "float16")
                R.output(e, f, g, h, i)
            return (e, f, g, h, i)

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), s: R.Tensor((4, 4), "float32")):
            n = T.int64()
            with R.dataflow():
                e = R.exp(x)
                f = R.permute_dims(s, axes=[1, 0])
                g = R.permute_dims(s)
                h = R.reshape(x, R.shape([n * 2, 2]))
                i = R.astype(x, "float16")
                R.output(e, f, g, h, i)
            return (e, f, g, h, i)

    check(Before, After, reshape=1, broadcast_to=1, permute_dims=1, astype=1)


def test_sizes_are_compared_by_value_and_unknown_ones_are_not_equal() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor(("n * 2", 4), "float32"),
            y: R.Tensor("float32", ndim=2),
            z: R.Tensor(("n", 4), "float32"),
        ):
            n = T.int64()
            m = T.int64()
            with R.dataflow():
                a = R.reshape(x, R.shape([n + n, 4]))
                b = R.broadcast_to(y, R.shape([n, 4]))
                p = R.exp(a)
                q = R.exp(b)
                R.output(p, q)
            return (p, q)

    after = canonicalize(Before)
    assert ops(after["main"]) == ["broadcast_to", "exp", "exp"]
    relax.analysis.well_formed(after)


def test_if_branches_and_local_functions() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
            y = R.exp(x)
            y2 = y

            @R.function
            def local(p: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
                p2 = p
                s = R.add(p2, y2)
                s2 = s
                return s2

            alias = local
            if c:
                a = y2
                b = R.add(a, x)
                r = b
            else:
                d = alias(y2)
                r = d
            r2 = r
            return r2

    found: Counter[str] = Counter()
    after = canonicalize(Before, found)
    relax.analysis.well_formed(after)
    assert canonicalize(after).same_as(after)
    assert names(after) == ["y", "local", "r"]
    inner = after["main"].body.blocks[0].bindings[1].value
    assert [b.var.name for b in inner.body.blocks[0].bindings] == ["s"]
    x = random(4)
    for c, want in ((True, np.exp(x) + x), (False, 2 * np.exp(x))):
        # TVM compiles no local function that reads variables around it.
        found_value = Interpreter(after).run("main", [x, np.array(c)])
        np.testing.assert_allclose(found_value, want, rtol=1e-6)


def test_branch_that_is_an_outer_value() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")):
            with R.dataflow():
                lv = R.exp(x)
                y = lv
                R.output(y)
            if c:
                a = y
                r = a
            else:
                b = R.negative(y)
                r = b
            return r

    after = canonicalize(Before)
    relax.analysis.well_formed(after)
    x = random(4)
    np.testing.assert_allclose(run(after, x, np.array(True)), np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(run(after, x, np.array(False)), -np.exp(x), rtol=1e-6)


def test_output_that_nothing_outside_reads_becomes_internal() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                a = R.exp(x)
                b = R.negative(a)
                R.output(a, b)
            return b

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                a = R.exp(x)
                b = R.negative(a)
                R.output(b)
            return b

    check(Before, After)


def test_functions_with_nothing_to_do_are_the_same_objects() -> None:
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True, private=True)
        def prim(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("copy"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v]

        @R.function
        def decode(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                R.output(y)
            return y

        @R.function
        def prefill(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                z = y
                R.output(z)
            return z

    after = canonicalize(Before)
    assert after["decode"].same_as(Before["decode"])
    assert after["prim"].same_as(Before["prim"])
    assert not after["prefill"].same_as(Before["prefill"])
    assert after["prefill"].attrs["global_symbol"] == "prefill"


def test_equal_allocations_and_dead_operators_stay() -> None:
    """Only names go: what looks equal or unused is for other passes to judge."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            a = R.builtin.alloc_tensor(R.shape([4]), "float32", R.prim_value(0))
            b = R.builtin.alloc_tensor(R.shape([4]), "float32", R.prim_value(0))
            dead = R.exp(x)
            return (a, b)

    check(Before, None)


def test_scalars_stay_scalars() -> None:
    """A number that an operator wants as a number is not hidden behind a variable."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            k = R.prim_value(2)
            half = R.full(R.shape([n, 4]), R.const(0.5, "float32"), "float32")
            y = R.strided_slice(x, axes=[0], begin=[0], end=[2])
            s = R.multiply(y, R.const(2.0, "float32"))
            return (s, half, k)

    after = check(Before, canonicalize(Before), constant=1)
    x = random(3, 4)
    s, half, k = run(after, x)
    np.testing.assert_array_equal(s, 2 * x[:2])
    assert half.shape == (3, 4) and k == 2


def test_registered_pass_reports_and_can_be_disabled() -> None:
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                z = y
                R.output(z)
            return z

    sequence = tvm.transform.Sequential([CanonicalizeBindings()])
    with report.collect() as found:
        after = sequence(Before)
    assert_same(after, canonicalize(Before))
    assert dict(found.passes[-1].matched) == {"variable": 1}
    with tvm.transform.PassContext(disabled_pass=["CanonicalizeBindings"]):
        assert sequence(Before).same_as(Before)


@pytest.mark.parametrize("depth", [1, 50])
def test_long_alias_chains(depth: int) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            h = builder.emit(relax.op.exp(x))
            for _ in range(depth):
                h = builder.emit(builder.emit(relax.Tuple([h, x]))[0])
                h = builder.emit(h)
            out = builder.emit_output(h)
        builder.emit_func_output(out)
    after = canonicalize(builder.get())
    relax.analysis.well_formed(after)
    assert ops(after["main"]) == ["exp"]
