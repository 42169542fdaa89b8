"""GPT-J as Hugging Face implements it: interleaved rotary on a part of the head, a table of sines
by position."""

from __future__ import annotations

from functools import partial

from .recipe import Source, recipe

SIZES = {
    "small": {"n_embd": 128, "n_head": 4, "n_layer": 2, "rotary_dim": 16, "vocab_size": 97,
              "n_positions": 64},
    "real": {"n_embd": 768, "n_head": 12, "n_layer": 12, "rotary_dim": 32, "vocab_size": 8192,
             "n_positions": 512},
}  # fmt: skip
LENGTHS = {"small": (6, 7), "real": (128, 127)}


def _build(size: str, mode: str) -> Source:
    import torch
    import transformers

    from .hf_common import build_model, decoder

    shape = SIZES[size]
    config = transformers.GPTJConfig(
        attn_implementation="eager",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        **shape,
    )
    model = build_model(transformers.GPTJForCausalLM, config, torch.float32)
    return decoder(
        model,
        mode,
        kv_heads=shape["n_head"],
        head_dim=shape["n_embd"] // shape["n_head"],
        lengths=LENGTHS[size],
        longest=shape["n_positions"] - 4,
    )


for _mode in ("prefill", "decode"):
    recipe(
        f"gptj_{_mode}",
        partial(_build, mode=_mode),
        source="Hugging Face transformers, GPTJForCausalLM",
        special=(
            "interleaved rotary on 16 of 32 per head: stride-2 slices, repeat_interleave "
            "as broadcast and "
            "reshape; sine table taken by position; symbolic length"
        ),
        tags=f"gptj rotary partial interleaved symbolic {_mode} float32",
    )
