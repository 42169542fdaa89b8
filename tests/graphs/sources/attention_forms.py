"""Forms of attention that the other families lack: soft caps, sinks, caches of fixed capacity,
scaled rotary tables. Each is a Hugging Face model as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, recipe

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}  # fmt: skip
REAL = {**SHAPE, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8192,
        "max_position_embeddings": 512}  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
             "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
                 "original_max_position_embeddings": 64},
}  # fmt: skip


def _shape(size: str) -> dict[str, Any]:
    return dict(SHAPE if size == "small" else REAL)


def _llama(size: str, rope: str) -> Any:
    import torch
    import transformers

    from .hf_common import build_model

    shape = _shape(size)
    half = shape["hidden_size"] // shape["num_attention_heads"] // 2
    scaling = dict(ROPE[rope])
    if rope == "longrope":
        scaling["short_factor"] = [1.0 + 0.05 * i for i in range(half)]
        scaling["long_factor"] = [1.0 + 0.4 * i for i in range(half)]
    config = transformers.LlamaConfig(attn_implementation="eager", rope_parameters=scaling, **shape)
    return build_model(transformers.LlamaForCausalLM, config, torch.float32)


def _decoder(size: str, model: Any, new: int = 1) -> Source:
    from .hf_common import decoder

    shape = _shape(size)
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    past = 7 if size == "small" else 127
    return decoder(
        model, "decode", kv_heads=shape["num_key_value_heads"], head_dim=head_dim, new=new,
        lengths=(6, past),
    )  # fmt: skip


def _scaled(size: str, rope: str) -> Source:
    return _decoder(size, _llama(size, rope), new=2)


def _gemma2(size: str) -> Source:
    import torch
    import transformers

    from .hf_common import build_model

    shape = _shape(size)
    config = transformers.Gemma2Config(
        head_dim=shape["hidden_size"] // shape["num_attention_heads"], sliding_window=64,
        query_pre_attn_scalar=16, attn_logit_softcapping=2.0, attn_implementation="eager", **shape,
    )  # fmt: skip
    return _decoder(size, build_model(transformers.Gemma2ForCausalLM, config, torch.float32))


def _gptoss(size: str) -> Source:
    import torch
    import transformers

    from .hf_common import build_model

    shape = _shape(size)
    config = transformers.GptOssConfig(
        head_dim=shape["hidden_size"] // shape["num_attention_heads"], sliding_window=64,
        num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **shape,
    )  # fmt: skip
    # The grouped product that is the default has no counterpart in TVM.
    config._experts_implementation = "batched_mm"
    return _decoder(size, build_model(transformers.GptOssForCausalLM, config, torch.float32))


def _static(size: str, new: int) -> Source:
    import torch

    from .hf_common import VERSION, past_of

    shape = _shape(size)
    model = _llama(size, "default")
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    capacity, batch = (32, 2) if size == "small" else (512, 1)
    pairs = past_of(2, batch, shape["num_key_value_heads"], capacity, head_dim, torch.float32)
    ids = torch.zeros(batch, new, dtype=torch.int64)
    rules = [["integers", 0, shape["vocab_size"]], ["integers", 5, 9]]
    rules += [["normal", 0.0, 1.0]] * 4
    args = (ids, torch.tensor(5), pairs)
    return Source(_static_decode()(model, capacity), args, rules, None, VERSION)


def _static_decode() -> Any:
    import torch
    import transformers

    from .hf_common import flat_cache

    class StaticDecode(torch.nn.Module):
        """ids (B, S), length (), pairs (B, K, capacity, D) -> logits, pairs with the new rows."""

        def __init__(self, model: Any, capacity: int) -> None:
            super().__init__()
            self.model = model
            self.capacity = capacity

        def forward(self, ids: Any, length: Any, past: Any) -> Any:
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.capacity)
            for layer, (key, value) in zip(cache.layers, past, strict=True):
                layer.dtype, layer.device = key.dtype, key.device
                layer.keys, layer.values, layer.is_initialized = key.clone(), value.clone(), True
                layer.cumulative_length = length.clone()
            positions = torch.arange(ids.shape[1]) + length
            seen = torch.arange(self.capacity)[None] <= positions[:, None]
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.where(seen, 0.0, lowest).to(self.model.dtype)[None, None]
            out = self.model(
                input_ids=ids, position_ids=positions[None].expand(ids.shape), use_cache=True,
                attention_mask=mask, past_key_values=cache,
            )  # fmt: skip
            return (out.logits, *flat_cache(cache))

    return StaticDecode


def _register() -> None:
    for name, build, model, special, tags in (
        ("llama_static_decode", partial(_static, new=1), "LlamaForCausalLM",
         "StaticCache: rows written into caches of 32 rows at a position from memory (index_put); "
         "batch 2", "static"),
        ("llama_static_decode_new3", partial(_static, new=3), "LlamaForCausalLM",
         "StaticCache, 3 new rows at a position from memory; batch 2", "static chunk"),
        ("llama_linear_decode", partial(_scaled, rope="linear"), "LlamaForCausalLM",
         "frequencies divided by 4; 2 new tokens", "linear symbolic"),
        ("llama_yarn_decode", partial(_scaled, rope="yarn"), "LlamaForCausalLM",
         "yarn: blended frequencies, tables times 1.14; 2 new tokens", "yarn symbolic"),
        ("llama_longrope_decode", partial(_scaled, rope="longrope"), "LlamaForCausalLM",
         "longrope: one of two sets of frequencies, chosen by the largest position; 2 new tokens",
         "longrope symbolic"),
        ("gemma2_decode", _gemma2, "Gemma2ForCausalLM",
         "scores capped at 2 by tanh; every second layer with a window; symbolic length",
         "softcap symbolic"),
        ("gptoss_decode", _gptoss, "GptOssForCausalLM",
         "attention sinks: one more logit a head, cut off behind the softmax; experts as batched "
         "products; symbolic length", "sink symbolic"),
    ):  # fmt: skip
        recipe(
            name,
            build,
            source=f"Hugging Face transformers, {model}",
            special=f"{special}; 4 query heads on 2",
            tags=f"{name.split('_')[0]} rotary rms_norm gqa decode float32 {tags}",
        )


_register()
