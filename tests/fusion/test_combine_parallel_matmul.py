"""CombineParallelMatmul: what is combined, what is left alone and why, numbers, cycles."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

from relax_llm_passes import report
from relax_llm_passes.fusion.combine_parallel_matmul import CombineParallelMatmul

from ..fuzz_partition import public_functions, results
from ..graph_checks import assert_signatures_kept, ops, run
from ..interpreter import Interpreter
from ..random_graphs import random_inputs, random_module

F = "float32"
SIZES = {name: tvm.tirx.Var(name, "int64") for name in "nm"}


def tensor(*shape, dtype=F):
    return relax.TensorType([SIZES.get(d, d) for d in shape], dtype)


def module(build, **types):
    """Make a function of one dataflow block from a Python function of a builder and variables."""
    bb = relax.BlockBuilder()
    params = {name: relax.Var(name, ty) for name, ty in types.items()}
    with bb.function("main", list(params.values())):
        with bb.dataflow():
            out = bb.emit_output(relax.Tuple(list(build(bb, **params))))
        bb.emit_func_output(out)
    return bb.get()


def combine(mod, **options):
    """Run the pass and check what holds for every input."""
    with report.collect() as seen:
        new = CombineParallelMatmul(**options)(mod)
    relax.analysis.well_formed(new)
    assert_signatures_kept(mod, new)
    again = CombineParallelMatmul(**options)(new)
    assert tvm_ffi.structural_equal(again, new), "a second run changes nothing"
    if not seen.matched():
        assert new["main"].same_as(mod["main"])
    return new, seen


def refused(mod, reason, **options):
    """Check that nothing is combined, and that every refusal says so."""
    _, seen = combine(mod, **options)
    assert not seen.matched()
    assert seen.refused() and any(reason in r.reason for r in seen.refused()), seen.to_text()


def products(bb, x, *weights, **attrs):
    return [bb.emit(O.matmul(x, w, **attrs)) for w in weights]


def turn(bb, w, axes=None):
    return bb.emit(O.permute_dims(w, axes))


def random_arrays(mod, seed=0, **sizes):
    rng = np.random.default_rng(seed)
    arrays = []
    for param in mod["main"].params:
        shape = [
            int(d.value) if hasattr(d, "value") else sizes[d.name] for d in param.ty.shape.values
        ]
        arrays.append(rng.standard_normal(shape).astype(str(param.ty.dtype.dtype)))
    return arrays


@I.ir_module
class Mixed:
    @R.function
    def main(
        x: R.Tensor(("n", 24), F),
        wq: R.Tensor((24, 10), F),
        wk: R.Tensor((6, 24), F),
        wv: R.Tensor((24, 7), F),
        b: R.Tensor((1,), F),
        c: R.Tensor((1, 7), F),
    ):
        with R.dataflow():
            q = R.matmul(x, wq)
            x2 = x
            t = (x2, q)
            x3 = t[0]
            wkt = R.permute_dims(wk)
            k = R.matmul(x2, wkt)
            kb = R.add(k, b)
            v = R.matmul(R.reshape(x3, R.shape_of(x3)), wv)
            v2 = R.matmul(x3, wv)
            vb = R.add(v2, c)
            R.output(q, kb, v, vb)
        return (q, kb, v, vb)


def test_symbolic_rows_aliases_both_layouts_and_broadcast_biases():
    new, seen = combine(Mixed)
    assert seen.matched() == {"group": 1, "branch": 4}
    assert "concatenated in every call" in seen.to_text()
    assert ops(new["main"]).count("matmul") == 1
    for rows in (1, 5):
        arrays = random_arrays(Mixed, rows, n=rows)
        x, wq, wk, wv, b, c = (a.astype("float64") for a in arrays)
        expected = (x @ wq, x @ wk.T + b, x @ wv, x @ wv + c)
        if rows == 5:
            found = run(new, *arrays)
        else:
            found = Interpreter(new).run("main", arrays)
        for left, right in zip(found, expected, strict=True):
            # Sums of 24 products of size about 1 in fp32.
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_transposed_weights_are_concatenated_as_stored():
    def build(bb, x, g, u):
        return products(bb, x, turn(bb, g), turn(bb, u, [-1, 0]))

    mod = module(build, x=tensor(2, 3, 16), g=tensor(8, 16), u=tensor(5, 16))
    new, seen = combine(mod)
    assert seen.matched()["group"] == 1
    assert ops(new["main"]) == ["concat", "permute_dims", "matmul", "split"]
    arrays = random_arrays(mod)
    x, g, u = (a.astype("float64") for a in arrays)
    for left, right in zip(run(new, *arrays), (x @ g.T, x @ u.T), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_constants_are_concatenated_now(dtype):
    rng = np.random.default_rng(3)
    made = [rng.standard_normal(s) for s in ((8, 4), (3, 8), (8, 5))]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    consts = [relax.const(a.astype(kind), dtype) for a in made]

    def build(bb, x):
        return products(bb, x, consts[0], turn(bb, consts[1]), consts[2])

    new, seen = combine(module(build, x=tensor("n", 8, dtype=dtype)))
    assert seen.matched()["branch"] == 3
    assert not seen.passes[0].notes
    assert ops(new["main"]) == ["matmul", "split"]
    (product,) = [
        b.value
        for block in new["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.matmul"
    ]
    parts = [c.value.numpy() for c in consts]
    joined = np.concatenate([parts[0], parts[1].T, parts[2]], axis=1)
    np.testing.assert_array_equal(product.args[1].value.numpy(), joined)


def test_a_shared_transpose_and_a_transposed_left_operand_stay():
    def build(bb, x, w, u, y):
        xt, wt = turn(bb, x), turn(bb, w)
        return [*products(bb, xt, wt, u), bb.emit(O.matmul(y, wt))]

    mod = module(build, x=tensor(8, 3), w=tensor(4, 8), u=tensor(8, 5), y=tensor(2, 8))
    new, seen = combine(mod)
    assert seen.matched()["branch"] == 2
    assert ops(new["main"]).count("permute_dims") == 3  # x, w for y, w in the group
    _same(mod, new)


def test_dtypes_and_out_dtype_are_kept_apart():
    def build(bb, x, a, b, c, d):
        return [
            *products(bb, x, a, b),
            *products(bb, x, c, d, out_dtype=F),
        ]

    h = "float16"
    weights = {n: tensor(8, i + 2, dtype=h) for i, n in enumerate("abcd")}
    new, seen = combine(module(build, x=tensor(3, 8, dtype=h), **weights))
    assert seen.matched() == {"group": 2, "branch": 4}
    found = [str(f.dtype.dtype) for f in new["main"].ret_ty.fields]
    assert found == [h, h, F, F]


def test_other_out_dtype_is_refused():
    def build(bb, x, a, b):
        return [*products(bb, x, a), *products(bb, x, b, out_dtype=F)]

    h = "float16"
    mod = module(build, x=tensor(3, 8, dtype=h), a=tensor(8, 2, dtype=h), b=tensor(8, 2, dtype=h))
    refused(mod, "have the same block, dtypes")


@pytest.mark.parametrize(
    ("x", "a", "b", "reason"),
    [
        (tensor(8), tensor(8, 4), tensor(8, 4), "left operand has 1 axis"),
        (tensor(3, 8), tensor(8), tensor(8), "right operand has 1 axis"),
        (tensor(3, 8), tensor(8, 4), tensor(8), "right operand has 1 axis"),
        (tensor(2, 3, 8), tensor(2, 8, 4), tensor(2, 8, 4), "batch of matrices (3 axes)"),
        (tensor(3, 8), tensor(8, "m"), tensor(8, "m"), "columns; expected a number"),
        (relax.TensorType(dtype=F, ndim=2), tensor(8, 4), tensor(8, 4), "shape of an operand"),
        (tensor(3, 8), relax.TensorType(dtype=F, ndim=2), tensor(8, 4), "shape of an operand"),
    ],
)
def test_operands_that_are_refused(x, a, b, reason):
    refused(module(lambda bb, x, a, b: products(bb, x, a, b), x=x, a=a, b=b), reason)


def test_identical_products():
    mod = module(lambda bb, x, a: products(bb, x, a, a), x=tensor(3, 8), a=tensor(8, 4))
    refused(mod, "the same product several times")
    types = {"x": tensor(3, 8), "a": tensor(8, 4), "b": tensor(8, 5)}
    new, seen = combine(module(lambda bb, x, a, b: products(bb, x, a, b, a), **types))
    assert seen.matched()["branch"] == 3
    assert str(new["main"].ret_ty.fields[2]) == str(new["main"].ret_ty.fields[0])
    assert "9" in str(new["main"])  # 4 + 5 columns: the repeated weight is there once


def test_min_branches():
    types = {"x": tensor(3, 8), "a": tensor(8, 4), "b": tensor(8, 5)}
    mod = module(lambda bb, x, a, b: products(bb, x, a, b), **types)
    refused(mod, "2 independent products of this operand; expected 3", min_branches=3)
    assert combine(mod)[1].matched()["group"] == 1


def test_a_lonely_product_is_no_near_miss():
    mod = module(lambda bb, x, a: products(bb, x, a), x=tensor(8), a=tensor(8, 4))
    assert not combine(mod)[1].refused()


def test_a_weight_that_depends_on_a_sibling():
    def build(bb, x, a, b):
        q = bb.emit(O.matmul(x, a))
        w = bb.emit(O.tanh(turn(bb, q)))
        return [q, *products(bb, x, w, q, b)]

    # x is square, so that x @ a can be a weight itself.
    mod = module(build, x=tensor(8, 8), a=tensor(8, 8), b=tensor(8, 5))
    new, seen = combine(mod)
    assert seen.matched() == {"group": 2, "branch": 4}  # a with b, then w with q
    _same(mod, new)

    def chain(bb, x, a):
        q = bb.emit(O.matmul(x, a))
        k = bb.emit(O.matmul(x, bb.emit(O.tanh(q))))
        return [bb.emit(O.matmul(x, k))]

    mod = module(chain, x=tensor(8, 8), a=tensor(8, 8))
    refused(mod, "depends on another branch")
    refused(mod, "reads the result of another branch")


def test_two_groups_that_would_need_each_other():
    def build(bb, x, y, a, b):
        x1 = bb.emit(O.matmul(x, a))
        y1 = bb.emit(O.matmul(y, b))
        y2 = bb.emit(O.matmul(y, bb.emit(O.tanh(x1))))
        x2 = bb.emit(O.matmul(x, bb.emit(O.tanh(y1))))
        return [x1, x2, y1, y2]

    mod = module(build, **{n: tensor(4, 4) for n in "xyab"})
    new, seen = combine(mod)
    assert seen.matched()["group"] == 1
    assert any("depends on another branch" in r.reason for r in seen.refused())
    _same(mod, new)


@I.ir_module
class Outside:
    @R.function
    def main(
        x: R.Tensor((3, 8), F),
        a: R.Tensor((8, 4), F),
        b: R.Tensor((8, 4), F),
        c: R.Tensor((), "bool"),
    ):
        p = R.matmul(x, a)
        if c:
            q1 = R.matmul(x, a)
            q2 = R.matmul(x, b)
            r = R.add(q1, q2)
        else:
            r = R.matmul(x, b)
        with R.dataflow():
            s = R.matmul(x, b)
            out = R.add(R.add(r, p), s)
            R.output(out)
        return out


def test_branches_of_control_flow_and_plain_blocks_are_left_alone():
    refused(Outside, "inside an If branch")
    refused(Outside, "not in a dataflow block")


def _same(before, after, seed=0):
    arrays = random_arrays(before, seed)
    left, right = (_flat(Interpreter(m).run("main", arrays)) for m in (before, after))
    for a, b in zip(left, right, strict=True):
        # The same sums, perhaps in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * (1 + _largest(a)))


def _largest(array):
    finite = np.abs(array[np.isfinite(array)]) if array.dtype.kind == "f" else np.zeros(0)
    return float(finite.max(initial=0.0))


def _flat(value):
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _flat(item)]
    return [np.asarray(value)]


def _tangle(seed):
    """Square products of few operands whose weights are parameters or earlier results."""
    rng = random.Random(seed)

    def build(bb, **params):
        values = list(params.values())
        lefts = values[:2]
        for _ in range(rng.randrange(4, 12)):
            weight = rng.choice(values)
            if rng.random() < 0.3:
                weight = turn(bb, weight)
            if rng.random() < 0.3:
                weight = bb.emit(O.tanh(weight))
            left = bb.emit(rng.choice(lefts)) if rng.random() < 0.3 else rng.choice(lefts)
            made = bb.emit(O.matmul(left, weight))
            values.append(bb.emit(O.tanh(made)) if rng.random() < 0.5 else made)
            if rng.random() < 0.3:
                lefts.append(values[-1])
        return values[4:]

    return module(build, **{n: tensor(3, 3) for n in "xyab"})


def test_random_tangles():
    groups = 0
    for seed in range(60):
        mod = _tangle(seed)
        new, seen = combine(mod, min_branches=2 + seed % 2)
        groups += seen.matched()["group"]
        _same(mod, new, seed)
    assert groups > 30


def test_random_programs():
    """If, local functions, several blocks, match_cast, tuples, calls with effects."""
    groups = 0
    for seed in range(60):
        mod = random_module(seed, 80)
        with report.collect() as seen:
            new = CombineParallelMatmul()(mod)
        relax.analysis.well_formed(new)
        assert_signatures_kept(mod, new)
        groups += seen.matched()["group"]
        if new.same_as(mod):
            continue
        inputs = {n: random_inputs(mod[n], seed) for n in public_functions(mod)}
        before, after = results(mod, inputs), results(new, inputs)
        left, right = (_flat(tuple(r.values())) for r in (before, after))
        for a, b in zip(left, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * (1 + _largest(a)))
    assert groups > 2
