"""FunctionView: what a value is, where it is, who reads it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_llm_passes.dataflow import (
    FunctionView,
    dtype_of,
    op_name,
    shape_of,
    used_vars,
    views,
)
from relax_llm_passes.errors import InputError, UnknownNameError
from tests.graph_checks import var


@I.ir_module
class Aliases:
    @R.function
    def main(
        x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4, 4), "float32"), c: R.Tensor((), "bool")
    ):
        n = T.int64()
        m = T.int64()
        with R.dataflow():
            a = R.matmul(x, w)
            a2 = a
            t = (a2, w)
            a3 = t[0]
            nested = (t, a3)
            t1 = nested[0]
            w2 = t1[1]
            k = R.const(2.0, "float32")
            k2 = k
            scaled = R.multiply(a3, k2)
            halves = R.split(scaled, 2, axis=1)
            left = halves[0]
            left2 = halves[0]
            cast = R.match_cast(scaled, R.Tensor((n, 4), "float32"))
            R.output(cast, w2, left, left2)
        e = R.match_cast(cast, R.Tensor((m, 4), "float32"))
        if c:
            inside = R.add(e, w2)
            q = inside
        else:
            other = R.multiply(e, e)
            q = other
        pair = (q, cast)
        return pair


@pytest.fixture
def view() -> FunctionView:
    return FunctionView(Aliases, "main")


@pytest.mark.parametrize(
    "name, target",
    [
        ("a2", "a"),
        ("a3", "a"),
        ("t1", "t"),
        ("cast", "scaled"),
        ("a", "a"),
        ("e", "e"),
        ("left", "left"),
    ],
)
def test_resolve(view: FunctionView, name: str, target: str) -> None:
    assert view.resolve(var(Aliases, name)).same_as(var(Aliases, target))


def test_resolve_to_parameter_and_constant(view: FunctionView) -> None:
    assert view.resolve(var(Aliases, "w2")).same_as(Aliases["main"].params[1])
    assert view.constant(var(Aliases, "k2")) == np.float32(2)
    assert view.scalar(var(Aliases, "k2")) == 2.0
    assert view.scalar(var(Aliases, "a")) is None


def test_value_and_call(view: FunctionView) -> None:
    assert op_name(view.value(var(Aliases, "a3"))) == "relax.matmul"
    assert view.call(var(Aliases, "cast"), "relax.multiply") is not None
    assert view.call(var(Aliases, "cast"), "relax.add") is None
    assert view.call(var(Aliases, "cast"), "relax.add", "relax.multiply") is not None
    # A parameter, and a match_cast that adds information, are what they are.
    x = Aliases["main"].params[0]
    assert view.value(x).same_as(x)
    e = var(Aliases, "e")
    assert view.value(e).same_as(e)
    assert isinstance(view.binding(e), relax.MatchCast)


def test_fields(view: FunctionView) -> None:
    fields = view.fields(var(Aliases, "nested"))
    assert fields is not None
    assert fields[0].same_as(var(Aliases, "t")) and fields[1].same_as(var(Aliases, "a"))
    assert view.fields(var(Aliases, "halves")) is None


def test_users_look_through_aliases(view: FunctionView) -> None:
    def users(name: str) -> list[str]:
        return [b.var.name for b in view.users(var(Aliases, name))]

    assert users("a") == ["scaled"]
    assert users("a3") == ["scaled"]
    assert users("scaled") == ["halves", "e", "pair"]  # the tuple is returned whole
    assert users("e") == ["q"]  # both branches of the If read it: one user
    assert users("halves") == ["left", "left2"]
    assert [b.var.name for b in view.users(Aliases["main"].params[1])] == ["a", "q"]


def test_outputs(view: FunctionView) -> None:
    assert view.is_output(var(Aliases, "q"))
    assert view.is_output(var(Aliases, "scaled"))  # inside the returned tuple, under another name
    assert not view.is_output(var(Aliases, "a"))
    assert not view.is_output(var(Aliases, "e"))


def test_places(view: FunctionView) -> None:
    assert [view.bindings[view.index(b.var)].var.name for b in view.bindings[:3]] == ["a"] * 2 + [
        "t"
    ]
    assert view.position(var(Aliases, "a2")) == 1
    assert view.index(Aliases["main"].params[0]) == -1
    assert view.in_dataflow(0) and not view.in_dataflow(len(view.bindings) - 1)
    assert view.block(0) == 0 and view.block(len(view.bindings) - 1) == 1


def test_shapes_and_dtypes(view: FunctionView) -> None:
    shape = view.shape(var(Aliases, "a3"))
    assert shape is not None and shape[1] == 4 and isinstance(shape[1], int)
    assert shape[0].name == "n"  # type: ignore[union-attr]
    assert view.dtype(var(Aliases, "a3")) == "float32"
    assert shape_of(var(Aliases, "t")) is None and dtype_of(var(Aliases, "t")) is None
    assert view.dtype(tvm.tirx.IntImm("int64", 3)) == "int64"


def test_scopes(view: FunctionView) -> None:
    scopes = list(view.scopes())
    assert [len(s.bindings) for s in scopes[1:]] == [1, 1]
    then = scopes[1]
    assert then.parent is view and then.owner is not None and then.owner.var.name == "q"
    # Names of the outer scope are looked through from inside, and users are counted per scope.
    assert then.resolve(var(Aliases, "w2")).same_as(Aliases["main"].params[1])
    assert op_name(then.value(var(Aliases, "a2"))) == "relax.matmul"
    assert [b.var.name for b in then.users(var(Aliases, "e"))] == ["inside"]
    assert {v.name for v in then.free_vars()} == {"e", "w"}


def test_views_yields_every_scope_of_every_relax_function() -> None:
    @I.ir_module
    class Two:
        @T.prim_func(s_tir=True, private=True)
        def prim(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("copy"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v]

        @R.function
        def decode(x: R.Tensor((4,), "float32")):
            return x

        @R.function
        def prefill(x: R.Tensor((4,), "float32")):
            @R.function
            def local(y: R.Tensor((4,), "float32")):
                z = R.add(y, x)
                return z

            r = local(x)
            return r

    found = [(v.name, v.owner.var.name if v.owner else "") for v in views(Two)]
    assert sorted(found) == [("decode", ""), ("prefill", ""), ("prefill", "local")]


def test_rebuilt_tuple_is_the_tuple_and_its_fields_keep_their_names() -> None:
    @I.ir_module
    class Rebuilt:
        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                t = R.split(x, 2, axis=1)
                a = t[0]
                b = t[1]
                again = (a, b)
                swapped = (b, a)
                part = (a,)
                c = again[0]
                R.output(a, b, again, swapped, part, c)
            return (again, swapped, part, c)

    view = FunctionView(Rebuilt, "main")
    assert view.resolve(var(Rebuilt, "again")).same_as(var(Rebuilt, "t"))
    assert view.resolve(var(Rebuilt, "c")).same_as(var(Rebuilt, "a"))
    for name in ("swapped", "part"):
        assert view.resolve(var(Rebuilt, name)).same_as(var(Rebuilt, name))


def test_used_vars_include_sizes_and_leave_out_what_is_bound_inside() -> None:
    @I.ir_module
    class Sizes:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), c: R.Tensor((), "bool")):
            n = T.int64()
            o = R.ones(R.shape([n * 2, 4]), "float32")
            if c:
                i = R.add(x, x)
                q = R.add(i, x)
            else:
                q = x
            return (o, q)

    bindings = FunctionView(Sizes, "main").bindings
    assert [v.name for v in used_vars(bindings[0].value)] == ["n"]
    assert {v.name for v in used_vars(bindings[1].value)} == {"c", "x"} | {
        v.name for v in used_vars(bindings[1].value) if isinstance(v.ty, tvm.ir.PrimType)
    }


def test_errors() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'main'"):
        FunctionView(Aliases, "mian")
    mod = tvm.IRModule({"p": tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0))})
    with pytest.raises(InputError, match="expected a Relax function"):
        FunctionView(mod, "p")


def chain(layers: int) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([1, 4], "float32"))
    w = relax.Var("w", relax.TensorType([4, 4], "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            h = x
            for _ in range(layers):
                m = builder.emit(relax.op.matmul(h, w))
                alias = builder.emit(m)
                h = builder.emit(relax.op.add(builder.emit(relax.op.nn.relu(alias)), alias))
            out = builder.emit_output(h)
        builder.emit_func_output(out)
    return builder.get()


def test_work_is_linear() -> None:
    """Counts bytecode-level work by calls, not time: twice the program, twice the calls."""
    import sys

    def calls(layers: int) -> int:
        mod = chain(layers)
        count = 0

        def note(_frame, event, _arg):  # type: ignore[no-untyped-def]
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            view = FunctionView(mod, "main")
            for binding in view.bindings:
                view.users(binding.var)
        finally:
            sys.setprofile(None)
        return count

    small, large = calls(50), calls(200)
    assert large < 4.4 * small


def test_what_the_result_needs_in_a_long_chain():
    """As deep as a real model, where a recursive walk would not get through."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4], "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            dead = value = bb.emit(relax.op.negative(x))
            unread = []
            for _ in range(3000):
                value = bb.emit(relax.op.add(value, x))
                dead = bb.emit(relax.op.negative(dead))
                unread.append(dead)
            out = bb.emit_output(value)
        bb.emit_func_output(out)
    view = FunctionView(bb.get(), "main")
    first = view.bindings[0].var
    assert view.is_needed(first) and view.is_needed(value) and view.is_needed(out)
    assert not any(view.is_needed(v) for v in unread)
