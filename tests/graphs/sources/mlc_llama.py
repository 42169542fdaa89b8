"""Llama from mlc-llm's model file: fused QKV, a rotary PrimFunc, fused gate and up, group-quantised
weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, recipe

SIZES = {
    "small": {"hidden": 64, "ffn": 160, "heads": 4, "kv": 2, "layers": 2, "vocab": 97},
    "real": {"hidden": 768, "ffn": 2048, "heads": 12, "kv": 4, "layers": 12, "vocab": 8192},
}
PAST = {"small": 7, "real": 127}
# mlc-llm's own modes by the same names, and two of the same class in float32 and with 8 bits.
QUANT = {
    "q4f16_0": ("int4", "float16", "KN"),
    "q4f16_1": ("int4", "float16", "NK"),
    "q4f32_1": ("int4", "float32", "NK"),
    "q8f32_0": ("int8", "float32", "KN"),
}


def _export(size: str, dtype: str, quant: str) -> tuple[Any, list[str], Any]:
    from tvm.relax.frontend import nn

    from .mlc import PlainCache, export, install

    install()
    import mlc_llm.model.llama.llama_model as modelling

    dims = SIZES[size]
    config = modelling.LlamaConfig(
        hidden_size=dims["hidden"],
        intermediate_size=dims["ffn"],
        num_attention_heads=dims["heads"],
        num_key_value_heads=dims["kv"],
        num_hidden_layers=dims["layers"],
        rms_norm_eps=1e-5,
        vocab_size=dims["vocab"],
        position_embedding_base=10000,
        context_window_size=2048,
    )
    model = modelling.LlamaForCausalLM(config)
    model.to(dtype)
    scheme = None
    if quant:
        import mlc_llm.quantization.group_quantization as quantisation
        from mlc_llm.loader import QuantizeMapping

        bits, model_dtype, layout = QUANT[quant]
        scheme = quantisation.GroupQuantize(
            name=quant,
            kind="group-quant",
            group_size=32,
            quantize_dtype=bits,
            storage_dtype="uint32",
            model_dtype=model_dtype,
            linear_weight_layout=layout,
        )
        model = scheme.quantize_model(model, QuantizeMapping({}, {}), "")
    head = dims["hidden"] // dims["heads"]
    arguments: dict[str, Any] = {
        "input_ids": nn.spec.Tensor([1, 1], "int32"),
        "positions": nn.spec.Tensor([1], "int32"),
    }
    for layer in range(dims["layers"]):
        for name in ("key", "value"):
            shape = [1, "past", dims["kv"], head]
            arguments[f"{name}_{layer}"] = nn.spec.Tensor(shape, dtype)

    def call(model: Any, tensors: dict[str, Any]) -> Any:
        from tvm.relax.frontend.nn import op

        ids, positions = tensors.pop("input_ids"), tensors.pop("positions")
        cache = PlainCache(positions, list(tensors.values()), dims["kv"], 10000.0)
        embedded = op.reshape(model.embed(op.reshape(ids, (1,))), (1, 1, dims["hidden"]))
        logits = model.batch_forward(embedded, cache)
        return (logits, *cache.past)

    mod, weights = export(model, "decode", arguments, call)
    return mod, weights, scheme


def _unpack(packed: Any, scale: Any, bits: int, axis: int) -> Any:
    """mlc-llm's group quantisation undone: elements of a word from the low bits up, offset by the
    largest integer."""
    import numpy as np

    per_word = 32 // bits
    index = np.arange(packed.shape[axis] * per_word)
    words = np.take(packed, index // per_word, axis=axis).astype(np.int64)
    shift = (index % per_word) * bits
    shift = shift[:, None] if axis == 0 else shift[None, :]
    values = ((words >> shift) & ((1 << bits) - 1)) - ((1 << (bits - 1)) - 1)
    return values * np.take(scale.astype(np.float64), index // 32, axis=axis)


def _reference(size: str, quant: str, arrays: dict[str, Any], dtype: str) -> list[Any]:
    """The same numbers through Hugging Face's Llama."""
    import numpy as np
    import torch
    import transformers

    from .hf_common import Decode, build_model

    dims = SIZES[size]
    head = dims["hidden"] // dims["heads"]
    kind = getattr(torch, dtype)

    def weight(name: str) -> Any:
        if not quant or f"model.{name}.weight" in arrays:
            return torch.from_numpy(np.asarray(arrays[f"model.{name}.weight"], np.float64))
        packed, scale = (arrays[f"model.{name}.{part}"] for part in ("q_weight", "q_scale"))
        bits, _, layout = QUANT[quant]
        linear = not name.endswith("embed_tokens")
        axis = 0 if layout == "KN" and linear else 1
        dense = torch.from_numpy(_unpack(packed, scale, int(bits[3:]), axis))
        return dense.t() if axis == 0 else dense

    config = transformers.LlamaConfig(
        hidden_size=dims["hidden"],
        intermediate_size=dims["ffn"],
        num_attention_heads=dims["heads"],
        num_key_value_heads=dims["kv"],
        num_hidden_layers=dims["layers"],
        rms_norm_eps=1e-5,
        vocab_size=dims["vocab"],
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=None,
    )
    model = build_model(transformers.LlamaForCausalLM, config, torch.float64)
    filled = {
        "model.embed_tokens.weight": weight("model.embed_tokens"),
        "model.norm.weight": weight("model.norm"),
        "lm_head.weight": weight("lm_head"),
    }
    for layer in range(dims["layers"]):
        block = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            filled[f"{block}{norm}.weight"] = weight(block + norm)
        filled[f"{block}self_attn.o_proj.weight"] = weight(block + "self_attn.o_proj")
        filled[f"{block}mlp.down_proj.weight"] = weight(block + "mlp.down_proj")
        rows = [head * dims["heads"], head * dims["kv"], head * dims["kv"]]
        parts = weight(block + "self_attn.qkv_proj").split(rows)
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            filled[f"{block}self_attn.{name}.weight"] = part
        for name, part in zip(
            ("gate_proj", "up_proj"),
            weight(block + "mlp.gate_up_proj").split(dims["ffn"]),
            strict=True,
        ):
            filled[f"{block}mlp.{name}.weight"] = part
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(filled[name])

    def cached(name: str) -> Any:
        return torch.from_numpy(np.asarray(arrays[name], np.float64)).transpose(1, 2).contiguous()

    past = [(cached(f"key_{i}"), cached(f"value_{i}")) for i in range(dims["layers"])]
    ids = torch.from_numpy(arrays["input_ids"].astype(np.int64))
    from ..build import run_wide

    wrapped = Decode(model, "past_key_values")
    if dtype == "float64":
        logits, *new = run_wide(wrapped, (ids, past))
    else:
        wrapped = wrapped.to(kind)
        with torch.no_grad():
            logits, *new = wrapped(ids, [(k.to(kind), v.to(kind)) for k, v in past])
    return [logits.numpy(), *(each.transpose(1, 2).contiguous().numpy() for each in new)]


def _rule(name: str, dtype: str, fan_in: int, bits: int) -> list[Any]:
    if name.endswith("q_weight"):
        return ["words"]
    if name.endswith("q_scale"):
        # Integers are uniform up to `largest`: this scale gives weights of deviation 1/sqrt(fan
        # in).
        largest = (1 << (bits - 1)) - 1
        middle = (1.0 if "embed" in name else fan_in**-0.5) * 3**0.5 / largest
        return ["uniform", round(0.7 * middle, 6), round(1.3 * middle, 6)]
    if "norm" in name:
        return ["normal", 1.0, 0.1]
    return ["normal", 0.0, 0.7 if "embed" in name else round(fan_in**-0.5, 4)]


def _build(size: str, dtype: str = "float32", quant: str = "") -> Source:
    from .hf_common import VERSION as HF
    from .mlc import VERSION, symbol_names

    mod, weights, _ = _export(size, dtype, quant)
    dims = SIZES[size]
    bits = int(QUANT[quant][0][3:]) if quant else 0
    params = mod["decode"].params
    given = len(params) - len(weights)
    specs: list[dict[str, Any]] = []
    for index in range(len(params)):
        if index == 0:
            specs.append({"draw": ["integers", 0, dims["vocab"]]})
        elif index == 1:  # one new token, after the past of the golden run
            specs.append({"draw": ["integers", PAST[size], PAST[size] + 1]})
        elif index < given:
            specs.append({"draw": ["normal", 0.0, 1.0]})
        else:
            name = weights[index - given]
            fan_in = dims["ffn"] if "down_proj" in name else dims["hidden"]
            rule = _rule(name, dtype, fan_in, bits)
            specs.append({"draw": rule, "weight": True, "role": name})

    def reference(arrays: dict[str, Any], kind: str) -> list[Any]:
        named = {
            (weights[i - given] if i >= given else param.name): arrays[param.name]
            for i, param in enumerate(params)
        }
        return _reference(size, quant, named, kind)

    return Source(
        mod=mod,
        specs=specs,
        reference=reference,
        function="decode",
        version=f"{VERSION}; golden outputs from {HF}",
        symbols=symbol_names(mod, "decode", {"past": PAST[size], "vocab_size": dims["vocab"]}),
    )


def _register() -> None:
    common = (
        "fused QKV of 4 query and 2 kv heads into TVM's rotary PrimFunc; (B,T,K,D) cache of "
        "symbolic length"
    )
    for name, options, special, tags in (
        ("decode", {}, "plain weights; symbolic vocabulary", "float32"),
        ("decode_fp16", {"dtype": "float16"}, "float16, softmax float32", "float16"),
        ("decode_q4f16_0", {"dtype": "float16", "quant": "q4f16_0"},
         "4-bit weights packed along K, (K, N)", "float16 quant q4"),
        ("decode_q4f16_1", {"dtype": "float16", "quant": "q4f16_1"},
         "4-bit weights, (N, K), dequantize then transpose", "float16 quant q4"),
        ("decode_q4f32_1", {"dtype": "float32", "quant": "q4f32_1"},
         "4-bit weights, (N, K), float32 scales", "float32 quant q4"),
        ("decode_q8f32_0", {"dtype": "float32", "quant": "q8f32_0"},
         "8-bit weights, (K, N), float32 scales", "float32 quant q8"),
    ):  # fmt: skip
        recipe(
            f"llama_mlc_{name}",
            partial(_build, **options),
            source="mlc-llm, model/llama" + (" and quantization/group" if "quant" in tags else ""),
            special=f"{common}; {special}",
            tags=f"llama rotary rms_norm gqa mlc primfunc symbolic decode {tags}",
        )


_register()
