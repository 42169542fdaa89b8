"""Which attention masks a Hugging Face model's layers need, as additive tensors.

transformers' own masks look for packed sequences by a cumulative sum of booleans, which TVM cannot
compile. A mask of four dimensions that is given is taken as it is, for every layer alike: models
with layers of several kinds take a dictionary from kind to mask.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from .require import require

__all__ = ["mask_maker"]

_FULL = "full_attention"
_TAKES_DICT = re.compile(r"isinstance\([^\n]*mask[^\n]*\bdict\)")


def mask_maker(model: Any) -> Callable[[Any, int], Any]:
    """Return `mask(ids, past)`: what the model takes as its attention_mask.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its configuration names the kinds of its layers (`layer_types`), windows and chunks.

    Returns
    -------
    callable
        For tokens (B, S) behind `past` others: 0 where a token sees another, the lowest number
        elsewhere, (1 or B, 1, S, past + S); or a dictionary of these.

    Raises
    ------
    UnsupportedError
        For a model that takes one mask but has layers of several kinds.
    """
    torch: Any = require("torch", "extracting a model")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    config = model.config if config is None else config
    source = inspect.getsource(sys.modules[type(model).__module__])
    kinds = _kinds(model, config, source)
    by_kind = bool(_TAKES_DICT.search(source)) and bool(getattr(config, "layer_types", None))
    if not by_kind and len(kinds) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} has layers of {len(kinds)} kinds ({', '.join(sorted(kinds))}) "
            "and takes one attention mask: its masks cannot be made"
        )

    def one(kind: str, ids: Any, past: int) -> Any:
        length, lowest = ids.shape[1], torch.finfo(model.dtype).min
        full = torch.full((length, past + length), lowest, dtype=model.dtype)
        mask = full.triu(past + 1)
        if kind == "sliding_attention":  # the last `window` tokens, itself among them
            mask = mask + full.tril(past - int(config.sliding_window))
        elif kind == "chunked_attention":
            size = int(config.attention_chunk_size)
            rows, columns = torch.arange(past, past + length), torch.arange(past + length)
            before = columns[None, :] // size < rows[:, None] // size
            mask = torch.where(before, lowest, mask)
        mask = mask[None, None]
        return mask if ids.shape[0] == 1 else mask.expand(ids.shape[0], 1, -1, -1)

    def masks(ids: Any, past: int) -> Any:
        if not by_kind:
            return one(next(iter(kinds)), ids, past)
        return {kind: one(kind, ids, past) for kind in sorted(kinds)}

    return masks


def _kinds(model: Any, config: Any, source: str) -> set[str]:
    """Return the kinds of attention among a model's layers."""
    types = getattr(config, "layer_types", None)
    if types:
        kinds = {str(t) for t in types}
        known = {_FULL, "sliding_attention", "chunked_attention"}
        if kinds - known:
            raise UnsupportedError(
                f"{type(model).__name__} has layers of type {', '.join(sorted(kinds - known))}; "
                f"masks can be made for {', '.join(sorted(known))}"
            )
        return kinds
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True) is not False
    if window and used and "sliding_window" in source:
        return {"sliding_attention"}
    return {_FULL}
