"""Random graphs through canonicalization, outlining and inlining: `python -m tests.fuzz_partition`.

For each graph: the canonical form, its canonical form again, regions outlined (random ones, and
the matches of a random list of patterns, from the raw or from the canonical module, in one or two
rounds), and everything inlined back. Checked: no exception, well formed, same results bit by bit
(numpy interpreter, side effects in order), every region outlined or refused with a reason,
canonicalization idempotent, inlining back structurally equal to the canonical module. Some graphs
also go through PartitionGemm, CombineParallelMatmul, partition_for_cublas and partition_for_cutlass
(these two: well formed, with the attributes that TVM reads). Every `--vm`-th graph is compiled and
run by TVM.

Beside it the same graphs and the same lists of patterns go through TVM's CanonicalizeBindings,
FuseOpsByPattern, MergeCompositeFunctions and CombineParallelMatmul, in a process of their own since
those can take the process down.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call, Var
from tvm.relax import Function

from relax_llm_passes.dataflow import FunctionView, is_var, views
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.fusion.combine_parallel_matmul import CombineParallelMatmul
from relax_llm_passes.fusion.partition_byoc import partition_for_cublas, partition_for_cutlass
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.outline import Region, inline, outline
from tests.interpreter import Interpreter, equal
from tests.random_graphs import random_inputs, random_module
from tests.random_patterns import (
    Pattern,
    pattern_regions,
    random_patterns,
    usual_patterns,
)

DROP_INS = {"cublas": partition_for_cublas, "cutlass": partition_for_cutlass}


def public_functions(mod: tvm.IRModule) -> list[str]:
    """Return the names of the functions that have inputs to be run with."""
    return sorted(
        gv.name_hint
        for gv, f in mod.functions.items()
        if isinstance(f, Function) and "global_symbol" in f.attrs
    )


def results(mod: tvm.IRModule, inputs: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Run every public function and return what it gives, with the side effects it had."""
    found = {}
    for name, args in inputs.items():
        interpreter = Interpreter(mod)
        found[name] = (interpreter.run(name, args), tuple(interpreter.effects))
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two runs gave the same, bit by bit."""
    return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)


# Regions


def grown(rng: random.Random, view: FunctionView, vars_: list[Var]) -> list[Var]:
    """Return a connected region: a binding and some of its users and sources."""
    region = {rng.choice(vars_): None}
    for _ in range(rng.randrange(1, 6)):
        var = rng.choice(list(region))
        near = [b.var for b in view.users(var)]
        row = view.position(view.resolve(var)) if is_var(view.resolve(var)) else -1
        if row >= 0:
            near += [v for v in view.reads(row) if view.position(v) >= 0]
        if near:
            region[rng.choice(near)] = None
    return list(region)


def random_regions(
    rng: random.Random, mod: tvm.IRModule, name: str, patterns: list[Pattern]
) -> list[Region]:
    """Return regions of one function: connected ones, scattered ones, matches of patterns."""
    regions: list[Region] = []
    root = FunctionView(mod, name)
    for view in root.scopes():
        vars_ = [b.var for b in view.bindings]
        if not vars_:
            continue
        first = len(regions)
        for _ in range(rng.choice([0, 1, 2, 4])):
            style = rng.random()
            if style < 0.6:
                found = grown(rng, view, vars_)
            else:
                found = rng.sample(vars_, min(len(vars_), rng.randrange(1, 5)))
            regions.append(Region(rng.choice(["gemm", "rotary", "norm"]), found))
        for region in regions[first:]:
            decorate(rng, view, region)
        if rng.random() < 0.5:
            regions += pattern_regions(view, patterns)
    rng.shuffle(regions)
    return regions


def decorate(rng: random.Random, view: FunctionView, region: Region) -> None:
    """Give a region roles, outputs and a priority now and then."""
    region.priority = rng.choice([0, 0, 0, 1, -1])
    inside = {view.resolve(v) for v in region.bindings if is_var(view.resolve(v))}
    if rng.random() < 0.3:
        for var in region.bindings:
            row = view.position(var)
            value = view.bindings[row].value if row >= 0 else None
            if type(value) is Call:
                for i, arg in enumerate(value.args[:]):
                    found = view.resolve(arg)
                    if not is_var(found) or found not in inside:
                        region.roles.setdefault(f"arg{i}", arg)
    if rng.random() < 0.2:
        region.outputs = {f"o{i}": v for i, v in enumerate(list(region.bindings)[:2])}


# Checks


class Failure(Exception):
    """What a check found."""


def well_formed(mod: tvm.IRModule, what: str) -> None:
    """Raise Failure unless TVM calls the module well formed."""
    try:
        relax.analysis.well_formed(mod)
    except Exception as error:
        raise Failure(f"ill-formed {what}: {str(error)[-300:]}") from error


def check(seed: int, counts: Counter[str], use_vm: bool = False) -> None:
    """Put the graph of a seed through everything; raise Failure for what is wrong."""
    rng = random.Random(seed ^ 0x5EED)
    patterns = patterns_of(seed)
    mod = random_module(seed)
    inputs = {n: random_inputs(mod[n], seed) for n in public_functions(mod)}
    expected = results(mod, inputs)

    canonical = canonicalize(mod)
    well_formed(canonical, "canonical module")
    if not same(results(canonical, inputs), expected):
        raise Failure("canonicalization changed a result")
    if not canonicalize(canonical).same_as(canonical):
        raise Failure("canonicalization is not idempotent")
    if not canonical.same_as(mod):
        counts["canonicalized"] += 1

    # Raw modules and canonical ones take turns: what they can get wrong is not the same.
    for start in (canonical if rng.random() < 0.5 else mod,):
        current = start
        for _ in range(rng.choice([1, 1, 2])):
            for name in public_functions(current):
                regions = random_regions(rng, current, name, patterns)
                before = len(current.functions)
                current, refusals = outline(current, name, regions)
                made = len(current.functions) - before
                counts["regions"] += len(regions)
                counts["outlined"] += made
                if made + len(refusals) != len(regions):
                    raise Failure(f"{len(regions)} regions: {made} outlined, {len(refusals)} not")
                if any(not r.reason for r in refusals):
                    raise Failure("a refusal without a reason")
        well_formed(current, "outlined module")
        if not same(results(current, inputs), expected):
            raise Failure("outlining changed a result")
        back = inline(current)
        well_formed(back, "module inlined back")
        if start is canonical:
            if not tvm_ffi.structural_equal(back, canonical):
                raise Failure("inlining back is not the canonical module")
        else:
            # Aliases are gone wherever something was outlined; no-op operators may remain.
            if not same(results(back, inputs), expected):
                raise Failure("inlining changed a result")
            if not tvm_ffi.structural_equal(canonicalize(back), canonical):
                raise Failure("inlining back and canonicalizing is not the canonical module")
        if rng.random() < 0.25:
            check_passes(start, inputs, expected, counts)
        if use_vm and not any(e for _, e in expected.values()) and is_straight(mod):
            check_vm(current, inputs, expected)
            counts["executed by TVM"] += 1


def check_passes(
    start: tvm.IRModule, inputs: Any, expected: dict[str, Any], counts: Counter[str]
) -> None:
    """Put a module through the registered passes that rest on outlining."""
    after = PartitionGemm()(start)
    well_formed(after, "partitioned module")
    if not same(results(after, inputs), expected):
        raise Failure("PartitionGemm changed a result")
    if not tvm_ffi.structural_equal(PartitionGemm()(after), after):
        raise Failure("PartitionGemm is not idempotent")
    back = inline(after)
    well_formed(back, "partitioned module inlined back")
    if not same(results(back, inputs), expected):
        raise Failure("inlining what PartitionGemm made changed a result")
    counts["partitioned"] += 1
    counts["products outlined"] += len(after.functions) - len(start.functions)
    for library, drop_in in DROP_INS.items():
        offered = drop_in(start)
        well_formed(offered, f"module for {library}")
        for gvar, func in offered.functions_items():
            attrs = func.attrs or {}
            if "Codegen" in attrs and gvar not in start.functions:
                if str(attrs["Codegen"]) != library or "global_symbol" not in attrs:
                    raise Failure(f"{library}: attributes of a wrapper")
                counts[f"products for {library}"] += 1
    combined = CombineParallelMatmul()(start)
    well_formed(combined, "combined module")
    # One product of three weights may sum in another order than three products.
    found = results(combined, inputs)
    if not all(close(found[k][0], expected[k][0]) for k in expected):
        raise Failure("CombineParallelMatmul changed a result")
    counts["combined"] += not combined.same_as(start)


def patterns_of(seed: int) -> list[Pattern]:
    """Return the list of patterns that goes with a graph: as users write them, or random."""
    return usual_patterns() if seed % 2 else random_patterns(random.Random(seed ^ 0xFACADE))


def is_straight(mod: tvm.IRModule) -> bool:
    """Whether TVM can compile and run the module: it fails on If and on local functions."""
    return all(view.parent is None for view in views(mod))


def check_vm(mod: tvm.IRModule, inputs: dict[str, list], expected: dict[str, Any]) -> None:
    """Compile and run the module with TVM's own pipeline, and compare."""
    executable = tvm.compile(mod, target="llvm")
    vm = relax.VirtualMachine(executable, tvm.cpu())
    for name, args in inputs.items():
        found = vm[name](*[tvm.runtime.tensor(a) for a in args])
        if not close(to_numpy(found), expected[name][0]):
            raise Failure(f"TVM's result of {name} changed")


def to_numpy(value: Any) -> Any:
    """Convert what the virtual machine returns."""
    if hasattr(value, "numpy"):
        return value.numpy()
    if isinstance(value, tvm.runtime.ShapeTuple):
        return tuple(int(v) for v in value)
    return tuple(to_numpy(v) for v in value)


def close(left: Any, right: Any) -> bool:
    """Whether results agree: fp32 with a few roundings in sums of four products per matmul."""
    if isinstance(right, tuple):
        return len(left) == len(right) and all(map(close, left, right))
    return bool(np.allclose(left, right, rtol=1e-3, atol=1e-3, equal_nan=True))


def run_seeds(first: int, last: int, vm: int, stop: int) -> tuple[Counter[str], Counter[str]]:
    """Check seeds first..last-1; return what was counted and what failed."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            check(seed, counts, bool(vm) and seed % vm == 0)
            counts["graphs"] += 1
        except Exception as error:
            kind = str(error).split(":")[0] if isinstance(error, Failure) else "crash"
            failures[kind] += 1
            print(f"seed {seed}: {error!r}"[:2000], file=sys.stderr)
            if not isinstance(error, Failure):
                traceback.print_exc()
            if sum(failures.values()) >= stop:
                break
    return counts, failures


def run_jobs(args: argparse.Namespace) -> tuple[Counter[str], Counter[str]]:
    """Check all seeds in `--jobs` processes, a thousand at a time."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    last = args.seed + args.graphs
    starts = range(args.seed, last, 1000)
    context = multiprocessing.get_context("spawn")  # TVM's threads do not survive a fork
    with ProcessPoolExecutor(args.jobs, context) as pool:
        pieces = [
            pool.submit(run_seeds, first, min(first + 1000, last), args.vm, args.stop)
            for first in starts
        ]
        for piece in pieces:
            more, failed = piece.result()
            counts += more
            failures += failed
            print(f"{counts['graphs']} graphs, {sum(failures.values())} failures", file=sys.stderr)
            if sum(failures.values()) >= args.stop:
                pool.shutdown(cancel_futures=True)
                break
    return counts, failures


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer; the exit status is 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vm", type=int, default=2000, help="execute every N-th graph with TVM")
    parser.add_argument("--upstream", type=int, default=None, help="graphs for TVM's own passes")
    parser.add_argument("--stop", type=int, default=5, help="stop after this many failures")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    counts, failures = run_jobs(args)
    seconds = time.perf_counter() - start
    done = counts.pop("graphs", 0) + sum(failures.values())
    print(f"relax_llm_passes: {done} graphs in {seconds:.1f} s ({done / seconds:.0f}/s)")
    for name, count in counts.items():
        print(f"  {name}: {count}")
    print(f"  failures: {dict(failures) or 'none'}", flush=True)
    wanted = args.graphs if args.upstream is None else args.upstream
    if wanted:
        from tests.fuzz_upstream import upstream_counts

        for name, found in upstream_counts(args.seed, args.seed + wanted).items():
            print(f"TVM {name}: {dict(sorted(found.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
