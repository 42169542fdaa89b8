"""MPT as Hugging Face implements it: fused QKV, ALiBi, no bias anywhere."""

from __future__ import annotations

from functools import partial

from .recipe import Source, recipe

SIZES = {
    "small": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 256},
    "real": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 8192, "max_seq_len": 512},
    "7b": {
        "d_model": 4096,
        "n_heads": 32,
        "n_layers": 32,
        "vocab_size": 50432,
        "max_seq_len": 2048,
    },
}
LENGTHS = {"small": (5, 7), "real": (128, 127), "7b": (128, 127)}  # prefill, past


def _build(size: str, mode: str, dtype: str = "float32", heads: int = 0, new: int = 1) -> Source:
    import torch
    import transformers

    from .hf_common import VERSION, Decode, Prefill, build_model, past_of

    shape = dict(SIZES[size])
    if heads and size == "small":
        shape.update(n_heads=heads, d_model=16 * heads)
    config = transformers.MptConfig(attn_implementation="eager", **shape)
    model = build_model(transformers.MptForCausalLM, config, getattr(torch, dtype))
    prefill, past = LENGTHS[size]
    tokens = ["integers", 0, config.vocab_size]
    if mode != "decode":
        ids = torch.zeros(1, prefill, dtype=torch.int64)
        wrapped = Prefill(model, "cache" if mode == "prefill_cache" else "")
        # The bias table is sliced by max(0, max_seq_len - S): S must stay below it.
        dynamic = {"ids": {1: torch.export.Dim("new", min=2, max=config.max_seq_len - 1)}}
        return Source(wrapped, (ids,), [tokens], dynamic, VERSION)
    batch = 1 if new == 1 else 2
    pairs = past_of(
        config.n_layers, batch, config.n_heads, past, config.d_model // config.n_heads, model.dtype
    )
    ids = torch.zeros(batch, new, dtype=torch.int64)
    length = torch.export.Dim("past", min=2, max=config.max_seq_len - 16)
    dynamic = {"ids": None, "past": [({2: length}, {2: length})] * config.n_layers}
    rules = [tokens] + [["normal", 0.0, 1.0]] * (2 * config.n_layers)
    return Source(Decode(model, "cache", mask=new > 1), (ids, pairs), rules, dynamic, VERSION)


def _register() -> None:
    source = "Hugging Face transformers, MptForCausalLM"
    for mode, what in (
        ("prefill", "no cache; symbolic length"),
        ("prefill_cache", "returns the cache; symbolic length"),
        ("decode", "cache of symbolic length"),
    ):
        for suffix, dtype, heads, note in (
            ("", "float32", 0, "4 heads"),
            ("_fp16", "float16", 0, "4 heads, softmax in float32"),
            ("_h6", "float32", 6, "6 heads: slopes of a count that is no power of two"),
        ):
            recipe(
                f"mpt_hf_{mode}{suffix}",
                partial(_build, mode=mode, dtype=dtype, heads=heads),
                source=source,
                special=f"ALiBi, fused QKV split, weights tied to the embedding; {note}; {what}",
                tags=f"mpt alibi symbolic {mode.replace('_', ' ')} {dtype}",
            )
    recipe(
        "mpt_hf_decode_new3",
        partial(_build, mode="decode", new=3, heads=6),
        source=source,
        special="ALiBi with 6 heads; 3 new tokens at once over a past of symbolic length; batch 2",
        tags="mpt alibi symbolic decode float32 batch chunk",
    )


_register()
