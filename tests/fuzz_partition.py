"""Random graphs through canonicalization, outlining and inlining: `python -m tests.fuzz_partition`.

For each graph: the canonical form, its canonical form again, random regions outlined (from the raw
and from the canonical module, in one or two rounds), and everything inlined back. Checked: no
exception, well formed, same results bit by bit (numpy interpreter, side effects in order), every
region outlined or refused with a reason, canonicalization idempotent, inlining back structurally
equal to the canonical module. Every `--vm`-th graph is also compiled and run by TVM.

Beside it the same graphs go through TVM's CanonicalizeBindings, FuseOpsByPattern and
MergeCompositeFunctions, in a process of their own since those can take the process down.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call, Var
from tvm.relax import Function

from relax_llm_passes.dataflow import FunctionView, is_var, op_name, views
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.outline import Region, inline, outline
from tests.interpreter import Interpreter, equal
from tests.random_graphs import random_inputs, random_module


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


def chains(view: FunctionView, heads: tuple[str, ...], tails: tuple[str, ...]) -> list[list[Var]]:
    """Return matmul with a following elementwise operator, wherever users allow it or not."""
    found = []
    for binding in view.bindings:
        if op_name(binding.value) in heads:
            region = [binding.var]
            for user in view.users(binding.var)[:1]:
                if op_name(user.value) in tails:
                    region.append(user.var)
            found.append(region)
    return found


def random_regions(rng: random.Random, mod: tvm.IRModule, name: str) -> list[Region]:
    """Return regions of one function: connected ones, scattered ones, pattern-like ones."""
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
        if rng.random() < 0.3:
            tails = ("relax.add", "relax.nn.relu", "relax.multiply")
            regions += [Region("gemm", c) for c in chains(view, ("relax.matmul",), tails)]
        for region in regions[first:]:
            decorate(rng, view, region)
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
                regions = random_regions(rng, current, name)
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
        if use_vm and not any(e for _, e in expected.values()) and is_straight(mod):
            check_vm(current, inputs, expected)
            counts["executed by TVM"] += 1


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


# TVM's own passes on the same graphs


def upstream_patterns() -> list[tuple]:
    """Return a list as users write it: products with an epilogue first, then bare ones."""
    from tvm.relax.dpl import is_op, wildcard

    product = is_op("relax.matmul")(wildcard(), wildcard())
    return [
        ("p.matmul_add", is_op("relax.add")(product, wildcard())),
        ("p.matmul_multiply", is_op("relax.multiply")(product, wildcard())),
        ("p.matmul", product),
        ("p.relu", is_op("relax.nn.relu")(wildcard())),
    ]


def upstream_passes() -> dict[str, Callable[[tvm.IRModule], tvm.IRModule]]:
    """Return the passes that are counted."""
    patterns = upstream_patterns()
    fuse = relax.transform.FuseOpsByPattern(patterns, bind_constants=False)
    merge = relax.transform.MergeCompositeFunctions()
    return {
        "CanonicalizeBindings": relax.transform.CanonicalizeBindings(),
        "FuseOpsByPattern": fuse,
        "MergeCompositeFunctions": lambda mod: merge(fuse(mod)),
    }


def upstream_verdict(
    run: Callable[[tvm.IRModule], tvm.IRModule], mod: tvm.IRModule, inputs: Any, expected: Any
) -> str:
    """Return what one of TVM's passes did to a graph: "ok" or what went wrong."""
    try:
        after = run(mod)
    except Exception as error:
        return "cyclic dependency" if "cyclic dependency" in str(error).lower() else "error"
    try:
        relax.analysis.well_formed(after)
    except Exception:
        return "ill-formed"
    try:
        if not same(results(after, inputs), expected):
            return "changed result"
    except Exception:
        return "changed result"
    return "ok"


def upstream_worker(first: int, last: int) -> None:
    """Count verdicts for seeds first..last-1; one line of JSON a graph, so a crash shows where."""
    passes = upstream_passes()
    for seed in range(first, last):
        mod = random_module(seed)
        inputs = {n: random_inputs(mod[n], seed) for n in public_functions(mod)}
        expected = results(mod, inputs)
        line = {"seed": seed}
        for name, run in passes.items():
            print(json.dumps({"seed": seed, "starts": name}), flush=True)
            line[name] = upstream_verdict(run, mod, inputs, expected)
        canonical = passes["CanonicalizeBindings"]
        if line["CanonicalizeBindings"] == "ok":
            once = canonical(mod)
            if not tvm_ffi.structural_equal(once, canonical(once)):
                line["CanonicalizeBindings"] = "second run changes more"
        print(json.dumps(line), flush=True)


def upstream_counts(first: int, last: int) -> dict[str, Counter[str]]:
    """Run `upstream_worker` in processes, starting anew behind a graph that takes one down."""
    counts: dict[str, Counter[str]] = {}
    while first < last:
        command = [sys.executable, "-m", "tests.fuzz_partition", "--worker", str(first), str(last)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        starts: dict[str, Any] = {}
        for text in done.stdout.splitlines():
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            if "starts" in line:
                starts = line
                continue
            starts = {}
            first = line.pop("seed") + 1
            for name, verdict in line.items():
                counts.setdefault(name, Counter())[verdict] += 1
        if first < last and starts:
            counts.setdefault(starts["starts"], Counter())["process died"] += 1
            first = starts["seed"] + 1
        elif first < last:
            raise RuntimeError(f"the worker stopped at seed {first}: {done.stderr[-2000:]}")
    return counts


def seeds(args: argparse.Namespace) -> Iterator[int]:
    """Yield the seeds of a run."""
    return iter(range(args.seed, args.seed + args.graphs))


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer; the exit status is 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vm", type=int, default=2000, help="execute every N-th graph with TVM")
    parser.add_argument("--upstream", type=int, default=None, help="graphs for TVM's own passes")
    parser.add_argument("--stop", type=int, default=5, help="stop after this many failures")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        upstream_worker(*args.worker)
        return 0
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    start = time.perf_counter()
    for seed in seeds(args):
        try:
            check(seed, counts, bool(args.vm) and seed % args.vm == 0)
            counts["graphs"] += 1
        except Exception as error:
            kind = str(error).split(":")[0] if isinstance(error, Failure) else "crash"
            failures[kind] += 1
            print(f"seed {seed}: {error!r}"[:2000], file=sys.stderr)
            if not isinstance(error, Failure):
                traceback.print_exc()
            if sum(failures.values()) >= args.stop:
                break
    seconds = time.perf_counter() - start
    done = counts["graphs"] + sum(failures.values())
    print(f"relax_llm_passes: {done} graphs in {seconds:.1f} s ({done / seconds:.0f}/s)")
    for name in ("canonicalized", "regions", "outlined", "executed by TVM"):
        print(f"  {name}: {counts[name]}")
    print(f"  failures: {dict(failures) or 'none'}")
    wanted = args.graphs if args.upstream is None else args.upstream
    if wanted:
        for name, found in upstream_counts(args.seed, args.seed + wanted).items():
            print(f"TVM {name}: {dict(sorted(found.items()))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
