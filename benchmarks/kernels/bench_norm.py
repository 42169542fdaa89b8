"""Norms: this package against TVM's default pipeline and torch, on the CPU; CUDA counters for both.

    pytest benchmarks/kernels/bench_norm.py -k norm            # times on this CPU, one thread
    pytest benchmarks/kernels/bench_norm.py -k counters -s     # what the CUDA kernels do

Every engine's result is compared with float64 before it is timed. Counters come from executing the
generated CUDA code on the CPU: blocks, barriers, lane use and bytes, not times.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.finish import finalize_passes
from relax_llm_passes.fusion.legalize_norms import LegalizeNorms
from relax_llm_passes.targets import parse_target

from .modules import group_norm, layer_norm, rms_norm, softmax

CPU, CUDA = parse_target("native"), parse_target("cuda -arch=sm_90")
CASES = {
    "group_norm_rwkv5_decode": group_norm((1, 1, 2048), 32, -1, []),
    "group_norm_rwkv5_prefill": group_norm((1, 128, 2048), 32, -1, []),
    "group_norm_vae": group_norm((1, 512, 64, 64), 32, 1, [2, 3]),
    "layer_norm_2048": layer_norm((1, 64, 2048)),
    "rms_norm_2048": rms_norm((1, 64, 2048)),
    "softmax_4096": softmax((32, 4096), -1),
    "softmax_axis_1": softmax((1, 8, 16, 64), 1),
}
COUNTED = ["group_norm_rwkv5_16", "group_norm_split", "softmax_4096", "softmax_axis_1"]
CUDA_CASES = {
    "group_norm_rwkv5_16": group_norm((1, 16, 2048), 32, -1, []),
    "group_norm_split": group_norm((1, 128, 32, 32), 8, 1, [2, 3]),
    "softmax_4096": softmax((4, 4096), -1),
    "softmax_axis_1": softmax((1, 8, 16, 64), 1),
}


def passes(engine: str, target: tvm.target.Target) -> tvm.transform.Pass:
    """The pipeline of an engine."""
    if engine == "tvm":
        return relax.get_default_pipeline(target)
    return tvm.transform.Sequential(
        [LegalizeNorms(), relax.transform.LegalizeOps(), *finalize_passes(target)]
    )


@pytest.mark.parametrize("engine", ["tvm", "relax_llm", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_norm(benchmark, name, engine):
    case = CASES[name]
    benchmark.group = name
    arrays = case.arrays()
    if engine == "torch":
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        tensors = [torch.from_numpy(a) for a in arrays]
        function = lambda: case.torch(torch, *tensors)  # noqa: E731
        result = function().numpy()
    else:
        with CPU:
            executable = tvm.compile(case.module, CPU, relax_pipeline=passes(engine, CPU))
        main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        tensors = [tvm.runtime.tensor(a) for a in arrays]
        function = lambda: main(*tensors)  # noqa: E731
        result = function().numpy()
    wanted = case.reference(*[a.astype(np.float64) for a in arrays])
    assert np.abs(result - wanted).max() < 1e-4 * np.abs(wanted).max()
    benchmark.pedantic(function, rounds=30, warmup_rounds=3)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("name", COUNTED)
def test_norm_counters(name):
    case = CUDA_CASES[name]
    for engine in ("tvm", "relax_llm"):
        with CUDA:
            run = run_module(
                case.module, case.arrays(), CUDA, relax_pipeline=passes(engine, CUDA), orders=1
            )
        for s in run.stats:
            print(
                f"{name:24} {engine:10} blocks {s.blocks:5} threads {s.threads:4} "
                f"barriers/block {s.barriers_per_block:5.1f} lane use {s.lane_use:.2f} "
                f"balance {s.balance:.2f} bytes over minimum {s.bytes_over_minimum:.2f}"
            )
