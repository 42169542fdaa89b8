"""RWKV-5.2, 6 and 7 from the model code of the PyPI package ``rwkv``: decode with state, and
prefill of 6 tokens."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from .recipe import Source, recipe

SIZES = {
    "small": {"layers": 2, "width": 128, "heads": 2, "vocab": 97, "ffn": 448, "rank": 32},
    "real": {"layers": 12, "width": 768, "heads": 12, "vocab": 8192, "ffn": 2688, "rank": 64},
    "1b5": {"layers": 24, "width": 2048, "heads": 32, "vocab": 65536, "ffn": 7168, "rank": 64},
    # A quarter of it, with a small vocabulary: several engines fit into memory side by side.
    "1b5-6": {"layers": 6, "width": 2048, "heads": 32, "vocab": 8192, "ffn": 7168, "rank": 64},
}


def _weights(generation: str, size: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint; the numbers are drawn later."""
    dims = SIZES[size]
    width, heads, rank = dims["width"], dims["heads"], dims["rank"]
    head = width // heads
    found: dict[str, tuple[int, ...]] = {"emb.weight": (dims["vocab"], width)}
    norms = ["blocks.0.ln0", "ln_out"]
    for layer in range(dims["layers"]):
        block, att, ffn = (f"blocks.{layer}.{part}" for part in ("", "att.", "ffn."))
        norms += [block + "ln1", block + "ln2", att + "ln_x"]
        for name in ("receptance", "key", "value", "output"):
            found[f"{att}{name}.weight"] = (width, width)
        found[ffn + "key.weight"] = (dims["ffn"], width)
        found[ffn + "value.weight"] = (width, dims["ffn"])
        if generation in ("5", "6"):
            found[att + "gate.weight"] = (width, width)
            found[ffn + "receptance.weight"] = (width, width)
            found[att + "time_faaaa"] = (heads, head)
        if generation == "5":
            for name in ("k", "v", "r", "g"):
                found[f"{att}time_mix_{name}"] = (1, 1, width)
            for name in ("k", "r"):
                found[f"{ffn}time_mix_{name}"] = (1, 1, width)
            found[att + "time_decay"] = (heads, head)
        elif generation == "6":
            for name in ("x", "w", "k", "v", "r", "g"):
                found[f"{att}time_maa_{name}"] = (1, 1, width)
            for name in ("k", "r"):
                found[f"{ffn}time_maa_{name}"] = (1, 1, width)
            found[att + "time_maa_w1"] = (width, 5 * rank)
            found[att + "time_maa_w2"] = (5, rank, width)
            found[att + "time_decay_w1"] = (width, 2 * rank)
            found[att + "time_decay_w2"] = (2 * rank, width)
            found[att + "time_decay"] = (1, 1, width)
        else:
            for name in ("r", "w", "k", "v", "a", "g"):
                found[f"{att}x_{name}"] = (1, 1, width)
            found[ffn + "x_k"] = (1, 1, width)
            for name in ("w", "a", "v"):
                found[f"{att}{name}0"] = (1, 1, width)
                found[f"{att}{name}1"] = (width, rank)
                found[f"{att}{name}2"] = (rank, width)
            found[att + "g1"] = (width, 2 * rank)
            found[att + "g2"] = (2 * rank, width)
            found[att + "k_k"] = found[att + "k_a"] = (1, 1, width)
            found[att + "r_k"] = (heads, head)
    for norm in norms:
        found[norm + ".weight"] = found[norm + ".bias"] = (width,)
    found["head.weight"] = (dims["vocab"], width)
    return found


def _rule(name: str, shape: tuple[int, ...]) -> list[Any]:
    """Rules for the weights as the package keeps them after loading.

    There the decay of generation 5 is already in (0, 1), and matrices are (in, out).
    """
    leaf = name.rpartition("_")[2]
    if "time_mix" in name or ("time_maa_" in name and len(shape) == 1) or "_x_" in name:
        return ["uniform", 0.1, 0.9]
    if "time_decay" in name and leaf not in ("w1", "w2"):
        return ["uniform", 0.3, 0.99] if len(shape) != 1 else ["uniform", -3.0, 0.5]
    if "faaaa" in name:
        return ["normal", 0.0, 0.5]
    if name.endswith("emb_weight"):
        return ["normal", 0.0, 1.0]
    if name.endswith("bias"):
        return ["normal", 0.0, 0.1]
    if len(shape) == 1 and ("ln" in name or leaf in ("k", "a")):
        return ["normal", 1.0, 0.1]
    if name.endswith(("w0", "a0", "v0", "r_k")):
        return ["normal", 0.0, 0.3]
    fan_in = shape[-2] if len(shape) > 1 else shape[0]
    return ["normal", 0.0, round(fan_in**-0.5, 4)]


def _import_package(generation: str, script: bool) -> Any:
    """The package's model module, imported anew: what it is depends on the environment."""
    os.environ.update(RWKV_JIT_ON="1" if script else "0", RWKV_CUDA_ON="0")
    os.environ["RWKV_V7_ON"] = "1" if generation == "7" else "0"
    sys.modules.pop("rwkv.model", None)
    import rwkv.model

    return rwkv.model


def _package(generation: str) -> Any:
    """The package's model module, without its TorchScript and CUDA paths."""
    import torch

    kept = torch.jit.script, torch.jit.script_method, torch.jit.ScriptModule
    torch.jit.script = torch.jit.script_method = lambda function: function
    torch.jit.ScriptModule = torch.nn.Module
    try:
        module = _import_package(generation, script=False)
    finally:
        torch.jit.script, torch.jit.script_method, torch.jit.ScriptModule = kept
    original = module.matmul

    def matmul(a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        # The package refuses float64, in which the golden outputs are computed.
        return a @ b if a.dtype == torch.float64 else original(a, b, *rest, **options)

    module.matmul = matmul
    return module


def package_as_shipped(module: Any, generation: str, size: str) -> Any:
    """The package's own `forward(tokens, state)`, TorchScript included, with a module's weights.

    For generations 5 and 6, whose decode step takes a list of one token.
    """
    model = load_model(generation, size, script=True)
    for key, name in module.names.items():
        model.w[key].copy_(module.get_parameter(name))
    return model.forward


def load_model(generation: str, size: str, script: bool = False) -> Any:
    """The package's model object, built from a checkpoint of zeros."""
    import contextlib
    import io
    import tempfile

    import torch

    shapes = _weights(generation, size)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        torch.save({k: torch.zeros(s) for k, s in shapes.items()}, f"{folder}/model.pth")
        package = _import_package(generation, True) if script else _package(generation)
        return package.RWKV(f"{folder}/model", "cpu fp32")


class _Embedding:
    """Stands for the embedding matrix: indexing with a tensor stays in the graph."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __getitem__(self, index: Any) -> Any:
        import torch

        return torch.nn.functional.embedding(index, self.weight)


def make_module(generation: str, size: str, mode: str) -> Any:
    """Tokens and state to logits and state; the package's weights are registered as parameters."""
    import torch

    model = load_model(generation, size)
    weights = model.z if generation == "7" else model.w

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = {key: key.replace(".", "_") for key in weights}
            for key, name in list(self.names.items()):
                if weights[key].numel() == 0:  # generation 7 has no value mix in its first layer
                    del self.names[key]
                    continue
                value = weights[key].detach().clone(memory_format=torch.contiguous_format)
                self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

        def forward(self, tokens: Any, state: Any) -> Any:
            table: dict[str, Any] = dict(weights)
            table |= {k: getattr(self, name) for k, name in self.names.items()}
            table["emb.weight"] = _Embedding(table["emb.weight"])
            kept = list(state)
            if generation == "7":
                model.z = table
                if mode == "decode":
                    logits, new = model.forward_one(tokens, kept)
                else:
                    logits, new = model.forward_seq(tokens, kept, True)
            else:
                model.w = table
                logits, new = model.forward(tokens, kept, mode != "decode")
            return (logits, *new)

    return Wrapped().eval()


def version() -> str:
    """Package versions, for the table."""
    from importlib.metadata import version as of

    return f"rwkv {of('rwkv')}, torch {of('torch').split('+')[0]}"


def _build(size: str, generation: str, mode: str) -> Source:
    import torch

    dims = SIZES[size]
    width, heads = dims["width"], dims["heads"]
    head = width // heads
    module = make_module(generation, size, mode)
    state = []
    for _ in range(dims["layers"]):
        state += [torch.zeros(width), torch.zeros(heads, head, head), torch.zeros(width)]
    # One token is a scalar for generation 7 and a vector of one before.
    count = () if generation == "7" else (1,)
    tokens = torch.zeros(count if mode == "decode" else (6,), dtype=torch.int64)
    rules = [["integers", 0, dims["vocab"]]] + [["normal", 0.0, 0.3]] * len(state)
    return Source(module, (tokens, state), rules, None, version(), _rule)


def _register() -> None:
    special = {
        "5": (
            "group_norm of eps 64e-5 with gate, wkv as (H,N,1)@(H,1,N), constant decay per channel"
        ),
        "6": "data-dependent decay and mix through low-rank matrices with tanh",
        "7": "delta rule: state @ (-kk ⊗ kk·a); L2 norm of the key; value residual across layers",
    }
    for generation, what in special.items():
        for mode, how in (
            ("decode", "one token; 1-D activations; state in and out"),
            ("prefill6", "6 tokens, the recurrence unrolled; state in and out"),
        ):
            recipe(
                f"rwkv{generation}_package_{mode}",
                partial(_build, generation=generation, mode=mode),
                source=f"PyPI rwkv, its RWKV-{generation if generation != '5' else '5.2'} path",
                special=f"{what}; {how}",
                tags=f"rwkv rwkv{generation} wkv group_norm state float32 {mode.rstrip('6')}",
            )


_register()
