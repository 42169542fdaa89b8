"""Targets in every spelling."""

from __future__ import annotations

import pytest
import tvm
from tvm.target import Target

import relax_llm_passes as rlp
from relax_llm_passes.errors import InputError
from relax_llm_passes.targets import (
    attribute,
    num_threads,
    parse_target,
    split_libraries,
    vector_lanes,
)


@pytest.mark.parametrize("spec", ["llvm", {"kind": "llvm"}, '{"kind": "llvm"}', "native"])
def test_llvm(spec):
    assert rlp.parse_target(spec).kind.name == "llvm"


@pytest.mark.parametrize(
    "spec",
    [
        "cuda -arch=sm_90",
        {"kind": "cuda", "arch": "sm_90"},
        '{"kind": "cuda", "arch": "sm_90"}',
        "cuda -arch=sm_90 -max_threads_per_block=1024",
    ],
)
def test_cuda_has_the_limits_that_schedules_read(spec):
    target = rlp.parse_target(spec)
    assert attribute(target, "arch") == "sm_90"
    assert attribute(target, "max_threads_per_block") == 1024
    assert attribute(target, "max_shared_memory_per_block") == 49152
    assert target.host.kind.name == "llvm"


def test_given_limits_are_kept():
    target = rlp.parse_target("cuda -max_shared_memory_per_block=101376 -thread_warp_size=32")
    assert attribute(target, "max_shared_memory_per_block") == 101376


def test_a_target_object_without_limits_is_completed():
    bare = Target({"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm"}})
    assert attribute(rlp.parse_target(bare), "thread_warp_size") == 32
    whole = rlp.parse_target("cuda")
    assert rlp.parse_target(whole).same_as(whole)


def test_tag():
    assert attribute(rlp.parse_target("nvidia/nvidia-h100"), "arch") == "sm_90a"
    with pytest.raises(rlp.InputError):
        rlp.parse_target("nvidia/nvidia-h1000")


def test_current_target():
    with rlp.parse_target("llvm"):
        assert rlp.parse_target().kind.name == "llvm"
        assert rlp.default_pipeline().target.kind.name == "llvm"
    with pytest.raises(rlp.InputError, match="no target"):
        rlp.parse_target()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cudaa", "did you mean 'cuda'"),
        ("vulkan", "Known: cuda, llvm"),
        ({"kind": "opencl"}, "Known: cuda, llvm"),
        ("cuda -arch", "expected -name=value"),
        ("{nonsense", "no JSON"),
        ("", "empty"),
        ("  ,", "empty"),
        ("llvm -no-such-flag=1", "TVM refuses"),
        ({}, "unknown target"),
        (7, "expected text"),
        ("cublas, cuda", "names libraries"),
    ],
)
def test_bad_targets(spec, message):
    with pytest.raises(rlp.InputError, match=message):
        rlp.parse_target(spec)


def test_a_target_object_of_another_kind():
    with pytest.raises(rlp.UnknownNameError, match="vulkan"):
        rlp.parse_target(Target({"kind": "vulkan", "host": {"kind": "llvm"}}))


@pytest.mark.parametrize(
    ("text", "names", "rest"),
    [
        ("cuda", [], "cuda"),
        ("cublas, cuda -arch=sm_90", ["cublas"], "cuda -arch=sm_90"),
        ("a,b,llvm", ["a", "b"], "llvm"),
        ("llvm -mattr=+avx2,+fma", [], "llvm -mattr=+avx2,+fma"),
        ("a, llvm -mattr=+avx2,-fma", ["a"], "llvm -mattr=+avx2,-fma"),
        ('{"kind": "cuda", "arch": "sm_80"}', [], '{"kind": "cuda", "arch": "sm_80"}'),
    ],
)
def test_libraries_before_the_target(text, names, rest):
    assert split_libraries(text) == (names, rest)


def test_unknown_library_and_wrong_target():
    with pytest.raises(rlp.UnknownNameError, match="library 'nolib'"):
        rlp.default_pipeline("nolib, cuda")
    rlp.register_library(rlp.Library("only_gpu_for_a_test", ("cuda",)))
    try:
        with pytest.raises(rlp.InputError, match="works with cuda targets, not with llvm"):
            rlp.default_pipeline("only_gpu_for_a_test, llvm")
    finally:
        from relax_llm_passes import libraries

        del libraries._LIBRARIES["only_gpu_for_a_test"]


def test_vector_lanes_come_from_the_target():
    lanes = {
        cpu: vector_lanes(rlp.parse_target(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}"))
        for cpu in ("x86-64", "haswell", "skylake-avx512")
    }
    assert lanes == {"x86-64": 4, "haswell": 8, "skylake-avx512": 16}
    arm = rlp.parse_target("llvm -mtriple=aarch64-linux-gnu")
    assert vector_lanes(arm) == 4 and vector_lanes(arm, "float16") == 8


def test_number_of_threads():
    assert num_threads(rlp.parse_target("llvm -num-cores=6")) == 6
    assert num_threads(tvm.target.Target({"kind": "llvm"})) >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda -arch=sm_9x", "arch 'sm_9x': expected 'sm_' and a number"),
        ("cuda -arch=90", "arch 90: expected"),
        ("cuda -arch=", "arch ''"),
        ("llvm -mcpu=znver33", "did you mean 'znver3'"),
        ("llvm -mtriple=bogus", "LLVM knows no 'bogus'"),
        ("llvm -num-cores=0", "expected at least 1"),
        ("llvm 'x", "No closing quotation"),
    ],
)
def test_what_would_fail_late_or_crash_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_target(text)


def test_targets_of_other_machines_are_taken() -> None:
    for text in ("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76", "cuda -arch=sm_100a"):
        parse_target(text)
    with pytest.raises(InputError, match="sm_8"):
        parse_target(tvm.target.Target({"kind": "cuda", "arch": "sm_8"}))
