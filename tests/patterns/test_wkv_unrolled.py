"""Tokens of an unrolled recurrence as one kernel: RWKV-4, 5, 6, 7, as importers leave them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.lower import composites
from relax_llm_passes.patterns.wkv import find_wkv

from ..kernels.norm_cases import CPU, CUDA, NUMPY, cuda_pipeline, kernels, relative_error, run_cpu
from .test_group_norm import module
from .test_wkv import (
    BONUS,
    DELTA,
    H,
    N,
    bonus_reference,
    bonus_step,
    delta_reference,
    delta_step,
    fuse,
)

op = relax.op
B, T = 2, 4
C = H * N
FIXED = ("u", "state")
# One rounding of the output type, and for float32 the sums of N products in another order.
BOUND = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


# How importers write: tensors (B, T, C), a slice per token, a write of a slice per output.


def scatter(bb, outs, shape, axis):
    """`out[:, t] = y` as the torch importer spells it."""
    result = bb.emit(op.zeros(shape, outs[0].ty.dtype))
    count = [1] * len(shape)
    count[axis] = shape[axis]
    for t, out in enumerate(outs):
        counter = bb.emit(op.reshape(bb.emit(op.arange(0, shape[axis], 1, "int64")), count))
        here = bb.emit(op.equal(counter, relax.const(t, "int64")))
        wide = bb.emit(op.broadcast_to(bb.emit(op.expand_dims(out, axis)), shape))
        result = bb.emit(op.where(here, wide, result))
    return result


def concat(bb, outs, shape, axis):
    return bb.emit(op.concat([bb.emit(op.expand_dims(o, axis)) for o in outs], axis))


def stack(bb, outs, shape, axis):
    return bb.emit(op.stack(outs, axis))


def separate(bb, outs, shape, axis):
    return outs


COLLECT = {"scatter": scatter, "concat": concat, "stack": stack, "separate": separate}


def take_token(bb, x, t, place):
    """Token t of (B, T, C) as a row or column per head."""
    part = bb.emit(op.take(x, relax.const(t, "int64"), axis=1))
    return bb.emit(op.reshape(part, (B, H, *place)))


def slice_token(bb, x, t, place):
    """The same through a permuted view and a slice."""
    heads = bb.emit(op.reshape(x, (B, T, H, N)))
    turned = bb.emit(op.permute_dims(heads, [0, 2, 1, 3]))
    part = bb.emit(op.strided_slice(turned, [2], [t], [t + 1]))
    return bb.emit(op.reshape(part, (B, H, *place)))


def matrix_module(step, spec, collect, token=take_token, dtype="float32", **other):
    """T tokens of RWKV-5/6 or 7 over (B, T, C) tensors in `dtype`, the state in float32."""
    given = {n: ((B, T, C), dtype) for n in spec if n not in FIXED}
    if "u" in spec:
        given["u"] = ((H, N), dtype)
    given["state"] = ((B, H, N, N), "float32")
    given |= other

    def body(bb, state, **x):
        wide = {n: bb.emit(op.astype(v, "float32")) if dtype != "float32" else v
                for n, v in x.items() if n not in other}  # fmt: skip
        outs = []
        for t in range(T):
            now = {n: token(bb, v, t, spec[n]) for n, v in wide.items() if n not in FIXED}
            if "u" in wide:
                now["u"] = bb.emit(op.reshape(wide["u"], (H, *spec["u"])))
            out, state = step(bb, state=state, **now)
            outs.append(bb.emit(op.reshape(out, (B, C))))
        result = collect(bb, outs, (B, T, C), 1)
        return [*result, state] if isinstance(result, list) else [result, state]

    return given, module(given, body)


def draw(given, seed=0):
    rng = np.random.default_rng(seed)
    out = {}
    for name, (shape, dtype) in given.items():
        x = rng.standard_normal(shape) * 0.5
        if name == "w":
            x = np.exp(-np.exp(x))
        out[name] = x.astype(NUMPY[dtype])
    return out


def matrix_reference(reference, spec, arrays):
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    state, outs = wide.pop("state"), []
    for t in range(T):
        now = {}
        for n, a in wide.items():
            part = a if n == "u" else a[:, t]
            now[n] = part.reshape(*([H] if n == "u" else [B, H]), *spec[n])
        out, state = reference(*[now[n] for n in spec if n != "state"], state)
        outs.append(out.reshape(B, C))
    return outs, state


def check(found, outs, state, bound):
    joined = found[:-1]
    wanted = [np.stack(outs, 1)] if len(joined) == 1 else outs
    for got, want in zip(joined, wanted, strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want) < bound
    assert relative_error(found[-1], state) < BOUND["float32"]


FORMS = {
    "bonus": (bonus_step, BONUS, bonus_reference),
    "delta": (delta_step, DELTA, delta_reference),
}


@pytest.mark.parametrize(
    "form, collect, token, dtype",
    [
        ("bonus", "scatter", take_token, "float32"),
        ("bonus", "stack", slice_token, "float16"),
        ("delta", "scatter", slice_token, "bfloat16"),
        ("delta", "concat", take_token, "float32"),
        ("bonus", "separate", take_token, "float32"),
    ],
)
def test_all_tokens_are_one_kernel(form, collect, token, dtype):
    step, spec, reference = FORMS[form]
    given, mod = matrix_module(step, spec, COLLECT[collect], token, dtype)
    fused, lowered, _ = fuse(mod, CPU)
    (composite,) = composites(fused).values()
    assert composite.attrs["tokens"] == T
    # Slices, casts, permutations and writes are in the kernel: it reads the tensors themselves.
    call = fused["main"].body.blocks[0].bindings[0].value
    assert {a.name for a in call.args} == set(given)
    assert len(kernels(lowered)) == 1
    arrays = draw(given)
    check(run_cpu(lowered, list(arrays.values())), *matrix_reference(reference, spec, arrays),
          BOUND["float32"])  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("form, dtype", [("bonus", "float32"), ("delta", "float16")])
def test_all_tokens_are_one_launch_on_cuda(form, dtype):
    step, spec, reference = FORMS[form]
    given, mod = matrix_module(step, spec, scatter, slice_token, dtype)
    _, lowered, _ = fuse(mod, CUDA)
    arrays = draw(given)
    result = run_module(
        lowered, list(arrays.values()), CUDA, relax_pipeline=cuda_pipeline(), orders=1
    )
    assert len(result.stats) == 1
    # The state is read once and written once, however many tokens there are.
    assert result.stats[0].global_written == arrays["state"].nbytes + B * T * C * 4
    check(result.outputs, *matrix_reference(reference, spec, arrays), BOUND["float32"])


def test_small_arithmetic_before_the_recurrence_joins_it():
    """RWKV-6's decay exp(-exp(.)) of every token and RWKV-7's -kk and kk * a."""

    def step(bb, r, k, v, w, u, state):
        w = bb.emit(op.exp(bb.emit(op.negative(bb.emit(op.exp(w))))))
        return bonus_step(bb, r, k, v, w, u, state)

    given, mod = matrix_module(step, BONUS, scatter)
    _, lowered, _ = fuse(mod, CPU)
    assert len(kernels(lowered)) == 1
    arrays = draw(given)
    arrays["w"] = np.log(-np.log(arrays["w"]))
    spelled = {**arrays, "w": np.exp(-np.exp(arrays["w"].astype(np.float64)))}
    check(run_cpu(lowered, list(arrays.values())),
          *matrix_reference(bonus_reference, BONUS, spelled), BOUND["float32"])  # fmt: skip


def test_a_state_that_is_read_between_tokens_splits_the_chain():
    step, spec, reference = FORMS["bonus"]
    kept = []

    def remember(bb, **x):
        out, state = step(bb, **x)
        kept.append(state)
        return out, state

    def collect(bb, outs, shape, axis):
        return [*outs, kept[1]]

    given, mod = matrix_module(remember, spec, collect)
    fused, lowered, _ = fuse(mod, CPU)
    assert sorted(c.attrs["tokens"] for c in composites(fused).values()) == [2, 2]
    arrays = draw(given)
    outs, state = matrix_reference(reference, spec, arrays)
    found = run_cpu(lowered, list(arrays.values()))
    for got, want in zip([*found[:T], found[-1]], [*outs, state], strict=True):
        assert relative_error(got, want) < BOUND["float32"]


def test_tokens_in_another_order_are_no_loop():
    """k of the last two tokens swapped: refused with the reason, left as single tokens."""
    order = {2: 3, 3: 2}

    def token(bb, x, t, place):
        return take_token(bb, x, order.get(t, t) if x.name == "k" else t, place)

    _, mod = matrix_module(bonus_step, BONUS, stack, token)
    found = find_wkv(FunctionView(mod, "main"))
    reasons = [r.reason for r in found if not r]
    assert len(reasons) == 1 and "does not move evenly" in reasons[0]
    assert [r.attrs["tokens"] for r in found if r] == [1] * T


def test_outputs_written_twice_are_not_collected():
    """A slice that is written over again must not come from the first write."""

    def twice(bb, outs, shape, axis):
        return scatter(bb, [outs[0], outs[1], outs[2], outs[0]], shape, axis)

    given, mod = matrix_module(bonus_step, BONUS, lambda *a: [twice(*a), *a[1]])
    fused, lowered, _ = fuse(mod, CPU)
    (composite,) = composites(fused).values()
    assert composite.attrs["out_at"] is None
    arrays = draw(given)
    outs, state = matrix_reference(bonus_reference, BONUS, arrays)
    found = run_cpu(lowered, list(arrays.values()))
    wanted = [np.stack([outs[0], outs[1], outs[2], outs[0]], 1), *outs, state]
    for got, want in zip(found, wanted, strict=True):
        assert relative_error(got, want) < BOUND["float32"]


def test_prefill_equals_decode_steps():
    step, spec, _ = FORMS["delta"]
    given, mod = matrix_module(step, spec, scatter)
    _, lowered, _ = fuse(mod, CPU)
    arrays = draw(given)
    out, state = run_cpu(lowered, list(arrays.values()))
    one_given = {n: ((B, H, *s), "float32") for n, s in spec.items()}
    one = module(one_given, lambda bb, **x: list(step(bb, **x)))
    decode = compiled(fuse(one, CPU)[1])
    now = arrays["state"]
    for t in range(T):
        token = [arrays[n][:, t].reshape(B, H, *s) for n, s in spec.items() if n != "state"]
        y, now = decode([*token, now])
        # The same arithmetic in the same order, but for how a compiler contracts it.
        assert relative_error(y.reshape(B, C), out[:, t].astype(np.float64)) < 3e-7
    assert relative_error(now, state.astype(np.float64)) < 3e-7


def compiled(mod):
    from relax_llm_passes.finish import finalize_passes

    pipeline = tvm.transform.Sequential([relax.transform.LegalizeOps(), *finalize_passes(CPU)])
    machine = relax.VirtualMachine(tvm.compile(mod, CPU, relax_pipeline=pipeline), tvm.cpu())
    return lambda arrays: [
        r.numpy()
        for r in machine["main"](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays])
    ]


# RWKV-4


def softmax_step(bb, k, v, w, u, num, den, peak, swap=False, once=False, exposed=None):
    """One token; `swap` turns operands round, `once` computes u + k and peak + w once."""

    def pair(f, a, b):
        return bb.emit(f(b, a) if swap else f(a, b))

    def e(a, b):
        return bb.emit(op.exp(bb.emit(op.subtract(a, b))))

    x = pair(op.add, u, k)
    q = pair(op.maximum, peak, x)
    a, b = e(peak, q), e(x if once else pair(op.add, u, k), q)
    if exposed is not None:
        exposed.append(a)
    top = pair(op.add, pair(op.multiply, a, num), pair(op.multiply, b, v))
    out = bb.emit(op.divide(top, pair(op.add, pair(op.multiply, a, den), b)))
    y = pair(op.add, peak, w)
    p = pair(op.maximum, y, k)
    c, d = e(y if once else pair(op.add, peak, w), p), e(k, p)
    num = pair(op.add, pair(op.multiply, c, num), pair(op.multiply, d, v))
    return out, num, pair(op.add, pair(op.multiply, c, den), d), p


def softmax_reference(k, v, w, u, num, den, peak):
    q = np.maximum(peak, u + k)
    a, b = np.exp(peak - q), np.exp(u + k - q)
    out = (a * num + b * v) / (a * den + b)
    p = np.maximum(peak + w, k)
    c, d = np.exp(peak + w - p), np.exp(k - p)
    return out, c * num + d * v, c * den + d, p


def softmax_case(tokens, dtype="float32", width=40, **how):
    """`tokens` tokens over (B, T, C) tensors; states are layers 1 of (B, C, 3) tensors."""
    given = {"k": ((B, tokens, width), dtype), "v": ((B, tokens, width), dtype)}
    given |= {"decay": ((width,), "float32"), "u": ((width,), "float32")}
    given |= {n: ((B, width, 3), "float32") for n in ("num", "den", "peak")}

    def body(bb, k, v, decay, u, num, den, peak):
        w = bb.emit(op.negative(bb.emit(op.exp(decay))))
        if dtype != "float32":
            k, v = bb.emit(op.astype(k, "float32")), bb.emit(op.astype(v, "float32"))
        one = relax.const(1, "int64")
        states = [bb.emit(op.take(s, one, axis=2)) for s in (num, den, peak)]
        outs = []
        for t in range(tokens):
            at = relax.const(t, "int64")
            now = [bb.emit(op.take(x, at, axis=1)) for x in (k, v)]
            out, *states = softmax_step(bb, *now, w, u, *states, **how)
            outs.append(out)
        return [scatter(bb, outs, (B, tokens, width), 1), *states]

    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal(s) * 2 for n, (s, _) in given.items()}
    arrays["den"] = np.exp(arrays["den"])
    # As a sequence starts: no sums, and a peak far below anything.
    arrays["num"][:, ::3], arrays["den"][:, ::3], arrays["peak"][:, ::3] = 0, 0, -1e38
    arrays = {n: a.astype(NUMPY[given[n][1]]) for n, a in arrays.items()}
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    states = [wide[n][:, :, 1] for n in ("num", "den", "peak")]
    outs = []
    for t in range(tokens):
        out, *states = softmax_reference(
            wide["k"][:, t], wide["v"][:, t], -np.exp(wide["decay"]), wide["u"], *states
        )
        outs.append(out)
    return given, module(given, body), arrays, [np.stack(outs, 1), *states]


@pytest.mark.parametrize(
    "tokens, dtype, how",
    [
        (1, "float32", {}),
        (1, "bfloat16", {"swap": True}),
        (5, "float32", {"once": True}),
        (5, "float16", {"swap": True, "once": True}),
    ],
)
def test_rwkv4_is_one_kernel(tokens, dtype, how):
    _, mod, arrays, wanted = softmax_case(tokens, dtype, **how)
    fused, lowered, _ = fuse(mod, CPU)
    (composite,) = composites(fused).values()
    assert composite.attrs["form"] == "softmax" and composite.attrs["tokens"] == tokens
    assert len(kernels(lowered)) == 1
    for got, want in zip(run_cpu(lowered, list(arrays.values())), wanted, strict=True):
        assert got.shape == want.shape
        # The polynomial for exp is good to 2e-7; a few of them meet in each result.
        assert relative_error(got, want) < BOUND["float32"]


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_rwkv4_is_one_launch_on_cuda():
    _, mod, arrays, wanted = softmax_case(3)
    _, lowered, _ = fuse(mod, CUDA)
    result = run_module(
        lowered, list(arrays.values()), CUDA, relax_pipeline=cuda_pipeline(), orders=1
    )
    assert len(result.stats) == 1
    for got, want in zip(result.outputs, wanted, strict=True):
        assert relative_error(got, want) < BOUND["float32"]


def near_miss(change):
    names = ("k", "v", "w", "u", "num", "den", "peak")
    given = {n: ((B, 8), "float32") for n in names}
    return module(given, lambda bb, **x: list(change(bb, **x)))


def test_rwkv4_with_another_maximum_is_refused():
    """The new peak is taken over the bonus too: another recurrence."""

    def change(bb, k, v, w, u, num, den, peak):
        def e(a, b):
            return bb.emit(op.exp(bb.emit(op.subtract(a, b))))

        x = bb.emit(op.add(u, k))
        q = bb.emit(op.maximum(peak, x))
        a, b = e(peak, q), e(x, q)
        top = bb.emit(op.add(bb.emit(op.multiply(a, num)), bb.emit(op.multiply(b, v))))
        bottom = bb.emit(op.add(bb.emit(op.multiply(a, den)), b))
        return bb.emit(op.divide(top, bottom)), top, bottom, q

    found = find_wkv(FunctionView(near_miss(change), "main"))
    assert found and not any(found)
    assert "running sums" in found[0].reason


def test_rwkv4_with_an_exponential_that_is_returned_is_refused():
    def change(bb, **x):
        exposed = []
        return [*softmax_step(bb, **x, exposed=exposed), *exposed]

    found = find_wkv(FunctionView(near_miss(change), "main"))
    assert found and not any(found)
    assert "is returned" in found[0].reason


def test_plain_softmax_and_averages_are_left_alone():
    def body(bb, x, y):
        e = bb.emit(op.exp(bb.emit(op.subtract(x, y))))
        return bb.emit(op.divide(e, bb.emit(op.add(e, y))))

    given = {"x": ((B, 8), "float32"), "y": ((B, 8), "float32")}
    assert find_wkv(FunctionView(module(given, body), "main")) == []
