"""Modules with one operator, float64 references, and running them: shared by the norm tests."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, tirx

from relax_llm_passes.finish import finalize_passes
from relax_llm_passes.targets import parse_target

CUDA = parse_target("cuda -arch=sm_90")
CPU = parse_target("native")
NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# One rounding of the result, relative to the largest value, with room for the sums in float32.
BOUND = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}


def operator_module(
    op: Any, shapes: list[tuple], dtype: str = "float32", then: Any = None, **attrs: Any
) -> tvm.IRModule:
    """Return a module whose `main` applies `op` to parameters; text sizes are symbolic."""
    bb = relax.BlockBuilder()
    sizes: dict[str, tirx.Var] = {}

    def size(d: Any) -> Any:
        return sizes.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d

    params = [
        relax.Var(f"a{i}", relax.TensorType([size(d) for d in s], dtype))
        for i, s in enumerate(shapes)
    ]
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit(op(*params, **attrs))
            if then is not None:
                result = then(bb, result, params)
            result = bb.emit_output(result)
        bb.emit_func_output(result)
    return bb.get()


def group_norm_reference(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    groups: int,
    channel: int,
    axes: list[int],
    epsilon: float = 1e-5,
) -> np.ndarray:
    """group_norm in float64."""
    x = x.astype(np.float64)
    channel %= x.ndim
    shape = x.shape
    y = x.reshape(*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :])
    over = (channel + 1, *(a + 1 if a > channel else a for a in axes))
    y = (y - y.mean(over, keepdims=True)) / np.sqrt(y.var(over, keepdims=True) + epsilon)
    spread = [1] * x.ndim
    spread[channel] = shape[channel]
    y = y.reshape(shape)
    return y * weight.astype(np.float64).reshape(spread) + bias.astype(np.float64).reshape(spread)


def softmax_reference(x: np.ndarray, axis: int) -> np.ndarray:
    """Softmax in float64."""
    x = x.astype(np.float64)
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference over the largest wanted value; NaN counts as infinite."""
    found = np.asarray(found, dtype=np.float64)
    if np.isnan(found).any():
        return float("inf")
    scale = np.abs(wanted).max()
    return float(np.abs(found - wanted).max() / (scale if scale > 0 else 1.0))


def legalized(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Lower to PrimFuncs the way TVM does, fused."""
    with target:
        return tvm.transform.Sequential(
            [
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FoldConstant(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(mod)


def run_cpu(mod: tvm.IRModule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Compile for this machine's processor and run `main`."""
    pipeline = tvm.transform.Sequential([relax.transform.LegalizeOps(), *finalize_passes(CPU)])
    executable = tvm.compile(mod, target=CPU, relax_pipeline=pipeline)
    vm = relax.VirtualMachine(executable, tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays])
    items = [result] if hasattr(result, "numpy") else list(result)
    return [r.numpy() for r in items]


def cuda_pipeline() -> tvm.transform.Pass:
    """What is left to do with a module of scheduled PrimFuncs."""
    return tvm.transform.Sequential([*finalize_passes(CUDA)])


def kernels(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    """Return the module's PrimFuncs."""
    return [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
