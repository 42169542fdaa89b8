"""TVM's own passes on the graphs of `tests.fuzz_partition`, counted by what became of them.

They run in a process of their own, since some graphs take the process down.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from relax_llm_passes.rewriting import set_function_type
from tests.fuzz_partition import close, patterns_of, public_functions, results
from tests.random_graphs import random_inputs, random_module
from tests.random_patterns import tvm_patterns

# What a message says, and what it is counted as.
_ERRORS = {
    "cyclic dependency": "cyclic dependency",
    "could not be found in any group": "loses a variable",
    "Invalid type: relax.expr.MatchCast": "no match_cast",
    "Do not have a default for relax.expr": "no If, no local function",
}


def upstream_passes(seed: int) -> dict[str, Callable[[tvm.IRModule], tvm.IRModule]]:
    """Return the passes that are counted, with the graph's list of patterns."""
    patterns = tvm_patterns(patterns_of(seed))
    fuse = relax.transform.FuseOpsByPattern(patterns, bind_constants=False)
    merge = relax.transform.MergeCompositeFunctions()
    return {
        "CanonicalizeBindings": relax.transform.CanonicalizeBindings(),
        "FuseOpsByPattern": fuse,
        "MergeCompositeFunctions": lambda mod: merge(fuse(mod)),
        "CombineParallelMatmul": relax.transform.CombineParallelMatmul(),
    }


def with_main(mod: tvm.IRModule) -> tvm.IRModule:
    """Call one public function "main": MergeCompositeFunctions takes no module without."""
    name = public_functions(mod)[0]
    functions = {}
    for gvar, func in mod.functions.items():
        if gvar.name_hint == name and name != "main":
            gvar = tvm.ir.GlobalVar("main")
            func = func.with_attr("global_symbol", "main")
            set_function_type(gvar, func)
        elif gvar.name_hint == "main":
            return mod
        functions[gvar] = func
    return tvm.IRModule(functions)


def upstream_verdict(
    run: Callable[[tvm.IRModule], tvm.IRModule], mod: tvm.IRModule, inputs: Any, expected: Any
) -> str:
    """Return what one of TVM's passes did to a graph: "ok" or what went wrong."""
    try:
        after = run(mod)
    except Exception as error:
        text = str(error)
        return next((name for word, name in _ERRORS.items() if word in text), "error")
    try:
        relax.analysis.well_formed(after)
    except Exception:
        return "ill-formed"
    try:
        found = results(after, inputs)
    except Exception:
        return "does not run"  # reads a value that does not exist yet, or sizes that disagree
    unchanged = all(
        close(found[k][0], v[0]) and len(found[k][1]) == len(v[1]) for k, v in expected.items()
    )
    return "ok" if unchanged else "changed result"


def upstream_worker(first: int, last: int) -> None:
    """Count verdicts for seeds first..last-1; one line of JSON a graph, so a crash shows where."""
    for seed in range(first, last):
        passes = upstream_passes(seed)
        mod = with_main(random_module(seed))
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
        command = [sys.executable, "-m", "tests.fuzz_upstream", str(first), str(last)]
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


if __name__ == "__main__":
    upstream_worker(int(sys.argv[1]), int(sys.argv[2]))
