"""Time of the graph passes on whole models, beside TVM's: `python -m benchmarks.passes`.

The graphs are made here, with the operators, shapes, aliases and binding counts of MPT-7B decode
(32 layers) and RWKV-5 decode (24 layers, about 90 bindings a layer), at several depths, so that
the time per binding shows whether the passes are linear. Each number is the best of `--repeat`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import tvm
from tvm import relax
from tvm.relax import op

from relax_llm_passes.dataflow import FunctionView, op_name
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.outline import Region, inline, outline


class _Model:
    """A function being built; weights become parameters."""

    def __init__(self, width: int) -> None:
        self.bb = relax.BlockBuilder()
        self.x = relax.Var("x", relax.TensorType([1, 1, width], "float16"))
        self.params: list[relax.Var] = [self.x]

    def weight(self, *shape: int) -> relax.Var:
        var = relax.Var(f"w{len(self.params)}", relax.TensorType(list(shape), "float16"))
        self.params.append(var)
        return var

    def linear(self, x: relax.Expr, rows: int, columns: int) -> relax.Var:
        """A product with a transposed weight, under a second name, as importers leave it."""
        turned = self.bb.emit(op.permute_dims(self.weight(columns, rows)))
        return self.bb.emit(self.bb.emit(op.matmul(x, turned)))


def _finish(model: _Model, body: Callable[[], relax.Expr]) -> tvm.IRModule:
    with model.bb.function("decode"):
        with model.bb.dataflow():
            out = model.bb.emit_output(body())
        model.bb.emit_func_output(out, model.params)
    return model.bb.get()


def mpt(layers: int, width: int = 4096, heads: int = 32, past: int = 512) -> tvm.IRModule:
    """Return a decode step with MPT's operators: fused QKV, ALiBi, LayerNorm, GELU."""
    model, head = _Model(width), width // heads
    emit = model.bb.emit

    def norm(x: relax.Expr) -> relax.Var:
        return emit(op.nn.layer_norm(x, model.weight(width), model.weight(width), axes=[-1]))

    def body() -> relax.Expr:
        h: relax.Expr = model.x
        for _ in range(layers):
            qkv = emit(op.split(model.linear(norm(h), width, 3 * width), 3, axis=2))
            q, k, v = (emit(relax.TupleGetItem(qkv, i)) for i in range(3))
            q, k, v = (emit(op.reshape(t, (1, 1, heads, head))) for t in (q, k, v))
            k = emit(op.concat([model.weight(1, past, heads, head), k], axis=1))
            v = emit(op.concat([model.weight(1, past, heads, head), v], axis=1))
            q, k, v = (emit(op.permute_dims(t, [0, 2, 1, 3])) for t in (q, k, v))
            scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
            scores = emit(op.multiply(scores, relax.const(head**-0.5, "float16")))
            scores = emit(op.add(scores, model.weight(1, heads, 1, past + 1)))
            attended = emit(op.matmul(emit(op.nn.softmax(scores)), v))
            joined = emit(op.reshape(emit(op.permute_dims(attended, [0, 2, 1, 3])), (1, 1, width)))
            h = emit(op.add(h, model.linear(joined, width, width)))
            up = emit(op.nn.gelu(model.linear(norm(h), width, 4 * width)))
            h = emit(op.add(h, model.linear(up, 4 * width, width)))
        return norm(h)

    return _finish(model, body)


def rwkv5(layers: int, width: int = 2048, size: int = 64) -> tvm.IRModule:
    """Return a decode step with RWKV-5's operators: token shift, wkv, group norm, gates."""
    model, heads = _Model(width), width // size
    emit = model.bb.emit

    def norm(x: relax.Expr) -> relax.Var:
        return emit(op.nn.layer_norm(x, model.weight(width), model.weight(width), axes=[-1]))

    def mixed(x: relax.Expr, last: relax.Expr) -> relax.Var:
        mix = model.weight(width)
        left = emit(op.multiply(x, mix))
        rest = emit(op.subtract(relax.const(1.0, "float16"), mix))
        return emit(emit(op.add(left, emit(op.multiply(last, rest)))))

    def body() -> relax.Expr:
        h: relax.Expr = model.x
        for _ in range(layers):
            x, last = norm(h), model.weight(1, 1, width)
            r, k, v, g = (model.linear(mixed(x, last), width, width) for _ in range(4))
            gate = emit(op.nn.silu(g))
            r = emit(op.reshape(r, (heads, 1, size)))
            k = emit(op.reshape(k, (heads, size, 1)))
            v = emit(op.reshape(v, (heads, 1, size)))
            state = model.weight(heads, size, size)
            kv = emit(op.matmul(k, v))
            first = emit(op.multiply(model.weight(heads, size, 1), kv))
            out = emit(op.matmul(r, emit(op.add(first, state))))
            decayed = emit(op.multiply(model.weight(heads, size, 1), state))
            emit(emit(op.add(kv, decayed)))
            flat = emit(op.reshape(out, (1, width)))
            normed = op.nn.group_norm(
                flat, model.weight(width), model.weight(width), heads, 1, [], epsilon=64e-5
            )
            gated = emit(op.multiply(emit(op.reshape(emit(normed), (1, 1, width))), gate))
            h = emit(op.add(h, model.linear(gated, width, width)))
            x, last = norm(h), model.weight(1, 1, width)
            hidden = emit(op.nn.relu(model.linear(mixed(x, last), width, 7 * width // 2)))
            value = model.linear(emit(op.multiply(hidden, hidden)), 7 * width // 2, width)
            gate = emit(op.sigmoid(model.linear(mixed(x, last), width, width)))
            h = emit(op.add(h, emit(op.multiply(gate, value))))
        return norm(h)

    return _finish(model, body)


def regions(mod: tvm.IRModule) -> list[Region]:
    """Return each product with its weight's transpose and the operators that follow it alone."""
    view = FunctionView(mod, "decode")
    found = []
    for binding in view.bindings:
        if op_name(binding.value) != "relax.matmul":
            continue
        members = [binding.var]
        right = binding.value.args[1]
        if view.call(right, "relax.permute_dims") is not None:
            members.append(view.resolve(right))
        last = binding.var
        while len(view.users(last)) == 1 and not view.is_output(last):
            user = view.users(last)[0]
            if op_name(user.value) not in ("relax.add", "relax.nn.gelu", "relax.nn.relu"):
                break
            last = user.var
            members.append(last)
        found.append(Region("gemm", members))
    return found


def best(run: Callable[[], object], repeat: int) -> float:
    """Return the shortest of `repeat` runs, in seconds, with garbage collected in between."""
    times = []
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def upstream_fuse() -> tvm.transform.Pass:
    """Return FuseOpsByPattern with products, their epilogues first."""
    from tvm.relax.dpl import is_op, wildcard

    product = is_op("relax.matmul")(wildcard(), is_op("relax.permute_dims")(wildcard()))
    patterns = [
        ("p.add", is_op("relax.add")(wildcard(), product)),
        ("p.gelu", is_op("relax.nn.gelu")(product)),
        ("p.relu", is_op("relax.nn.relu")(product)),
        ("p.matmul", product),
    ]
    return relax.transform.FuseOpsByPattern(patterns, bind_constants=False)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 24, 32, 64])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    print("milliseconds; us/b: microseconds per binding for canonicalize + recognise + outline")
    print(
        f"{'model':12} {'bindings':>8} {'canonical':>9} {'recognise':>9} {'outline':>8} "
        f"{'inline':>7} {'us/b':>6} | {'TVM canonical':>13} {'TVM fuse':>9}"
    )
    theirs = upstream_fuse()
    for name, make in (("mpt", mpt), ("rwkv5", rwkv5)):
        for layers in args.layers:
            mod = make(layers)
            count = len(FunctionView(mod, "decode").bindings)
            canonical = canonicalize(mod)
            found = regions(canonical)
            after, refusals = outline(canonical, "decode", found)
            assert not refusals, refusals[0]
            ours = [
                best(lambda m=mod: canonicalize(m), args.repeat),
                best(lambda m=canonical: regions(m), args.repeat),
                best(lambda m=canonical, f=found: outline(m, "decode", f), args.repeat),
            ]
            back = best(lambda m=after: inline(m), args.repeat)
            their_canonical = best(
                lambda m=mod: relax.transform.CanonicalizeBindings()(m), args.repeat
            )
            try:
                fuse = f"{best(lambda m=canonical: theirs(m), args.repeat) * 1e3:9.1f}"
            except Exception as error:
                fuse = f"{type(error).__name__:>9}"
            columns = " ".join(
                f"{t * 1e3:{w}.1f}" for t, w in zip([*ours, back], (9, 9, 8, 7), strict=True)
            )
            print(
                f"{name + ' ' + str(layers):12} {count:8} {columns} {sum(ours) / count * 1e6:6.1f} "
                f"| {their_canonical * 1e3:13.1f} {fuse}",
                flush=True,
            )


if __name__ == "__main__":
    main()
