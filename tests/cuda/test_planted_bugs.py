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


def insert(before, text):
    """Put a text behind the first of its places."""
    return lambda s: s.replace(before, before + text, 1)


def without_first_line(pattern):
    return lambda s: re.sub(rf"\n *{pattern}[^\n]*", "", s, count=1)


# case, dtypes, what is done to the source, the kind that must be found
BUGS = {
    "the next block's row": (
        {"layer_norm": ("float32", "float16"), "rms_norm": ("bfloat16",)},
        lambda s: BLOCK.sub(r"(((\1)blockIdx.x) + 1)", s),
        "out-of-bounds",
    ),
    "one row for all blocks": (
        {"softmax": ("float32", "float16"), "rms_norm": ("bfloat16",)},
        last_store_to_row_0,
        "global-race",
    ),
    "a barrier for one warp": (
        {"softmax": ("float32", "float16"), "rms_norm": ("bfloat16",)},
        lambda s: s.replace(BARRIER, f"if (threadIdx.x < 32) {{ {BARRIER} }}", 1),
        "divergent-barrier",
    ),
    "no barrier at all": (
        {"group_norm": ("float32", "float16"), "matmul_tensor_core": ("float16",)},
        lambda s: s.replace(BARRIER, ""),
        "shared-race",
    ),
    "shared memory that nobody wrote": (
        {"gemv": ("float32", "float16", "bfloat16")},
        without_first_line(r"x_shared_ptr\[.*?\] = "),
        "uninitialised-read",
    ),
    "a lane that left before a shuffle": (
        {"gemv": ("float32", "float16")},
        lambda s: s.replace(
            "mask_ptr[0] = __activemask();",
            "if (threadIdx.x == 3) return; mask_ptr[0] = 0xffffffffu;",
        ),
        "warp",
    ),
    "float4 at an odd element": (
        {"gemv": ("float32",)}, insert("*(float4*)(x_shared_ptr + ", "1 + "), "misaligned",
    ),
    "half4 at an odd element": (
        {"gemv": ("float16",)}, insert("*(half4*)(x_shared_ptr + ", "1 + "), "misaligned",
    ),
    "half2 at an odd element": (
        {"gemv": ("float16",)}, insert("*(half2*)(w_ptr + ", "1 + "), "misaligned",
    ),
    "bfloat164 at an odd pair": (
        {"gemv": ("bfloat16",)}, insert("*(nv_bfloat164*)(x_shared_ptr + ", "2 + "), "misaligned",
    ),
    "a pair beyond the weights": (
        {"gemv": ("float16", "bfloat16")},
        lambda s: s.replace("2*)(w_ptr + ", "2*)(w_ptr + 2 + "),
        "out-of-bounds",
    ),
    "a fragment of memory that nobody wrote": (
        {"matmul_tensor_core": ("float16",)},
        without_first_line(r"\*\(half4\*\)\(\(\(half\*\)buf_dyn_shmem_ptr\)"),
        "uninitialised-read",
    ),
    "a fragment beyond dynamic shared memory": (
        {"matmul_tensor_core": ("float16",)},
        lambda s: s.replace("(int64_t)28800)", "(int64_t)40000)"),
        "out-of-bounds",
    ),
    "a fragment for half of a warp": (
        {"matmul_tensor_core": ("float16",)},
        lambda s: s.replace("nvcuda::wmma::mma_s", "if (threadIdx.x < 16) nvcuda::wmma::mma_s"),
        "divergent-warp-operation",
    ),
}  # fmt: skip
PLANTED = [(n, c, d) for n, (cases, _, _) in BUGS.items() for c, ds in cases.items() for d in ds]


@pytest.mark.parametrize("name, case, dtype", PLANTED)
def test_planted_bug_is_found(name, case, dtype, request):
    _, change, kind = BUGS[name]
    if case == "matmul_tensor_core":
        request.getfixturevalue("tensor_intrinsics")
    case = CASES[case]

    def plant(source):
        changed = change(source)
        assert changed != source
        return changed

    install()
    with changed_source(plant):
        executable = compile_case(case, dtype, cuda_target())
    try:
        # Where TVM's own code needs lockstep (see Case.racing), the bug must be found beside it.
        r = run_module(executable, case.inputs(dtype), function="forward", orders=1,
                       strict=False, lockstep=dtype in case.racing)  # fmt: skip
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
