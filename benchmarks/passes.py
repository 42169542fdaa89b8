"""Time of the graph passes on whole models, beside TVM's: `python -m benchmarks.passes`.

The graphs are the corpus's, with more layers (`benchmarks.deep_graphs`), so that the time per
binding shows whether the passes are linear. Each number is the best of `--repeat`. `--pipeline`
times the whole default pipelines for llvm instead, once each.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable

import tvm
from tvm import relax

from benchmarks.deep_graphs import deepen
from relax_llm_passes import default_pipeline
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.outline import inline

MODELS = ("mpt_hf_decode", "rwkv5_package_decode")
PIPELINES = ("llama_decode:32", "mpt_hf_decode:32", "rwkv4_hf_decode:32", "rwkv5_package_decode:24")


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
    bare = is_op("relax.matmul")(wildcard(), wildcard())
    patterns = [
        ("p.add", is_op("relax.add")(wildcard(), product)),
        ("p.gelu", is_op("relax.nn.gelu")(product)),
        ("p.relu", is_op("relax.nn.relu")(product)),
        ("p.transposed", product),
        ("p.matmul", bare),
    ]
    return relax.transform.FuseOpsByPattern(patterns, bind_constants=False)


def passes(models: list[str], layers: list[int], repeat: int) -> None:
    """Print the table of passes."""
    print("milliseconds; us: microseconds per binding for canonicalize + PartitionGemm")
    print(
        "| graph | layers | bindings | canonicalize | PartitionGemm | products | inline | us "
        "| TVM CanonicalizeBindings | TVM FuseOpsByPattern |"
    )
    print("| --- " + "| ---: " * 9 + "|")
    ours, theirs, their_canonical = (
        PartitionGemm(),
        upstream_fuse(),
        relax.transform.CanonicalizeBindings(),
    )
    for name in models:
        for count in layers:
            mod, function = deepen(name, count)
            bindings = len(FunctionView(mod, function).bindings)
            canonical = canonicalize(mod)
            after = ours(canonical)
            own = [
                best(lambda m=mod: canonicalize(m), repeat),
                best(lambda m=canonical: ours(m), repeat),
                best(lambda m=after: inline(m), repeat),
            ]
            upstream = [best(lambda m=mod: their_canonical(m), repeat)]
            try:
                upstream.append(best(lambda m=canonical: theirs(m), repeat))
                fuse = f"{upstream[1] * 1e3:.1f}"
            except Exception as error:
                fuse = type(error).__name__
            products = len(after.functions) - len(canonical.functions)
            print(
                f"| {name} | {count} | {bindings} | {own[0] * 1e3:.1f} | {own[1] * 1e3:.1f} "
                f"| {products} | {own[2] * 1e3:.1f} | {sum(own[:2]) / bindings * 1e6:.0f} "
                f"| {upstream[0] * 1e3:.1f} | {fuse} |",
                flush=True,
            )


def pipelines(cases: list[str]) -> None:
    """Print the table of whole pipelines."""
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    print("seconds")
    print("| graph | layers | bindings | this package | TVM's default | ratio |")
    print("| --- " + "| ---: " * 5 + "|")
    for case in cases:
        name, _, layers = case.partition(":")
        mod, function = deepen(name, int(layers or 32))
        bindings = len(FunctionView(mod, function).bindings)
        times = []
        for pipeline in (default_pipeline(target), relax.get_default_pipeline(target)):
            gc.collect()
            start = time.perf_counter()
            with target, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pipeline(mod)
            times.append(time.perf_counter() - start)
        print(
            f"| {name} | {layers} | {bindings} | {times[0]:.2f} | {times[1]:.2f} "
            f"| {times[1] / times[0]:.1f} |",
            flush=True,
        )


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 24, 32, 64])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pipeline", nargs="*", metavar="GRAPH:LAYERS", help="whole pipelines")
    args = parser.parse_args()
    if args.pipeline is not None:
        pipelines(args.pipeline or list(PIPELINES))
    else:
        passes(args.models, args.layers, args.repeat)


if __name__ == "__main__":
    main()
