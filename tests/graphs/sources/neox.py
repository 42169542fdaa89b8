"""GPT-NeoX as Hugging Face implements it: rotary over 25 % of the head, fused QKV per head,
parallel residual."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, recipe

SIZES = {
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 256},
    "real": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
             "num_attention_heads": 12, "vocab_size": 8192, "max_position_embeddings": 512},
}  # fmt: skip
LENGTHS = {"small": (6, 7), "real": (128, 127)}


def _build(size: str, mode: str, sdpa: bool = False, **options: Any) -> Source:
    import torch
    import transformers

    from .hf_common import build_model, decoder

    shape = SIZES[size]
    config = transformers.GPTNeoXConfig(
        attn_implementation="sdpa" if sdpa else "eager",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        **shape,
    )
    model = build_model(transformers.GPTNeoXForCausalLM, config, torch.float32)
    heads = shape["num_attention_heads"]
    return decoder(
        model,
        mode,
        kv_heads=heads,
        head_dim=shape["hidden_size"] // heads,
        lengths=LENGTHS[size],
        cache="past_key_values",
        **options,
    )


for _name, _mode, _options, _special in (
    ("prefill", "prefill", {}, "attention spelled out"),
    ("decode", "decode", {}, "attention spelled out"),
    ("decode_whole", "decode", {"sdpa": True, "keep_attention": True}, "attention is one operator"),
    ("prefill_batch", "prefill", {"batch": 2, "symbolic_batch": True}, "symbolic batch"),
):
    recipe(
        f"neox_{_name}",
        partial(_build, mode=_mode, **_options),
        source="Hugging Face transformers, GPTNeoXForCausalLM",
        special=(
            "rotary on the first 8 of 32 per head, the rest concatenated back; QKV "
            "chunked per head; "
            f"biases; parallel residual; {_special}; symbolic length"
        ),
        tags=(
            f"neox rotary partial symbolic {_mode} float32 {'whole' if 'sdpa' in _options else ''}"
        ),
    )
