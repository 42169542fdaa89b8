"""Masks of layers with windows and chunks: an extracted model sees what the model itself sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes import default_pipeline
from relax_llm_passes.errors import UnsupportedError
from relax_llm_passes.targets import parse_target

torch = pytest.importorskip("torch", reason="the extract extra is not installed")
transformers = pytest.importorskip("transformers", reason="the extract extra is not installed")

from relax_llm_passes.extract import hf  # noqa: E402
from relax_llm_passes.extract.masks import mask_maker  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
# A window or chunk of 8 in some layers or in all.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8, "head_dim": 16},
    "Gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 24},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "GptOss": {"sliding_window": 8, "head_dim": 16, "num_local_experts": 2,
               "num_experts_per_tok": 1},
}  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() >= 2:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def tokens(count: int, batch: int = 1) -> Any:
    return torch.randint(1, 97, (batch, count), generator=torch.Generator().manual_seed(count))


def close(got: Any, want: Any) -> bool:
    # Two orders of summation in fp32, through two layers.
    return bool((got - want).abs().max() <= 5e-6 * want.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_traced_modules_equal_the_model(name):
    model = build(name)
    prefill, cached, decode = (hf._wrap(model, m) for m in ("prefill", "prefill_cache", "decode"))
    for count in (5, 8, 20):
        ids = tokens(count + 1, batch=2)
        with torch.no_grad():
            want = model(input_ids=ids, use_cache=False).logits
            assert close(prefill(ids), want)
            _, *past = cached(ids[:, :count])
            logits, *_ = decode(ids[:, count:], list(zip(past[::2], past[1::2], strict=True)))
            assert close(logits, want[:, count:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_compiled_beyond_the_window(name):
    model = build(name)
    target = parse_target("native")
    ids = tokens(20)
    weights: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    machines = []
    for mode in ("prefill_cache", "decode"):
        mod = hf._extract(model, mode, 1, 200, False)
        seq = default_pipeline(target, verify=True)
        ex = tvm.compile(mod, target, relax_pipeline=seq)
        assert seq.report.matched("FuseRotaryAttention")["attention"] == 2
        machines.append((relax.VirtualMachine(ex, tvm.cpu()), mod["main"]))

    def run(machine: Any, inputs: list[Any]) -> list[Any]:
        vm, func = machine
        first = int(func.attrs["num_input"])
        names = [p.name.removeprefix("p_model_") for p in func.params[first:]]
        by_name = {k.replace(".", "_"): v for k, v in weights.items()}
        args = [*inputs, *(by_name[n] for n in names)]
        out = vm["main"](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in args])
        return [torch.from_numpy(o.numpy()) for o in out]

    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    _, *past = run(machines[0], [ids[:, :19]])
    logits, *_ = run(machines[1], [ids[:, 19:], *past])
    assert close(logits, want[:, 19:])


def test_kinds_that_are_not_known_are_named():
    model = build("Llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedError, match="linear_attention"):
        mask_maker(model)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedError, match="takes one attention mask"):
        mask_maker(model)
