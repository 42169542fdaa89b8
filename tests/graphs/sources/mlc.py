"""How mlc-llm's model files are imported and exported with plain tensors in place of its run-time
state objects."""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, TypeVar

from .external import folder, package

REVISION = "79d603f"
VERSION = f"mlc-llm {REVISION}, apache-tvm frontend.nn"


@functools.cache
def install() -> None:
    """Make ``mlc_llm.model...`` and ``mlc_llm.quantization...`` importable, without the package's
    own start-up."""
    root = folder("mlc-llm", "python", "mlc_llm")
    package("mlc_llm", root)
    for name in ("support", "model", "model.rwkv5", "model.llama", "quantization", "loader"):
        package(f"mlc_llm.{name}", root.joinpath(*name.split(".")))
    # TVM 0.27's script makes a buffer of `x = ...`; the name for a value has to be declared.
    text = root.joinpath("model", "rwkv5", "rwkv5_model.py").read_text(encoding="utf-8")
    adapted = Path(tempfile.mkdtemp(prefix="mlc_rwkv5_"))
    atexit.register(shutil.rmtree, adapted, ignore_errors=True)
    changed = text.replace("                x = k_buf[", "                x: T.let = k_buf[")
    assert changed != text
    adapted.joinpath("rwkv5_model.py").write_text(changed, encoding="utf-8")
    package("mlc_llm.model.rwkv5", adapted)
    unused = type("Unused", (), {})
    package("mlc_llm.nn", MixtralExperts=unused, PagedKVCache=unused, RopeMode=unused)
    state: Any = types.ModuleType("mlc_llm.nn.rnn_state")
    state.RNNState = unused
    sys.modules["mlc_llm.nn.rnn_state"] = state
    operators = package("mlc_llm.op", configure=lambda: None)
    sys.modules["mlc_llm"].op = operators  # type: ignore[attr-defined]
    mapping = importlib.import_module("mlc_llm.loader.mapping")
    sys.modules["mlc_llm.loader"].QuantizeMapping = mapping.QuantizeMapping  # type: ignore[attr-defined]


class PlainState:
    """Stands for mlc-llm's RNNState: state tensors of one sequence, given and returned as
    values."""

    def __init__(self, tensors: list[Any]) -> None:
        self.tensors = list(tensors)  # three per layer

    def get(self, layer: int, state: int, shape: Any, dtype: str) -> Any:
        found = self.tensors[3 * layer + state]
        assert found.dtype == dtype and len(found.shape) == len(shape)
        return found

    def set(self, layer: int, state: int, value: Any) -> PlainState:
        self.tensors[3 * layer + state] = value
        return self


class PlainCache:
    """Stands for mlc-llm's PagedKVCache: rotary by TVM's own PrimFunc, then attention over
    concatenated tensors."""

    def __init__(self, positions: Any, past: list[Any], kv_heads: int, theta: float) -> None:
        self.positions = positions
        self.past = list(past)  # key and value of each layer, (B, T, K, D)
        self.kv_heads = kv_heads
        self.theta = theta

    def attention_with_fused_qkv(
        self, layer: int, qkv: Any, query_heads: int, sm_scale: float
    ) -> Any:
        from tvm import tirx
        from tvm.relax.frontend.nn import Tensor, op
        from tvm.relax.frontend.nn.llm.position_embedding import llama_rope_with_position_map

        batch, length, fused, width = qkv.shape
        rope = llama_rope_with_position_map(
            self.theta, 1.0, width, query_heads, self.kv_heads, qkv.dtype, {}
        )
        # Its last parameter switches the rotation on; call_tir passes scalars before outputs, so
        # fix it here.
        rope = rope.specialize({rope.params[-1]: tirx.IntImm("int64", 1)})
        shapes = [(length, heads, width) for heads in (query_heads, self.kv_heads, self.kv_heads)]
        q, k, v = op.tensor_ir_op(
            rope,
            "fused_rope",
            [op.reshape(qkv, (length, fused, width)), self.positions],
            [Tensor.placeholder(shape, qkv.dtype) for shape in shapes],
        )
        rows = []
        for index, new in ((2 * layer, k), (2 * layer + 1, v)):
            new = op.reshape(new, (batch, length, self.kv_heads, width))
            self.past[index] = op.concat([self.past[index], new], dim=1)
            rows.append(op.permute_dims(self.past[index], [0, 2, 1, 3]))
        key, value = (
            op.repeat(each, query_heads // self.kv_heads, axis=1)
            if query_heads != self.kv_heads
            else each
            for each in rows
        )
        query = op.permute_dims(op.reshape(q, (batch, length, query_heads, width)), [0, 2, 1, 3])
        scores = op.matmul(query, op.permute_dims(key, [0, 1, 3, 2])) * sm_scale
        weights = op.softmax(scores.astype("float32"), axis=-1).astype(qkv.dtype)
        return op.permute_dims(op.matmul(weights, value), [0, 2, 1, 3])


def export(model: Any, method: str, arguments: dict[str, Any], call: Any) -> tuple[Any, list[str]]:
    """``export_tvm`` of one method that takes named tensors; returns the module and the weights'
    names.

    Parameters
    ----------
    model : nn.Module
        Holds the weights.
    method : str
        Name of the function in the module.
    arguments : dict
        Name -> nn.spec.Tensor, in call order.
    call : callable
        ``(model, tensors by name) -> tensors``.
    """
    from tvm.relax.frontend import nn

    class Standalone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    def forward(self: Any, *tensors: Any) -> Any:
        return call(self.model, dict(zip(arguments, tensors, strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in ("self", *arguments)]
    )
    forward.__name__ = method
    setattr(Standalone, method, forward)
    mode = {"param_mode": "plain", "effect_mode": "none"}
    mod, weights = Standalone().export_tvm(spec={method: {**arguments, "$": mode}})
    return mod, [name for name, _ in weights]


def serial(function: Any) -> Any:
    """A PrimFunc with its thread-bound loops made serial, so that a CPU can run it."""
    from tvm.script import from_source
    from tvm.script import tirx as T

    text = function.script(show_meta=False)
    text = re.sub(r'T\.thread_binding\((.*), thread="[a-zA-Z.]+"\)', r"T.serial(\1)", text)
    text = re.sub(r', "tirx\.is_scheduled": (1|True|T\.bool\(True\))', "", text)
    assert "thread_binding" not in text
    return from_source(text, {"T": T, "TypeVar": TypeVar})


def symbol_names(mod: Any, method: str, meanings: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The record's `symbols` for named symbolic sizes."""
    found = {
        str(extent)
        for param in mod[method].params
        for extent in param.ty.shape.values
        if not hasattr(extent, "value")
    }
    return {name: {"means": name, "value": meanings[name]} for name in sorted(found)}
