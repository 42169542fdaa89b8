"""Every attention layer of the corpus' transformers is found: attention, rotary, split, append."""

from __future__ import annotations

import pytest
from tvm import relax

from relax_llm_passes import corpus, get_pass, report
from relax_llm_passes.lower import composites
from relax_llm_passes.targets import parse_target

TARGET = parse_target("native")
LAYERS = 2
STEPS = ("ExpandRotaryKernels", "CanonicalizeBindings", "FuseRotaryAttention", "FuseSplitRotary")

# What the two layers of each graph must give. Prefill leaves the rotary of the keys to
# FuseSplitRotary; MPT with ALiBi has none; GPT-J, Phi and Llama have separate q, k, v products.
EXPECTED = {
    "mpt_hf_decode": {"attention", "split", "append"},
    "mpt_hf_decode_fp16": {"attention", "split", "append"},
    "mpt_hf_decode_h6": {"attention", "split", "append"},
    "mpt_hf_decode_new3": {"attention", "split", "append"},
    "mpt_hf_prefill_cache": {"attention", "split"},
    "mpt_foundry_alibi_clip_decode": {"attention", "split", "append"},
    "mpt_foundry_rope_decode": {"attention", "rotary", "split", "append"},
    "mpt_foundry_rope_gqa_prefill": {"attention", "rotary", "split_rotary"},
    "mpt_foundry_dail_decode": {"attention", "append", "split_rotary"},
    "llama_decode_gqa_llama3": {"attention", "rotary", "append"},
    "llama_decode_sdpa": {"attention", "rotary", "append"},
    "llama_prefill_gqa_llama3": {"attention", "rotary", "split_rotary"},
    "llama_mlc_decode": {"attention", "rotary", "split", "append"},
    "llama_mlc_decode_fp16": {"attention", "rotary", "split", "append"},
    "llama_static_decode": {"attention", "rotary", "append"},
    "llama_static_decode_new3": {"attention", "rotary", "append"},
    "llama_linear_decode": {"attention", "rotary", "append"},
    "llama_yarn_decode": {"attention", "rotary", "append"},
    "llama_longrope_decode": {"attention", "rotary", "append"},
    "gemma2_decode": {"attention", "rotary", "append"},
    "gptoss_decode": {"attention", "rotary", "append"},
    "neox_decode": {"attention", "rotary", "split", "append"},
    "gptj_decode": {"attention", "rotary", "append"},
    "gptj_prefill": {"attention", "rotary", "split_rotary"},
    "phi_decode": {"attention", "rotary", "append"},
    "bloom_decode": {"attention", "split", "append"},
}
WIDTHS = {
    "neox_decode": ("half", 8, 32),
    "gptj_decode": ("interleaved", 16, 32),
    "mpt_foundry_rope_decode": ("half", 16, 16),
    "llama_yarn_decode": ("half", 16, 16),
    "llama_longrope_decode": ("half", 16, 16),
    "llama_mlc_decode": ("half", 16, 16),
}


def _fuse(name: str):
    graph = corpus.load(name)
    with report.collect() as found, TARGET:
        mod = graph.mod
        for step in STEPS:
            mod = get_pass(step)(mod)
    relax.analysis.well_formed(mod)
    return mod, found


@pytest.mark.parametrize("name", EXPECTED)
def test_every_layer_is_found(name: str) -> None:
    _, found = _fuse(name)
    counts = found.matched()
    kinds = ("attention", "rotary", "split", "append", "split_rotary")
    assert {k for k in kinds if counts[k]} == EXPECTED[name]
    # A rotary of its own as a PrimFunc counts when it is written out, and again when it is fused.
    extra = {"rotary": LAYERS} if name.startswith("llama_mlc") else {}
    assert all(counts[k] == LAYERS + extra.get(k, 0) for k in EXPECTED[name])
    assert not [r for r in found.refused() if r.kind in ("attention", "rotary", "split_rotary")]


@pytest.mark.parametrize("name", WIDTHS)
def test_style_and_width(name: str) -> None:
    style, width, size = WIDTHS[name]
    mod, _ = _fuse(name)
    attentions = [c for c in composites(mod).values() if c.kind == "attention"]
    want = {"style": style, "rotary_dim": width, "head_dim": size}
    assert attentions and all(c.attrs["rotary"] == want for c in attentions)


def test_sinks_and_caches_of_fixed_capacity_are_in_the_kernel() -> None:
    for name, fact in (("gptoss_decode", "sink"), ("llama_static_decode", "fixed_capacity")):
        mod, _ = _fuse(name)
        attentions = [c for c in composites(mod).values() if c.kind == "attention"]
        assert len(attentions) == LAYERS and all(c.attrs[fact] for c in attentions)
