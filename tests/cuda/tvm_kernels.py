"""TVM's own CUDA kernels as cases: a module, its inputs, the float64 result, a stated tolerance."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend import nn

DTYPES = ["float32", "float16", "bfloat16"]
UNIT = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}  # half a unit in the last place
SMALLEST = {"float32": 2**-149, "float16": 2**-24, "bfloat16": 2**-133}  # denormal


def array(shape, dtype, scale=1.0, seed=11):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * scale).astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )


def module(body, **tensors):
    class M(nn.Module):
        pass

    # nn.Module reads the signature, so give it one with the tensors' names.
    names = ", ".join(tensors)
    scope = {"body": body}
    exec(f"def forward(self, {names}): return body({names})", scope)
    M.forward = scope["forward"]
    spec = {"forward": {k: nn.spec.Tensor(list(s), d) for k, (s, d) in tensors.items()}}
    return M().export_tvm(spec=spec)[0]


@dataclass(frozen=True)
class Case:
    """One operator of TVM, compiled by TVM's default pipeline.

    Attributes
    ----------
    module : callable
        dtype to an IRModule with a function "forward".
    shapes : sequence of tuple
        Of the inputs.
    reference : callable
        Inputs in float64 to (result, scale): an element may be off by
        ``roundings * UNIT[dtype] * scale``.
    roundings : dict[str, float]
        By dtype.
    spread : tuple of float
        Standard deviation of each input.
    racing : tuple of str
        Dtypes whose generated code has a data race: TVM reduces them through a volatile tree in
        shared memory without ``__syncwarp``, which is undefined since Volta. The race check finds
        it (a test), and the numbers are those of warps in lockstep.
    refused : dict[str, tuple]
        Dtypes that TVM does not take: the exception and a pattern of its text.
    """

    name: str
    module: Callable[[str], tvm.IRModule]
    shapes: Sequence[tuple[int, ...]]
    reference: Callable[..., tuple[np.ndarray, np.ndarray]]
    roundings: dict[str, float]
    spread: tuple[float, ...] = (1.0, 1.0, 1.0)
    racing: tuple[str, ...] = ()
    refused: dict[str, tuple[type[Exception], str]] = field(default_factory=dict)

    def __str__(self):
        return self.name

    @property
    def dtypes(self):
        return [d for d in DTYPES if d not in self.refused]

    def inputs(self, dtype):
        seed = zlib.crc32(self.name.encode())
        return [
            array(shape, dtype, spread, seed + i)
            for i, (shape, spread) in enumerate(zip(self.shapes, self.spread, strict=False))
        ]

    def worst(self, dtype, inputs, got):
        """Largest error in units of what is allowed; above 1 is wrong."""
        want, scale = self.reference(*(x.astype("f8") for x in inputs))
        assert got.shape == want.shape
        allowed = self.roundings[dtype] * UNIT[dtype] * scale + SMALLEST[dtype]
        return float((np.abs(got.astype("f8") - want) / allowed).max())


def _softmax(dtype):
    return module(lambda x: nn.op.softmax(x, -1), x=(("n", 300), dtype))


def _softmax_reference(x):
    below = x - x.max(-1, keepdims=True)
    e = np.exp(below)
    p = e / e.sum(-1, keepdims=True)
    return p, p * (1 + np.abs(below))  # a rounding of the exponent counts that often


def _normalised(x, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def _layer_norm(dtype):
    return module(
        lambda x, w, b: nn.op.layer_norm(x, normalized_shape=260, weight=w, bias=b),
        x=(("n", 260), dtype), w=((260,), dtype), b=((260,), dtype))  # fmt: skip


def _layer_norm_reference(x, w, b):
    normal = _normalised(x)
    return normal * w + b, (np.abs(normal) + 1) * np.abs(w) + np.abs(b)


def _rms_norm(dtype):
    return module(
        lambda x, w: nn.op.rms_norm(x, w, axes=-1), x=(("n", 260), dtype), w=((260,), dtype)
    )


def _rms_norm_reference(x, w):
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w
    return want, np.abs(want)


def _group_norm(dtype):
    return module(
        lambda x, w, b: nn.op.group_norm(x, 4, w, b, eps=1e-5, channel_axis=2, axes=[]),
        x=((1, "n", 96), dtype), w=((96,), dtype), b=((96,), dtype))  # fmt: skip


def _group_norm_reference(x, w, b):
    normal = _normalised(x.reshape(1, 3, 4, 24)).reshape(x.shape)
    return normal * w + b, (np.abs(normal) + 1) * np.abs(w) + np.abs(b)


def gemv_module(dtype, columns=96):
    mod = module(
        lambda x, w: nn.op.matmul(x, nn.op.permute_dims(w)),
        x=((1, 256), dtype),
        w=((columns, 256), dtype),
    )
    return relax.transform.FuseTransposeMatmul()(mod)


def _matmul(dtype):
    out = "float32" if dtype == "float16" else dtype
    k, m = _MATMUL[dtype == "float16"][1:]
    return module(
        lambda x, w: nn.op.matmul(x, w, out_dtype=out), x=(("n", k), dtype), w=((k, m), dtype)
    )


# Rows, sum, columns. fp16 ones are large enough for dlight's tensor-core rule, which pads rows.
_MATMUL = [(50, 64, 96), (100, 128, 128)]


def _product(transposed):
    def reference(x, w):
        w = w.T if transposed else w
        return x @ w, np.abs(x) @ np.abs(w)

    return reference


# fp32 and rms_norm in any type sum in fp32, so the error is the last roundings. The others sum in
# the type itself: a random walk of as many roundings as a thread and the tree add up.
CASES = {
    case.name: case
    for case in [
        Case(
            "softmax", _softmax, [(5, 300)], _softmax_reference,
            {"float32": 4, "float16": 4, "bfloat16": 4}, (3.0,), racing=("bfloat16",),
        ),
        Case(
            "layer_norm", _layer_norm, [(3, 260), (260,), (260,)], _layer_norm_reference,
            {"float32": 4, "float16": 2},
            refused={"bfloat16": (tvm.error.InternalError, "only support float32 and float16")},
        ),
        Case(
            "rms_norm", _rms_norm, [(3, 260), (260,)], _rms_norm_reference,
            {"float32": 4, "float16": 3, "bfloat16": 3},
        ),
        Case(
            "group_norm", _group_norm, [(1, 3, 96), (96,), (96,)], _group_norm_reference,
            {"float32": 8, "float16": 2},  # E[x^2] - E[x]^2, mean 0
            refused={"bfloat16": (TypeError, "data must be float, but got T.bfloat16")},
        ),
        Case(
            "gemv", gemv_module, [(1, 256), (96, 256)], _product(True),
            {"float32": 2, "float16": 4, "bfloat16": 4}, racing=("bfloat16",),
        ),
        Case(
            "matmul", _matmul, [_MATMUL[0][:2], _MATMUL[0][1:]], _product(False),
            {"float32": 8, "bfloat16": 8},
        ),
        Case(
            "matmul_tensor_core", _matmul, [_MATMUL[1][:2], _MATMUL[1][1:]], _product(False),
            {"float16": 1e-2},  # exact products, sums and result in fp32
        ),
    ]
}  # fmt: skip


def compile_case(case: Case, dtype: str, target: Any) -> Any:
    """The executable that TVM's default pipeline makes of a case."""
    return tvm.compile(
        case.module(dtype), target, relax_pipeline=relax.get_default_pipeline(target)
    )


@contextlib.contextmanager
def changed_source(change: Callable[[str], str]):
    """Inside, every CUDA source that TVM generates goes through `change` before it is built."""
    name = "tvm_callback_cuda_compile"
    build = tvm.get_global_func(name)
    tvm_ffi.register_global_func(name, lambda code: build(change(code)), override=True)
    try:
        yield
    finally:
        tvm_ffi.register_global_func(name, build, override=True)
