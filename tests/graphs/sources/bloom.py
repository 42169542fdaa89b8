"""BLOOM as Hugging Face implements it: ALiBi counted upwards from the mask, fused QKV per head."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, recipe

SIZES = {
    "small": {"hidden_size": 96, "n_head": 6, "n_layer": 2, "vocab_size": 97},
    "real": {"hidden_size": 768, "n_head": 12, "n_layer": 12, "vocab_size": 8192},
}
LENGTHS = {"small": (6, 7), "real": (128, 127)}


def _build(size: str, mode: str) -> Source:
    import torch
    import transformers

    from .hf_common import VERSION, build_model, filled_cache, flat_cache, past_of

    shape = SIZES[size]
    config = transformers.BloomConfig(
        hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2, **shape
    )
    model = build_model(transformers.BloomForCausalLM, config, torch.float32)

    class Prefill(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids, use_cache=False).logits

    class Decode(Prefill):
        def forward(self, ids: Any, past: Any) -> Any:
            cache = filled_cache(past)
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            return (out.logits, *flat_cache(cache))

    prefill, past = LENGTHS[size]
    tokens = ["integers", 0, shape["vocab_size"]]
    if mode == "prefill":
        ids = torch.zeros(1, prefill, dtype=torch.int64)
        return Source(Prefill(), (ids,), [tokens], None, VERSION)
    layers, heads = shape["n_layer"], shape["n_head"]
    pairs = past_of(layers, 1, heads, past, shape["hidden_size"] // heads, torch.float32)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    length = {2: torch.export.Dim("past", min=2, max=240)}
    dynamic = {"ids": None, "past": [(length, length)] * layers}
    rules = [tokens] + [["normal", 0.0, 1.0]] * (2 * layers)
    return Source(Decode(), (ids, pairs), rules, dynamic, VERSION)


for _mode in ("prefill", "decode"):
    recipe(
        f"bloom_{_mode}",
        partial(_build, mode=_mode),
        source="Hugging Face transformers, BloomForCausalLM",
        special=(
            "ALiBi with 6 heads, positions counted up by cumsum of the mask, added by "
            "baddbmm; QKV interleaved "
            f"per head; {'symbolic past' if _mode == 'decode' else '6 tokens'}"
        ),
        tags=f"bloom alibi {_mode} float32 {'symbolic' if _mode == 'decode' else ''}",
    )
