"""MPT as llm-foundry implements it: rotary in two spellings, grouped queries, clipped QKV, norms of
q and k."""

from __future__ import annotations

import functools
import sys
import types
from functools import partial
from typing import Any

from .external import folder, package
from .recipe import Source, recipe

SIZES = {
    "small": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 128},
    "real": {"d_model": 768, "n_heads": 12, "n_layers": 12, "vocab_size": 8192, "max_seq_len": 512},
}
LENGTHS = {"small": (6, 7), "real": (128, 127)}
VERSION = "llm-foundry 0.22.0"


def _flash_attention_layers() -> None:
    """flash-attn's own layers/rotary.py, its Triton kernel replaced by the torch function that file
    carries."""
    root = folder("flash_attn-2.8.3", "flash_attn")
    padding = types.ModuleType("flash_attn.bert_padding")
    package("flash_attn", root, __version__="2.8.3", bert_padding=padding)
    sys.modules["flash_attn.bert_padding"] = padding
    for name in ("layers", "ops", "ops.triton"):
        package(f"flash_attn.{name}", root.joinpath(*name.split(".")))

    def apply_rotary(
        x: Any, cos: Any, sin: Any, seqlen_offsets: int = 0, interleaved: bool = False,
        inplace: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        from flash_attn.layers.rotary import apply_rotary_emb_torch

        rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
        turned = apply_rotary_emb_torch(x, cos[rows], sin[rows], interleaved)
        return x.copy_(turned) if inplace else turned

    kernel: Any = types.ModuleType("flash_attn.ops.triton.rotary")
    kernel.apply_rotary = apply_rotary
    sys.modules["flash_attn.ops.triton.rotary"] = kernel


@functools.cache
def _foundry() -> Any:
    """llm-foundry's modelling file from the unmodified wheel, without its training dependencies."""
    import transformers

    site = folder("site")
    _flash_attention_layers()
    sys.path.append(str(site))
    for name in ("", ".models", ".models.mpt", ".models.layers", ".models.utils", ".utils"):
        package("llmfoundry" + name, site.joinpath("llmfoundry", *name.split(".")[1:]))
    models = package("composer.models", HuggingFaceModel=type("HuggingFaceModel", (), {}))
    rank = types.SimpleNamespace(get_local_rank=lambda: 0)
    package("composer", models=models, utils=package("composer.utils", dist=rank))
    import llmfoundry.models.layers.attention as attention
    import llmfoundry.models.mpt.modeling_mpt as modelling

    # The wheel is written for transformers 4: rotary reads another configuration, and takes no
    # position_ids now.
    def make_rotary(
        rope_impl: str, rope_theta: float, d_model: int, n_heads: int, max_seq_len: int,
        head_dim: int | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        width = head_dim or d_model // n_heads
        if rope_impl == "dail":
            return modelling.DAILRotaryEmbedding(
                dim=width, base=rope_theta, interleaved=False, scale_base=None, device="cpu"
            )
        config = transformers.LlamaConfig(
            hidden_size=d_model,
            num_attention_heads=n_heads,
            head_dim=width,
            max_position_embeddings=max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        )
        return modelling.LlamaRotaryEmbeddingFoundry(config=config)

    modelling.gen_rotary_embedding = make_rotary
    rotate = attention.apply_rotary_pos_emb
    attention.apply_rotary_pos_emb = lambda q, k, cos, sin, position_ids=None, unsqueeze_dim=1: (
        rotate(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    )
    return modelling


def _build(size: str, mode: str, attention: dict[str, Any]) -> Source:
    import torch

    from .hf_common import VERSION as HF

    modelling = _foundry()
    settings = {
        "attn_impl": "torch", "rope": True, "rope_impl": "hf", "attn_type": "multihead_attention",
        **attention,
    }  # fmt: skip
    shape = SIZES[size]
    config = modelling.MPTConfig(
        learned_pos_emb=False, attn_config=settings, init_device="cpu", pad_token_id=None,
        **shape,
    )  # fmt: skip
    model = modelling.MPTForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    class Prefill(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            out = self.model(input_ids=ids, use_cache=True, return_dict=True)
            return (out.logits, *(t for pair in out.past_key_values for t in pair))

    class Decode(Prefill):
        def forward(self, ids: Any, past: Any) -> Any:
            out = self.model(input_ids=ids, past_key_values=past, use_cache=True, return_dict=True)
            return (out.logits, *(t for pair in out.past_key_values for t in pair))

    prefill, past = LENGTHS[size]
    tokens = ["integers", 0, shape["vocab_size"]]
    version = f"{VERSION}, {HF}" + (
        ", flash-attn 2.8.3 (layers/rotary.py)" if attention.get("rope_impl") == "dail" else ""
    )
    symbolic = "kv_n_heads" not in attention and settings["rope"] and settings["rope_impl"] == "hf"
    if mode == "prefill":
        ids = torch.zeros(1, prefill, dtype=torch.int64)
        dynamic: Any = {"ids": {1: torch.export.Dim("new", min=2, max=120)}} if symbolic else None
        return Source(Prefill(), (ids,), [tokens], dynamic, version)
    layers = shape["n_layers"]
    heads = attention.get("kv_n_heads", shape["n_heads"])
    width = shape["d_model"] // shape["n_heads"]
    pairs = [
        (torch.zeros(1, heads, width, past), torch.zeros(1, heads, past, width))
        for _ in range(layers)
    ]
    length = torch.export.Dim("past", min=2, max=120)
    dynamic = {"ids": None, "past": [({3: length}, {2: length})] * layers} if symbolic else None
    ids = torch.zeros(1, 1, dtype=torch.int64)
    rules = [tokens] + [["normal", 0.0, 1.0]] * (2 * layers)
    return Source(Decode(), (ids, pairs), rules, dynamic, version)


def _register() -> None:
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    for name, attention, special, tags in (
        ("rope", {}, "rotary in (B,S,H,D), tables rebuilt in every layer", "rotary"),
        ("rope_gqa", grouped, "rotary; 4 query heads on 2, QKV split unevenly", "rotary gqa"),
        ("rope_clip_qkln", {"clip_qkv": 6.0, "qk_ln": True},
         "clip on the fused QKV and layer norm of q and k between split and rotary", "rotary"),
        ("dail", {"rope_impl": "dail"},
         "flash-attn's rotary: halves by split, written in place (slice_scatter)", "rotary dail"),
        ("alibi_clip", {"rope": False, "alibi": True, "clip_qkv": 6.0},
         "ALiBi with a mask that is rebuilt in every layer; clip", "alibi"),
    ):  # fmt: skip
        for mode in ("prefill", "decode"):
            recipe(
                f"mpt_foundry_{name}_{mode}",
                partial(_build, mode=mode, attention=attention),
                source="llm-foundry, MPTForCausalLM",
                special=f"{special}; keys cached as (B,H,D,T)",
                tags=f"mpt {tags} {mode} cache float32",
            )


_register()
