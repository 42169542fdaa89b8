"""Phi as Hugging Face implements it: half-split rotary on a part of the head, separate projections
with bias."""

from __future__ import annotations

from functools import partial

from .recipe import Source, recipe

SIZES = {
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 256},
    "real": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
             "num_attention_heads": 12, "vocab_size": 8192, "max_position_embeddings": 512},
}  # fmt: skip
LENGTHS = {"small": (6, 7), "real": (128, 127)}


def _build(size: str, mode: str) -> Source:
    import torch
    import transformers

    from .hf_common import build_model, decoder

    shape = SIZES[size]
    config = transformers.PhiConfig(
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        **shape,
    )
    model = build_model(transformers.PhiForCausalLM, config, torch.float32)
    heads = shape["num_attention_heads"]
    head_dim = shape["hidden_size"] // heads
    return decoder(model, mode, kv_heads=heads, head_dim=head_dim, lengths=LENGTHS[size])


for _mode in ("prefill", "decode"):
    recipe(
        f"phi_{_mode}",
        partial(_build, mode=_mode),
        source="Hugging Face transformers, PhiForCausalLM",
        special=(
            "half-split rotary on 16 of 32 per head; biases; parallel residual; symbolic length"
        ),
        tags=f"phi rotary partial symbolic {_mode} float32",
    )
