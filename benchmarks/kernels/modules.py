"""One-operator modules with inputs, a float64 reference and torch's spelling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

__all__ = ["Case", "group_norm", "layer_norm", "module_of", "rms_norm", "softmax"]


@dataclass(frozen=True)
class Case:
    """A module `main`, the shapes of its float32 inputs, the reference and torch's function."""

    module: tvm.IRModule
    shapes: list[tuple[int, ...]]
    reference: Callable[..., np.ndarray]
    torch: Callable[..., Any]

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Random inputs."""
        rng = np.random.default_rng(seed)
        return [rng.standard_normal(s, dtype=np.float32) for s in self.shapes]


def module_of(shapes: list[tuple[int, ...]], body: Callable[..., Any]) -> tvm.IRModule:
    """Return a module whose `main` returns what `body(bb, *params)` builds."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"a{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with bb.function("main", params):
        with bb.dataflow():
            result = body(bb, *params)
            result = bb.emit_output(relax.Tuple(result) if isinstance(result, list) else result)
        bb.emit_func_output(result)
    return bb.get()


def group_norm(shape: tuple[int, ...], groups: int, channel: int, axes: list[int]) -> Case:
    """group_norm with weight and bias."""
    rank = len(shape)
    c = channel % rank
    channels = shape[c]

    def reference(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        y = x.reshape(*shape[:c], groups, channels // groups, *shape[c + 1 :])
        over = (c + 1, *(a + 1 if a > c else a for a in axes))
        y = (y - y.mean(over, keepdims=True)) / np.sqrt(y.var(over, keepdims=True) + 1e-5)
        spread = [1] * rank
        spread[c] = channels
        return y.reshape(shape) * w.reshape(spread) + b.reshape(spread)

    def in_torch(torch: Any, x: Any, w: Any, b: Any) -> Any:
        if c == 1:
            return torch.nn.functional.group_norm(x, groups, w, b)
        return torch.nn.functional.group_norm(x.reshape(-1, channels), groups, w, b).reshape(shape)

    mod = module_of(
        [shape, (channels,), (channels,)],
        lambda bb, x, w, b: bb.emit(relax.op.nn.group_norm(x, w, b, groups, channel, axes)),
    )
    return Case(mod, [shape, (channels,), (channels,)], reference, in_torch)


def layer_norm(shape: tuple[int, ...]) -> Case:
    """layer_norm over the last axis."""
    n = shape[-1]
    mod = module_of(
        [shape, (n,), (n,)], lambda bb, x, w, b: bb.emit(relax.op.nn.layer_norm(x, w, b, [-1]))
    )
    return Case(
        mod,
        [shape, (n,), (n,)],
        lambda x, w, b: (
            (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b
        ),
        lambda torch, x, w, b: torch.nn.functional.layer_norm(x, (n,), w, b),
    )


def rms_norm(shape: tuple[int, ...]) -> Case:
    """rms_norm over the last axis."""
    n = shape[-1]
    mod = module_of([shape, (n,)], lambda bb, x, w: bb.emit(relax.op.nn.rms_norm(x, w, [-1])))
    return Case(
        mod,
        [shape, (n,)],
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w,
        lambda torch, x, w: torch.nn.functional.rms_norm(x, (n,), w, 1e-5),
    )


def softmax(shape: tuple[int, ...], axis: int) -> Case:
    """Softmax along one axis."""

    def reference(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(axis, keepdims=True))
        return e / e.sum(axis, keepdims=True)

    mod = module_of([shape], lambda bb, x: bb.emit(relax.op.nn.softmax(x, axis)))
    return Case(mod, [shape], reference, lambda torch, x: torch.softmax(x, axis))
