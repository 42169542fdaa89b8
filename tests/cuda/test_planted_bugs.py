"""Bugs planted into the CUDA code that TVM generates for its own kernels: each check finds its own.

test_kernels.py shows that the checks are silent on the code as TVM generates it.
"""

import re

import numpy as np
import pytest

from relax_llm_passes.cuda_on_cpu import cuda_target, install, run_cuda_source, run_module
from relax_llm_passes.cuda_on_cpu.nvcc import cuda_sources
from tests.cuda.tvm_kernels import CASES, array, changed_source, compile_case

BARRIER = "__syncthreads();"


BLOCK = re.compile(r"\(\((int|int64_t)\)blockIdx\.x\)")


def last_store_to_row_0(source):
    """Every block stores its result where block 0's belongs."""
    lines = source.splitlines()
    at = max(i for i, line in enumerate(lines) if BLOCK.search(line.partition("] = ")[0])
             and "] = " in line)  # fmt: skip
    left, equals, right = lines[at].partition("] = ")
    lines[at] = BLOCK.sub(r"((\1)0)", left) + equals + right
    return "\n".join(lines)


# case, what is done to the source, the kind that must be found
BUGS = {
    "the next block's row": (
        "layer_norm",
        lambda s: BLOCK.sub(r"(((\1)blockIdx.x) + 1)", s),
        "out-of-bounds",
    ),
    "one row for all blocks": ("softmax", last_store_to_row_0, "global-race"),
    "a barrier for one warp": (
        "softmax",
        lambda s: s.replace(BARRIER, f"if (threadIdx.x < 32) {{ {BARRIER} }}", 1),
        "divergent-barrier",
    ),
    "no barrier at all": ("group_norm", lambda s: s.replace(BARRIER, ""), "shared-race"),
    "shared memory that nobody wrote": (
        "gemv",
        lambda s: re.sub(r"\n *x_shared_ptr\[.*?\] = [^\n]*", "", s),
        "uninitialised-read",
    ),
    "a lane that left before a shuffle": (
        "gemv",
        lambda s: s.replace(
            "mask_ptr[0] = __activemask();",
            "if (threadIdx.x == 3) return; mask_ptr[0] = 0xffffffffu;",
        ),
        "warp",
    ),
    "a vector that starts at an odd element": (
        "gemv",
        lambda s: s.replace("*(float4*)(x_shared_ptr + ", "*(float4*)(x_shared_ptr + 1 + ", 1),
        "misaligned",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name):
    case, change, kind = BUGS[name]
    case = CASES[case]

    def plant(source):
        changed = change(source)
        assert changed != source
        return changed

    install()
    with changed_source(plant):
        executable = compile_case(case, "float32", cuda_target())
    try:
        r = run_module(executable, case.inputs("float32"), function="forward", orders=1,
                       strict=False)  # fmt: skip
        found = {f.kind for f in r.report}
    except Exception as e:  # a launch that a check stopped
        found = {k for k in (kind,) if f"[{k}]" in str(e)}
    assert kind in found


def test_every_barrier_of_softmax_is_needed_or_orders_nothing():
    install()
    (source,) = cuda_sources(compile_case(CASES["softmax"], "float32", cuda_target()))
    x = array((2, 300), "float32")
    arguments = [x * 0, x, np.int64(2)]

    def launch(text, **config):
        return run_cuda_source(text, "softmax_kernel", 2, 256, arguments, **config)

    clean = launch(source)
    assert clean.report == []
    places = [i for i in range(len(source)) if source.startswith(BARRIER, i)]
    assert len(places) == 6
    caught = 0
    for at in places:
        broken = source[:at] + " " * len(BARRIER) + source[at + len(BARRIER) :]
        if any(f.kind == "shared-race" for f in launch(broken).report):
            caught += 1
            continue
        # The barrier after the last use of a buffer orders nothing: the same bits in any order.
        for order, seed in (("descending", 1), ("random", 1), ("random", 2)):
            other = launch(broken, checks=False, order=order, seed=seed)
            for a, b in zip(clean.outputs, other.outputs, strict=True):
                assert np.array_equal(a, b)
    assert caught >= 4
