"""Recognising token shift and mixing, and the one kernel that comes of it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax

from relax_llm_passes import report
from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.fusion.token_mix import FuseTokenMix
from relax_llm_passes.lower import LowerComposites, composites
from relax_llm_passes.patterns.token_mix import find_token_mix

from ..kernels.norm_cases import CPU, CUDA, NUMPY, cuda_pipeline, kernels, relative_error, run_cpu
from .test_group_norm import module

op = relax.op
B, T, C, MIXES = 2, 5, 37, 3
# Computed in float32 and rounded once.
BOUND = {"float32": 2e-7, "float16": 6e-4, "bfloat16": 5e-3}


def weighted(bb, x, s, m):
    """x * m + s * (1 - m), as RWKV-4 and 5 write it."""
    rest = bb.emit(op.subtract(relax.const(1, m.ty.dtype), m))
    return bb.emit(op.add(bb.emit(op.multiply(x, m)), bb.emit(op.multiply(s, rest))))


def swapped(bb, x, s, m):
    rest = bb.emit(op.subtract(relax.const(1, m.ty.dtype), m))
    return bb.emit(op.add(bb.emit(op.multiply(rest, s)), bb.emit(op.multiply(m, x))))


def moved(bb, x, s, m, difference=None):
    """x + (s - x) * m, as RWKV-6 and 7 write it."""
    if difference is None:
        difference = bb.emit(op.subtract(s, x))
    return bb.emit(op.add(x, bb.emit(op.multiply(difference, m))))


def joined(bb, x, state):
    """concat((state, x[:-1])) over (T, C)."""
    before = bb.emit(op.strided_slice(x, [0], [0], [-1]))
    return bb.emit(op.concat([bb.emit(op.expand_dims(state, 0)), before], 0))


def padded(bb, x, state):
    """A padded x with the state written into its first row, over (B, T, C)."""
    shape = [int(d) for d in x.ty.shape.values]
    s = bb.emit(op.nn.pad(x, [0, 0, 1, -1, 0, 0]))
    bb.emit(op.take(s, relax.const(0, "int64"), axis=1))  # the importer reads what it writes over
    counter = bb.emit(op.reshape(bb.emit(op.arange(0, shape[1], 1, "int64")), (1, shape[1], 1)))
    first = bb.emit(op.equal(counter, relax.const(0, "int64")))
    wide = bb.emit(op.broadcast_to(bb.emit(op.expand_dims(state, 1)), shape))
    return bb.emit(op.where(first, wide, s))


def fuse(mod, target):
    with target, report.collect():
        fused = FuseTokenMix()(mod)
        relax.analysis.well_formed(fused)
        assert tvm_ffi.structural_equal(FuseTokenMix()(fused), fused)
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    assert tvm_ffi.structural_equal(lowered["main"].ty, mod["main"].ty)
    return fused, lowered


def given_for(shape, state, dtype="float32"):
    given = {"x": (shape, dtype), "state": (state, dtype)}
    return given | {f"m{i}": ((C,), dtype) for i in range(MIXES)}


def draw(given, sizes=None):
    rng = np.random.default_rng(3)
    sizes = sizes or {}
    return {
        n: rng.standard_normal([sizes.get(d, d) for d in shape]).astype(NUMPY[dtype])
        for n, (shape, dtype) in given.items()
    }


def reference(arrays, axis, mix=weighted):
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    x, s = wide["x"], wide["state"]
    if axis is not None:
        first = np.expand_dims(s, axis)
        s = np.concatenate([first, np.take(x, range(x.shape[axis] - 1), axis)], axis)
    if mix is moved:
        x, s = s, x
    return [x * wide[f"m{i}"] + s * (1 - wide[f"m{i}"]) for i in range(MIXES)]


# Spelling, shift, shapes of x and state, token axis, dtype.
CASES = {
    "decode": (weighted, None, (C,), (C,), None, "float32"),
    "decode, a batch": (swapped, None, ("n", C), ("n", C), None, "float16"),
    "decode, difference": (moved, None, (B, 1, C), (B, 1, C), None, "bfloat16"),
    "prefill": (weighted, joined, (T, C), (C,), 0, "float32"),
    "prefill, a batch": (moved, padded, (B, T, C), (B, C), 1, "float32"),
}


def case(name):
    mix, shift, shape, state, axis, dtype = CASES[name]
    given = given_for(shape, state, dtype)

    def body(bb, x, state, **m):
        # x is what a norm would give: the region starts behind it.
        x = bb.emit(op.nn.relu(x))
        s = shift(bb, x, state) if shift else state
        last = bb.emit(op.tanh(x))  # x is read elsewhere too, as the next state
        return [*(mix(bb, x, s, v) for v in m.values()), last]

    arrays = draw(given, {"n": 3})
    relu = {**arrays, "x": np.maximum(arrays["x"], 0)}
    return module(given, body), arrays, reference(relu, axis, mix), BOUND[dtype]


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_on_the_cpu(name):
    mod, arrays, wanted, bound = case(name)
    fused, lowered = fuse(mod, CPU)
    (composite,) = composites(fused).values()
    assert len(composite.outputs) >= MIXES
    assert len(kernels(lowered)) == 1
    found = run_cpu(lowered, list(arrays.values()))
    for got, want in zip(found, wanted, strict=False):
        assert got.shape == want.shape
        assert relative_error(got, want) < bound


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("name", ["decode, a batch", "prefill, a batch"])
def test_each_input_is_read_once_on_cuda(name):
    mix, shift, shape, state, axis, dtype = CASES[name]
    given = given_for(shape, state, dtype)

    def body(bb, x, state, **m):
        s = shift(bb, x, state) if shift else state
        return [mix(bb, x, s, v) for v in m.values()]

    arrays = draw(given, {"n": 3})
    _, lowered = fuse(module(given, body), CUDA)
    result = run_module(
        lowered, list(arrays.values()), CUDA, relax_pipeline=cuda_pipeline(), orders=1
    )
    (stats,) = result.stats
    for got, want in zip(result.outputs, reference(arrays, axis, mix), strict=True):
        assert relative_error(got, want) < BOUND[dtype]
    x = arrays["x"].nbytes
    assert stats.global_written == MIXES * x
    # x and its shifted self, and one m for every element of each blend.
    assert stats.global_read <= (2 + MIXES) * x


def low_rank(bb, x, state, base, m0, m1, w):
    """RWKV-6: one blend, a product of it, and blends whose m the product moves."""
    d = bb.emit(op.subtract(state, x))
    first = moved(bb, x, state, base, d)
    lora = bb.emit(op.reshape(bb.emit(op.matmul(first, w)), (B, 2, C)))
    out = []
    for i, m in enumerate((m0, m1)):
        part = bb.emit(op.strided_slice(lora, [1], [i], [i + 1]))
        part = bb.emit(op.squeeze(part, [1]))
        out.append(moved(bb, x, state, bb.emit(op.add(m, part)), d))
    return out


def test_blends_that_depend_on_a_blend_are_a_second_kernel():
    given = {"x": ((B, C), "float32"), "state": ((B, C), "float32")}
    given |= {n: ((C,), "float32") for n in ("base", "m0", "m1")} | {"w": ((C, 2 * C), "float32")}
    mod = module(given, low_rank)
    fused, lowered = fuse(mod, CPU)
    assert sorted(len(c.outputs) for c in composites(fused).values()) == [2, 2]
    arrays = draw(given)
    arrays["w"] *= 0.2
    a = {n: v.astype(np.float64) for n, v in arrays.items()}
    d = a["state"] - a["x"]
    lora = ((a["x"] + d * a["base"]) @ a["w"]).reshape(B, 2, C)
    wanted = [a["x"] + d * (a[f"m{i}"] + lora[:, i]) for i in range(2)]
    for got, want in zip(run_cpu(lowered, list(arrays.values())), wanted, strict=True):
        assert relative_error(got, want) < 1e-6  # a product of 37 terms is in it


def test_a_padded_copy_that_is_returned_is_loaded_or_refused():
    """The kernel must not look behind a tensor that its composite only receives."""

    def body(bb, x, state, m0, m1, m2):
        copy = bb.emit(op.nn.pad(x, [0, 0, 1, -1, 0, 0]))
        shape = [int(d) for d in x.ty.shape.values]
        counter = bb.emit(op.reshape(bb.emit(op.arange(0, T, 1, "int64")), (1, T, 1)))
        first = bb.emit(op.equal(counter, relax.const(0, "int64")))
        wide = bb.emit(op.broadcast_to(bb.emit(op.expand_dims(state, 1)), shape))
        s = bb.emit(op.where(first, wide, copy))
        return [weighted(bb, x, s, m0), weighted(bb, x, s, m1), copy]

    given = given_for((B, T, C), (B, C))
    mod = module(given, body)
    fused, lowered = fuse(mod, CPU)
    for composite in composites(fused).values():
        assert not any("shift" in str(tree) for tree in composite.attrs["outputs"])
    arrays = draw(given)
    found = run_cpu(lowered, list(arrays.values()))
    for got, want in zip(found[:2], reference(arrays, 1), strict=False):
        assert relative_error(got, want) < BOUND["float32"]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_what_its_composite_says(name):
    """The composite's own body on random inputs, not only the whole program."""
    from relax_llm_passes.lower import implementations
    from relax_llm_passes.verify import check_kernel

    mod = case(name)[0]
    fused, _ = fuse(mod, CPU)
    (composite,) = composites(fused).values()
    assert check_kernel(composite, implementations("token_mix", CPU)[0], CPU) is None


def test_one_blend_is_left_alone():
    given = given_for((C,), (C,))
    mod = module(given, lambda bb, x, state, m0, m1, m2: weighted(bb, x, state, m0))
    assert find_token_mix(FunctionView(mod, "main")) == []


def test_other_sums_are_left_alone():
    def body(bb, x, state, m0, m1, m2):
        def blend(a, b):  # the two weights do not add up to one
            rest = bb.emit(op.subtract(relax.const(1, "float32"), b))
            return bb.emit(op.add(bb.emit(op.multiply(x, a)), bb.emit(op.multiply(state, rest))))

        return [blend(m0, m1), blend(m1, m2)]

    mod = module(given_for((C,), (C,)), body)
    assert find_token_mix(FunctionView(mod, "main")) == []


def test_a_weighted_input_that_is_returned_is_refused_or_kept():
    """x * m0 is a result of the program too: it must still be there, and right."""

    def body(bb, x, state, m0, m1, m2):
        product = bb.emit(op.multiply(x, m0))
        rest = bb.emit(op.subtract(relax.const(1, "float32"), m0))
        blend = bb.emit(op.add(product, bb.emit(op.multiply(state, rest))))
        return [blend, weighted(bb, x, state, m1), product]

    given = given_for((C,), (C,))
    _, lowered = fuse(module(given, body), CPU)
    arrays = draw(given)
    found = run_cpu(lowered, list(arrays.values()))
    wanted = [*reference(arrays, None)[:2], arrays["x"].astype(np.float64) * arrays["m0"]]
    for got, want in zip(found, wanted, strict=True):
        assert relative_error(got, want) < BOUND["float32"]


def test_a_concat_of_something_else_is_no_shift():
    """Two rows of state in front: x moves by two."""

    def body(bb, x, state, m0, m1, m2):
        before = bb.emit(op.strided_slice(x, [0], [0], [-2]))
        s = bb.emit(op.concat([state, before], 0))
        return [weighted(bb, x, s, m) for m in (m0, m1, m2)]

    given = given_for((T, C), (2, C))
    mod = module(given, body)
    (region,) = find_token_mix(FunctionView(mod, "main"))
    assert not any("shift" in str(tree) for tree in region.attrs["outputs"])
    _, lowered = fuse(mod, CPU)
    arrays = draw(given)
    a = {n: v.astype(np.float64) for n, v in arrays.items()}
    s = np.concatenate([a["state"], a["x"][:-2]])
    wanted = [a["x"] * a[f"m{i}"] + s * (1 - a[f"m{i}"]) for i in range(MIXES)]
    for got, want in zip(run_cpu(lowered, list(arrays.values())), wanted, strict=True):
        assert relative_error(got, want) < BOUND["float32"]
