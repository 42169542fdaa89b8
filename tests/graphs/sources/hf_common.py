"""Wrappers that give Hugging Face models a plain signature: tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from .recipe import Source

VERSION = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"


def filled_cache(past: Any) -> transformers.DynamicCache:
    """A cache holding given (key, value) pairs; an empty one would be exported as ``cat([empty,
    k])``."""
    cache = transformers.DynamicCache()
    for key, value in past:
        layer = transformers.cache_utils.DynamicLayer()
        layer.dtype, layer.device = key.dtype, key.device
        layer.keys, layer.values, layer.is_initialized = key, value, True
        cache.layers.append(layer)
    return cache


def flat_cache(cache: Any) -> tuple[torch.Tensor, ...]:
    """Key and value of every layer, in order."""
    return tuple(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


def causal_mask(ids: torch.Tensor, past: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive (1, 1, S, past + S) mask; the query is the tail of the keys.

    Explicit, because the mask that transformers makes itself checks for packed sequences with a
    cumulative sum of booleans, which TVM cannot compile.
    """
    length = ids.shape[1]
    lowest = torch.finfo(dtype).min
    return torch.full((length, past + length), lowest, dtype=dtype).triu(past + 1)[None, None]


class Prefill(torch.nn.Module):
    """ids (B, S) -> logits; `cache` also returns keys and values of each layer."""

    def __init__(self, model: torch.nn.Module, cache: str = "") -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, ids: torch.Tensor) -> Any:
        mask = causal_mask(ids, 0, self.model.dtype)
        if not self.cache:
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        kept = _KeepingCache(self.model.config.num_hidden_layers)
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **{self.cache: kept})
        return (out.logits, *flat_cache(kept))


class _KeepingCache(transformers.DynamicCache):
    """A cache that is known to be empty: update stores what it is given."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.count = layers

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        layer = transformers.cache_utils.DynamicLayer()
        layer.dtype, layer.device = key_states.dtype, key_states.device
        layer.keys, layer.values, layer.is_initialized = key_states, value_states, True
        self.layers.append(layer)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, **_: Any) -> int:
        return 0


class Decode(torch.nn.Module):
    """ids (B, S), past pairs (B, K, P, D) -> logits, grown pairs."""

    def __init__(self, model: torch.nn.Module, cache: str, mask: bool = True) -> None:
        super().__init__()
        self.model = model
        self.cache = cache
        self.mask = mask

    def forward(self, ids: torch.Tensor, past: Any) -> Any:
        kept = filled_cache(past)
        extra = {}
        if self.mask:
            extra["attention_mask"] = causal_mask(ids, past[0][0].shape[2], self.model.dtype)
        out = self.model(input_ids=ids, use_cache=True, **{self.cache: kept}, **extra)
        return (out.logits, *flat_cache(kept))


def past_of(
    layers: int, batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Example (key, value) pairs; their numbers come from the drawing rules later."""
    return [
        (
            torch.zeros(batch, heads, length, head_dim, dtype=dtype),
            torch.zeros(batch, heads, length, head_dim, dtype=dtype),
        )
        for _ in range(layers)
    ]


def build_model(cls: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A model for inference whose weights are filled in later."""
    model = cls(config).eval().to(dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def decoder(
    model: torch.nn.Module,
    mode: str,
    *,
    kv_heads: int,
    head_dim: int,
    lengths: tuple[int, int],
    cache: str = "past_key_values",
    new: int = 1,
    batch: int = 1,
    symbolic_batch: bool = False,
    keep_attention: bool = False,
    longest: int = 240,
) -> Source:
    """The source of one graph of a Hugging Face decoder.

    Parameters
    ----------
    model : torch.nn.Module
        A ``...ForCausalLM``.
    mode : str
        "prefill", "prefill_cache" or "decode"; the length of the prompt, or of the past, is
        symbolic.
    kv_heads, head_dim : int
        Shape of the cache.
    lengths : tuple of int
        Prompt length and past length of the golden run.
    cache : str
        The model's own name for its cache argument.
    new : int
        Tokens of a decode step.
    batch : int
        Batch of the golden run.
    symbolic_batch : bool
        Whether the batch is symbolic, too.
    keep_attention : bool
        Whether attention stays one operator.
    longest : int
        Upper bound that is declared for the symbolic length.
    """
    prefill, past = lengths
    layers = model.config.num_hidden_layers
    tokens = ["integers", 0, model.config.vocab_size]
    batch_dim = {0: torch.export.Dim("batch", min=2, max=64)} if symbolic_batch else {}
    if mode != "decode":
        ids = torch.zeros(batch, prefill, dtype=torch.int64)
        dynamic: Any = {"ids": {**batch_dim, 1: torch.export.Dim("new", min=2, max=longest)}}
        wrapped: torch.nn.Module = Prefill(model, cache if mode == "prefill_cache" else "")
        return Source(wrapped, (ids,), [tokens], dynamic, VERSION, keep_attention=keep_attention)
    pairs = past_of(layers, batch, kv_heads, past, head_dim, model.dtype)
    ids = torch.zeros(batch, new, dtype=torch.int64)
    length = {**batch_dim, 2: torch.export.Dim("past", min=2, max=longest)}
    dynamic = {"ids": batch_dim or None, "past": [(length, length)] * layers}
    rules = [tokens] + [["normal", 0.0, 1.0]] * (2 * layers)
    wrapped = Decode(model, cache)
    grouped = kv_heads != model.config.num_attention_heads
    return Source(
        wrapped,
        (ids, pairs),
        rules,
        dynamic,
        VERSION,
        auto=grouped,
        keep_attention=keep_attention,
    )
