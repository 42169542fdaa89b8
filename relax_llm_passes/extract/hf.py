"""A Hugging Face configuration folder to a Relax module, weights as inputs."""

from __future__ import annotations

import difflib
import json
import os
from typing import TYPE_CHECKING, Any

from ..errors import InputError, UnknownNameError
from ..signature import WEIGHT_NAMES_ATTR
from .masks import mask_maker
from .require import require
from .torch_import import export_module, import_exported

if TYPE_CHECKING:
    import tvm

__all__ = ["MODES", "extract_hf"]

MODES = ("prefill", "prefill_cache", "decode", "generate")


def _load_model(folder: str | os.PathLike[str], dtype: str) -> Any:
    """A model of the folder's configuration, with weights of any value: they become inputs."""
    torch = require("torch", "extracting a model")
    transformers = require("transformers", "extracting a Hugging Face model")
    path = os.fspath(folder)
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UnknownNameError("dtype", dtype, ["float32", "float16", "bfloat16"])
    _check_config(path, transformers)
    try:
        # No code from the folder is run.
        options = {"trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **options)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise InputError(f"{path}: {config.model_type} is no causal language model")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind, **options)
    except InputError:
        raise
    except Exception as err:  # whatever a model's constructor raises on sizes that do not fit
        text = str(err).strip().splitlines() or [""]
        raise InputError(
            f"transformers cannot build a causal model from {path}: {type(err).__name__}: {text[0]}"
        ) from err
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def _check_config(path: str, transformers: Any) -> None:
    """Say in one line what transformers says in twenty."""
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        raise InputError(f"{path} is no Hugging Face model folder: it has no config.json")
    try:
        with open(file, encoding="utf-8") as text:
            config = json.load(text)
    except (OSError, ValueError) as err:
        raise InputError(f"{file} cannot be read: {err}") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{file} names no model_type; expected for example 'llama' or 'mpt'")
    if kind not in transformers.CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, list(transformers.CONFIG_MAPPING), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"{file}: transformers {transformers.__version__} knows no model_type {kind!r}{hint}"
        )


def _cache_argument(model: Any) -> str:
    """What this model calls its cache: newer ones say ``cache``."""
    import inspect

    names = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise InputError(
        f"{type(model).__name__} takes no key/value cache; extract it with mode 'prefill'"
    )


def _wrap(model: Any, mode: str) -> Any:
    """A module with tensors in and out, masks and caches made in a way that the importer
    understands."""
    torch: Any = require("torch", "extracting a model")
    transformers: Any = require("transformers", "extracting a Hugging Face model")
    argument = "" if mode == "prefill" else _cache_argument(model)

    mask_for = mask_maker(model)

    def layer_of(key: Any, value: Any) -> Any:
        layer = transformers.cache_utils.DynamicLayer()
        layer.dtype, layer.device = key.dtype, key.device
        layer.keys, layer.values, layer.is_initialized = key, value, True
        return layer

    class EmptyCache(transformers.DynamicCache):
        """Known to be empty, so nothing is concatenated to an empty tensor (which TVM cannot
        import)."""

        def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
            self.layers.append(layer_of(key, value))
            return key, value

        def get_seq_length(self, layer_idx: int = 0, **_: Any) -> int:
            return 0

    def flat(cache: Any) -> tuple[Any, ...]:
        return tuple(each for layer in cache.layers for each in (layer.keys, layer.values))

    class Prefill(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            mask = mask_for(ids, 0)
            if not argument:
                return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            cache = EmptyCache()
            out = self.model(
                input_ids=ids, attention_mask=mask, use_cache=True, **{argument: cache}
            )
            return (out.logits, *flat(cache))

    class Decode(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, past: Any) -> Any:
            cache = transformers.DynamicCache()
            for key, value in past:
                cache.layers.append(layer_of(key, value))
            out = self.model(
                input_ids=ids,
                attention_mask=mask_for(ids, past[0][0].shape[2]),
                use_cache=True,
                **{argument: cache},
            )
            return (out.logits, *flat(cache))

    return Decode() if mode == "decode" else Prefill()


def _cache_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key/value heads and head width, whatever the configuration calls them."""
    layers = int(config.num_hidden_layers)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    width = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    return layers, kv_heads, int(width)


def extract_hf(
    folder: str | os.PathLike[str],
    *,
    mode: str = "decode",
    dtype: str = "float32",
    batch: int = 1,
    keep_attention: bool = False,
    longest: int = 0,
) -> tvm.IRModule:
    """Make a Relax module from a Hugging Face configuration folder.

    Parameters
    ----------
    folder : path
        Holds ``config.json``; weights are not read, they become inputs of the function.
    mode : str
        "prefill": tokens (batch, n) to logits, n symbolic. "prefill_cache": keys and values (batch,
        kv heads, n, head width) of every layer as well. "decode": one token and the keys and values
        of a past of symbolic length. "generate": the last two, as functions "prefill" and "decode".
    dtype : str
        Type of weights and activations.
    batch : int
        Number of sequences.
    keep_attention : bool
        Attention stays one operator, see :func:`import_exported`.
    longest : int
        Upper bound of the symbolic length; by default the model's own, less 8 for new tokens.

    Returns
    -------
    tvm.IRModule
        Function ``main`` ("prefill" and "decode" in mode "generate"); its attribute ``num_input``
        says how many parameters come before the weights, ``relax_llm.weight_names`` under which
        other names files hold weights.

    Raises
    ------
    InputError
        When the ``extract`` extra is missing, the folder is no model folder, or the model cannot be
        traced or imported.
    UnknownNameError
        For an unknown mode or dtype.
    """
    require("torch", "extracting a model")
    if mode not in MODES:
        raise UnknownNameError("extraction mode", mode, MODES)
    if batch < 1:
        raise InputError(f"batch must be positive, got {batch}")
    model = _load_model(folder, dtype)
    limit = longest or next(
        (
            int(getattr(model.config, name)) - 8
            for name in ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
            if getattr(model.config, name, None)
        ),
        2040,
    )
    if limit < 4:
        raise InputError(f"the longest length must be at least 4, got {limit}")
    if mode == "generate":
        from ..merging import merge_modules

        parts = {"prefill": "prefill_cache", "decode": "decode"}
        return merge_modules(
            {
                name: _extract(model, part, batch, limit, keep_attention)
                for name, part in parts.items()
            }
        )
    return _extract(model, mode, batch, limit, keep_attention)


def _extract(model: Any, mode: str, batch: int, limit: int, keep_attention: bool) -> tvm.IRModule:
    """One function of the model, lengths up to `limit`."""
    torch = require("torch", "extracting a model")
    module = _wrap(model, mode)
    if mode != "decode":
        ids = torch.zeros(batch, 3, dtype=torch.int64)
        size = torch.export.Dim("new", min=2, max=limit)
        program = _export_either(module, (ids,), {"ids": {1: size}}, {"ids": {1: _auto()}})
    else:
        layers, kv_heads, width = _cache_shape(model.config)
        # A tensor each: torch.export takes arguments that are one tensor for one input.
        past = [
            tuple(torch.zeros(batch, kv_heads, 3, width, dtype=model.dtype) for _ in range(2))
            for _ in range(layers)
        ]
        ids = torch.zeros(batch, 1, dtype=torch.int64)
        size = torch.export.Dim("past", min=2, max=limit)
        declared = {"ids": None, "past": [({2: size}, {2: size})] * layers}
        automatic = {"ids": None, "past": [({2: _auto()}, {2: _auto()})] * layers}
        program = _export_either(module, (ids, past), declared, automatic)
    mod = import_exported(program, keep_attention=keep_attention)
    names = _file_names(module, program)
    if names:
        mod["main"] = mod["main"].with_attr(WEIGHT_NAMES_ATTR, json.dumps(names))
    return mod


def _file_names(module: Any, program: Any) -> dict[str, list[str]]:
    """From a parameter of the function to the names that files may hold its tensor under, where
    there is more than its own: tied weights are stored once, and some models store weights under
    older names (GPT-NeoX: lm_head as embed_out)."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, Any] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        tensors[name] = tensor
        own = name.removeprefix("model.")
        known = names.setdefault(id(tensor), [])
        known += [n for n in (own, *_older_names(module.model, own, tensor)) if n not in known]
    return {
        variable: names[id(tensors[name])]
        for variable, name in program.graph_signature.inputs_to_parameters.items()
        if name in tensors and len(names[id(tensors[name])]) > 1
    }


def _older_names(model: Any, name: str, tensor: Any) -> list[str]:
    """The name under which `save_pretrained` stores a tensor, when it only renames it."""
    loading: Any = require("transformers.core_model_loading", "extracting a Hugging Face model")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        return []
    try:
        stored = revert(model, {name: tensor})
    except Exception:  # a conversion that needs other tensors as well is no renaming
        return []
    return [key for key, value in stored.items() if value is tensor]


def _auto() -> Any:
    return require("torch", "extracting a model").export.Dim.AUTO


def _export_either(module: Any, args: Any, declared: Any, automatic: Any) -> Any:
    """Declared ranges where torch can work with them (ALiBi models need the bound), else its
    own."""
    try:
        return export_module(module, args, declared)
    except InputError as err:
        if "Constraints violated" not in str(err):
            raise
        # torch does not prove that grouped heads have increasing strides over the whole declared
        # range.
        return export_module(module, args, automatic)
