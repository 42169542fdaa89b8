"""Wrappers that give Hugging Face models a plain signature: tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VERSION = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"


def filled_cache(past: Any) -> transformers.DynamicCache:
    """A cache holding given (key, value) pairs; an empty one would be exported as ``cat([empty, k])``."""
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

    Explicit, because the mask that transformers makes itself checks for packed sequences with a cumulative sum
    of booleans, which TVM cannot compile.
    """
    length = ids.shape[1]
    lowest = torch.finfo(dtype).min
    return torch.full((length, past + length), lowest, dtype=dtype).triu(past + 1)[None, None]


class _FirstLayer:
    """Takes the place of an empty cache layer: the first update stores instead of concatenating."""


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
        out = self.model(
            input_ids=ids, attention_mask=mask, use_cache=True, **{self.cache: kept}
        )
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
