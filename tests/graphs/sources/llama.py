"""Llama as Hugging Face implements it: RMSNorm, half-split rotary over the whole head,
grouped-query attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, recipe

SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 256},
    "real": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
             "num_attention_heads": 12, "vocab_size": 8192, "max_position_embeddings": 512},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096},
}  # fmt: skip
LENGTHS = {"small": (6, 7), "real": (128, 127), "7b": (128, 127)}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(
    size: str, kv_heads: int = 0, scaled: bool = False, sdpa: bool = False, dtype: str = "float32"
) -> Any:
    """A Llama whose weights are not set yet; `kv_heads` 0 means as many as query heads."""
    import torch
    import transformers

    from .hf_common import build_model

    shape = SIZES[size]
    heads = shape["num_attention_heads"]
    config = transformers.LlamaConfig(
        num_key_value_heads=kv_heads or heads,
        attn_implementation="sdpa" if sdpa else "eager",
        rope_parameters=dict(LLAMA3) if scaled else {"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        **shape,
    )
    return build_model(transformers.LlamaForCausalLM, config, getattr(torch, dtype))


def _build(
    size: str,
    mode: str,
    gqa: bool = False,
    scaled: bool = False,
    sdpa: bool = False,
    dtype: str = "float32",
    **options: Any,
) -> Source:
    from .hf_common import decoder

    heads = SIZES[size]["num_attention_heads"]
    kv_heads = heads // 2 if gqa else heads
    model = make_model(size, kv_heads, scaled, sdpa, dtype)
    head_dim = SIZES[size]["hidden_size"] // heads
    return decoder(
        model, mode, kv_heads=kv_heads, head_dim=head_dim, lengths=LENGTHS[size], **options
    )


def _register() -> None:
    whole = {"sdpa": True, "keep_attention": True}
    for name, mode, options, special, tags in (
        ("prefill", "prefill", {}, "attention spelled out", ""),
        ("prefill_cache", "prefill_cache", {}, "returns keys and values", ""),
        ("decode", "decode", {}, "attention spelled out", ""),
        ("decode_fp16", "decode", {"dtype": "float16"}, "norm and softmax in float32", "fp16"),
        ("decode_bf16", "decode", {"dtype": "bfloat16"}, "norm and softmax in float32", "bf16"),
        ("decode_sdpa", "decode", {"sdpa": True},
         "torch's safe softmax: compare with -inf, any, where", "sdpa"),
        ("decode_whole", "decode", whole, "attention is one operator", "whole"),
        ("prefill_whole", "prefill", whole, "attention is one operator", "whole"),
        ("decode_gqa_llama3", "decode", {"gqa": True, "scaled": True},
         "4 query heads on 2; llama3-scaled frequencies", "gqa llama3"),
        ("prefill_gqa_llama3", "prefill_cache", {"gqa": True, "scaled": True},
         "4 query heads on 2; llama3-scaled frequencies; returns the cache", "gqa llama3"),
        ("decode_gqa_whole", "decode", {"gqa": True, **whole},
         "attention is one operator, K/V repeated before it", "gqa whole"),
        ("decode_gqa_new3_batch", "decode",
         {"gqa": True, "new": 3, "batch": 2, "symbolic_batch": True},
         "symbolic batch and past, 3 new tokens", "gqa batch chunk"),
    ):  # fmt: skip
        kind = mode.replace("_", " ")
        dtype = str(options.get("dtype", "float32"))
        recipe(
            f"llama_{name}",
            partial(_build, mode=mode, **options),
            source="Hugging Face transformers, LlamaForCausalLM",
            special=f"half-split rotary, RMSNorm, SwiGLU; {special}; symbolic length",
            tags=f"llama rotary rms_norm symbolic {kind} {dtype} {tags}",
        )


_register()
