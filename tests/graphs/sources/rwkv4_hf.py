"""RWKV-4 as Hugging Face implements it: exponential-weighted sums with a running maximum."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, default_weight_rule, recipe

SIZES = {
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "context_length": 64},
    "real": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "vocab_size": 8192,
        "context_length": 512,
    },
}


def _rule(name: str, shape: tuple[int, ...]) -> list[Any]:
    if "time_mix" in name:
        return ["uniform", 0.1, 0.9]
    if name.endswith("time_decay"):
        return ["uniform", -3.0, 1.0]
    if name.endswith("time_first"):
        return ["normal", 0.0, 0.5]
    return default_weight_rule(name, shape)


def _build(size: str, tokens: int) -> Source:
    import torch
    import transformers

    from .hf_common import VERSION, build_model

    shape = SIZES[size]
    # rescale_every would divide weights in place on the first call.
    config = transformers.RwkvConfig(rescale_every=0, bos_token_id=0, eos_token_id=0, **shape)
    model = build_model(transformers.RwkvForCausalLM, config, torch.float32)

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, state: Any) -> Any:
            out = self.model(input_ids=ids, state=[s.clone() for s in state], use_cache=True)
            return (out.logits, *out.state)

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    state = [torch.zeros(1, shape["hidden_size"], shape["num_hidden_layers"]) for _ in range(5)]
    # Shifted inputs of both blocks, numerator, denominator (positive), running maximum of the
    # exponents.
    rules: list[list[Any]] = [
        ["integers", 0, shape["vocab_size"]],
        ["normal", 0.0, 1.0],
        ["normal", 0.0, 1.0],
        ["normal", 0.0, 1.0],
        ["uniform", 0.5, 2.0],
        ["normal", 0.0, 1.0],
    ]
    return Source(Wrapped(), (ids, state), rules, None, VERSION, _rule)


for _name, _tokens in (("decode", 1), ("prefill6", 6)):
    recipe(
        f"rwkv4_hf_{_name}",
        partial(_build, tokens=_tokens),
        source="Hugging Face transformers, RwkvForCausalLM",
        special=(
            "wkv with numerator, denominator and running maximum; token shift by "
            "padding; states of all layers in one "
            f"tensor, read and written by column; {_tokens} "
            f"token{'s, unrolled' if _tokens > 1 else ''}"
        ),
        tags=f"rwkv rwkv4 wkv state float32 {_name.rstrip('6')}",
    )
