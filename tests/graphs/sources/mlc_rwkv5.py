"""RWKV-5 from mlc-llm's model file: a wkv PrimFunc, nn.GroupNorm over the last axis, token shift as
PrimFunc."""

from __future__ import annotations

from functools import partial
from typing import Any

from .recipe import Source, recipe
from .rwkv_package import SIZES, make_module, version

TOKENS = {"small": 6, "real": 128, "1b5": 128}


def _rule(name: str, shape: tuple[int, ...]) -> list[Any]:
    if "time_mix" in name:
        return ["uniform", 0.1, 0.9]
    if name.endswith("time_decay"):
        return ["uniform", 0.3, 0.99]
    if name.endswith("time_faaaa"):
        return ["normal", 0.0, 0.5]
    if name.endswith("bias"):
        return ["normal", 0.0, 0.1]
    if len(shape) == 1:
        return ["normal", 1.0, 0.1]
    if "embeddings" in name:
        return ["normal", 0.0, 1.0]
    return ["normal", 0.0, round(shape[-1] ** -0.5, 4)]


def _export(size: str, mode: str, dtype: str, threads: bool) -> tuple[Any, list[str]]:
    from tvm.relax.frontend import nn

    from .mlc import PlainState, export, install, serial

    install()
    import mlc_llm.model.rwkv5.rwkv5_model as modelling

    if not hasattr(modelling, "thread_bound"):
        modelling.thread_bound = modelling.create_wkv5_func
    modelling.create_wkv5_func = (
        modelling.thread_bound
        if threads
        else lambda *args, **names: serial(modelling.thread_bound(*args, **names))
    )
    dims = SIZES[size]
    width, heads = dims["width"], dims["heads"]
    config = modelling.RWKV5Config(
        hidden_size=width,
        intermediate_size=dims["ffn"],
        num_hidden_layers=dims["layers"],
        vocab_size=dims["vocab"],
        model_version="5_2",
        head_size=width // heads,
    )
    model = modelling.RWKV5_ForCausalLM(config)
    model.to(dtype)
    for block in model.model.blocks:
        block.attention.to(dtype)
    length: Any = 1 if mode == "decode" else "seq_len"
    head = width // heads
    arguments: dict[str, Any] = {"input_ids": nn.spec.Tensor([1, length], "int32")}
    for layer in range(dims["layers"]):
        arguments[f"att_x_{layer}"] = nn.spec.Tensor([1, width], dtype)
        arguments[f"att_kv_{layer}"] = nn.spec.Tensor([1, heads, head, head], "float32")
        arguments[f"ffn_x_{layer}"] = nn.spec.Tensor([1, width], dtype)

    def call(model: Any, tensors: dict[str, Any]) -> Any:
        ids = tensors.pop("input_ids")
        state = PlainState(list(tensors.values()))
        logits, state = model.forward(model.embed(ids), state)
        return (logits, *state.tensors)

    return export(model, mode, arguments, call)


def _reference(size: str, mode: str, arrays: dict[str, Any], dtype: str) -> list[Any]:
    """The same numbers through the PyPI package's RWKV-5.2 code, its ln_x eps set to mlc-llm's
    1e-5."""
    import numpy as np
    import torch

    from ..build import run_wide

    dims = SIZES[size]
    wide = {name: torch.from_numpy(np.asarray(a, np.float64)) for name, a in arrays.items()}
    prefix = "model.model."
    pre = [wide[f"{prefix}blocks.0.pre_ln.{part}"] for part in ("weight", "bias")]
    weights = {
        "emb_weight": torch.nn.functional.layer_norm(
            wide[prefix + "embeddings.weight"], (dims["width"],), *pre, 1e-5
        ),
        "ln_out_weight": wide[prefix + "ln_out.weight"],
        "ln_out_bias": wide[prefix + "ln_out.bias"],
        "head_weight": wide["model.head.weight"].t(),
    }
    long = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
    for layer in range(dims["layers"]):
        block, target = f"{prefix}blocks.{layer}.", f"blocks_{layer}_"
        for norm in ("ln1", "ln2"):
            for part in ("weight", "bias"):
                weights[f"{target}{norm}_{part}"] = wide[f"{block}{norm}.{part}"]
        for part in ("weight", "bias"):
            weights[f"{target}att_ln_x_{part}"] = wide[f"{block}attention.ln_x.{part}"]
        for short, name in (*long.items(), ("o", "output")):
            weights[f"{target}att_{name}_weight"] = wide[f"{block}attention.{name}.weight"].t()
            if short != "o":
                mix = wide[f"{block}attention.time_mix_{name}"]
                weights[f"{target}att_time_mix_{short}"] = mix
        for name in ("key", "receptance", "value"):
            weights[f"{target}ffn_{name}_weight"] = wide[f"{block}feed_forward.{name}.weight"].t()
        for short in ("k", "r"):
            mix = wide[f"{block}feed_forward.time_mix_{long[short]}"]
            weights[f"{target}ffn_time_mix_{short}"] = mix
        weights[target + "att_time_decay"] = wide[block + "attention.time_decay"]
        weights[target + "att_time_first"] = wide[block + "attention.time_faaaa"]
    kind = getattr(torch, dtype)
    module = make_module("5", size, "decode" if mode == "decode" else "prefill6").to(kind)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name].reshape(parameter.shape))
    state = []
    for layer in range(dims["layers"]):
        # mlc-llm keeps the state as (value, key), the package as (key, value).
        state.append(wide[f"att_x_{layer}"][0].to(kind))
        state.append(wide[f"att_kv_{layer}"][0].transpose(1, 2).contiguous().to(kind))
        state.append(wide[f"ffn_x_{layer}"][0].to(kind))
    tokens = torch.from_numpy(arrays["input_ids"][0].astype(np.int64))
    original = torch.nn.functional.group_norm
    torch.nn.functional.group_norm = lambda *args, **names: original(
        *args, **{**names, "eps": 1e-5}
    )
    try:
        with torch.no_grad():
            logits, *new = (
                run_wide(module, (tokens, state)) if dtype == "float64" else module(tokens, state)
            )
    finally:
        torch.nn.functional.group_norm = original
    outputs = [logits.reshape(-1, dims["vocab"])[-1].reshape(1, 1, -1).numpy()]
    for index, value in enumerate(new):
        value = value.transpose(1, 2) if index % 3 == 1 else value
        outputs.append(value.contiguous()[None].numpy())
    return outputs


def _with_aliases(mod: Any, method: str) -> Any:
    """Binds every third result a second time (``b = a``) and uses the copy from there on, as chains
    of frontend passes leave it behind."""
    from tvm import relax

    @relax.expr_functor.mutator
    class Alias(relax.PyExprMutator):
        def __init__(self) -> None:
            super().__init__(mod)
            self.count = 0

        def visit_var_binding_(self, binding: Any) -> None:
            super().visit_var_binding_(binding)
            self.count += 1
            if self.count % 3 == 0 and isinstance(binding.var, relax.DataflowVar):
                first = self.get_var_remap(binding.var)
                first = binding.var if first is None else first
                self.set_var_remap(binding.var, self.builder_.emit(first))

    mutator = Alias()
    mod[method] = mutator.visit_expr(mod[method])
    return mod


def _build(
    size: str, mode: str, dtype: str = "float32", threads: bool = False, aliases: bool = False
) -> Source:
    from .mlc import VERSION, symbol_names

    mod, weights = _export(size, mode, dtype, threads)
    if aliases:
        mod = _with_aliases(mod, mode)
    params = mod[mode].params
    states = len(params) - len(weights)
    specs: list[dict[str, Any]] = []
    for index, param in enumerate(params):
        shape = tuple(int(getattr(e, "value", 0)) for e in param.ty.shape.values)
        if index == 0:
            specs.append({"draw": ["integers", 0, SIZES[size]["vocab"]]})
        elif index < states:
            specs.append({"draw": ["normal", 0.0, 0.3]})
        else:
            name = weights[index - states]
            specs.append({"draw": _rule(name, shape), "weight": True, "role": name})

    def reference(arrays: dict[str, Any], kind: str) -> list[Any]:
        named = {
            (weights[i - states] if i >= states else param.name): arrays[param.name]
            for i, param in enumerate(params)
        }
        return _reference(size, mode, named, kind)

    return Source(
        mod=mod,
        specs=specs,
        reference=reference,
        function=mode,
        version=f"{VERSION}; golden outputs from {version()}",
        symbols=symbol_names(mod, mode, {"seq_len": TOKENS[size]}),
        runs_on=("cuda",) if threads else ("llvm", "cuda"),
    )


def _register() -> None:
    loops = "its thread-bound loops made serial"
    for name, mode, options, special in (
        ("decode", "decode", {}, f"one token; {loops}"),
        ("decode_fp16", "decode", {"dtype": "float16"},
         f"weights and activations float16, wkv and norm float32; {loops}"),
        ("decode_alias", "decode", {"aliases": True},
         f"every third result bound again (b = a); {loops}"),
        ("decode_threads", "decode", {"threads": True},
         "wkv bound to GPU threads, as mlc-llm ships it"),
        ("prefill", "prefill", {}, f"symbolic number of tokens; {loops}"),
        ("prefill_threads", "prefill", {"threads": True},
         "symbolic number of tokens; wkv bound to GPU threads, as mlc-llm ships it"),
    ):  # fmt: skip
        recipe(
            f"rwkv5_mlc_{name}",
            partial(_build, mode=mode, **options),
            source="mlc-llm, model/rwkv5",
            special=(
                f"wkv PrimFunc, nn.GroupNorm with channel_axis=-1 and axes=[], token shift "
                f"PrimFunc; {special}"
            ),
            tags=(
                f"rwkv rwkv5 wkv group_norm state mlc primfunc {mode} "
                f"{options.get('dtype', 'float32')} "
            )
            + ("symbolic" if mode == "prefill" else ""),
        )


_register()
