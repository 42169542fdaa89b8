"""GGUF files with drawn weights, of the shapes of this project's graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["write_gguf"]


class _File:
    """A file being written; matrices are stored in one format, the rest in fp32."""

    def __init__(self, path: Path, architecture: str, kind: str) -> None:
        import gguf

        self.quantize = gguf.quants.quantize
        self.kind = {
            "f32": gguf.GGMLQuantizationType.F32,
            "f16": gguf.GGMLQuantizationType.F16,
            "q8_0": gguf.GGMLQuantizationType.Q8_0,
            "q4_0": gguf.GGMLQuantizationType.Q4_0,
        }[kind]
        self.writer = gguf.GGUFWriter(path, architecture)
        self.writer.add_tokenizer_model("no_vocab")
        self.rng = np.random.default_rng(0)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = self.rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        self.writer.add_tensor(name, self.quantize(values, self.kind), raw_dtype=self.kind)

    def plain(self, name: str, *shape: int, low: float = 0.1, high: float = 0.9) -> None:
        self.writer.add_tensor(name, self.rng.uniform(low, high, shape).astype("float32"))

    def norm(self, name: str, width: int, bias: bool = False) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        if bias:
            self.writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _llama(path: Path, kind: str, size: str) -> None:
    from tests.graphs.sources.mlc_llama import SIZES

    dims = SIZES[size]
    hidden, ffn, heads, kv = dims["hidden"], dims["ffn"], dims["heads"], dims["kv"]
    head = hidden // heads
    file = _File(path, "llama", kind)
    file.writer.add_context_length(512)
    file.writer.add_embedding_length(hidden)
    file.writer.add_block_count(dims["layers"])
    file.writer.add_feed_forward_length(ffn)
    file.writer.add_head_count(heads)
    file.writer.add_head_count_kv(kv)
    file.writer.add_rope_dimension_count(head)
    file.writer.add_layer_norm_rms_eps(1e-5)
    file.writer.add_vocab_size(dims["vocab"])
    file.matrix("token_embd.weight", dims["vocab"], hidden)
    file.matrix("output.weight", dims["vocab"], hidden)
    file.norm("output_norm", hidden)
    for layer in range(dims["layers"]):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", hidden)
        file.norm(f"{block}ffn_norm", hidden)
        file.matrix(f"{block}attn_q.weight", heads * head, hidden)
        file.matrix(f"{block}attn_k.weight", kv * head, hidden)
        file.matrix(f"{block}attn_v.weight", kv * head, hidden)
        file.matrix(f"{block}attn_output.weight", hidden, hidden)
        file.matrix(f"{block}ffn_gate.weight", ffn, hidden)
        file.matrix(f"{block}ffn_up.weight", ffn, hidden)
        file.matrix(f"{block}ffn_down.weight", hidden, ffn)
    file.close()


def _mpt(path: Path, kind: str, size: str) -> None:
    from tests.graphs.sources.mpt_hf import SIZES

    dims = SIZES[size]
    width = dims["d_model"]
    file = _File(path, "mpt", kind)
    file.writer.add_context_length(dims["max_seq_len"])
    file.writer.add_embedding_length(width)
    file.writer.add_block_count(dims["n_layers"])
    file.writer.add_feed_forward_length(4 * width)
    file.writer.add_head_count(dims["n_heads"])
    file.writer.add_head_count_kv(dims["n_heads"])
    file.writer.add_layer_norm_eps(1e-5)
    file.writer.add_max_alibi_bias(8.0)
    file.writer.add_vocab_size(dims["vocab_size"])
    file.matrix("token_embd.weight", dims["vocab_size"], width)  # also the output's
    file.norm("output_norm", width)
    for layer in range(dims["n_layers"]):
        block = f"blk.{layer}."
        file.norm(f"{block}attn_norm", width)
        file.norm(f"{block}ffn_norm", width)
        file.matrix(f"{block}attn_qkv.weight", 3 * width, width)
        file.matrix(f"{block}attn_output.weight", width, width)
        file.matrix(f"{block}ffn_up.weight", 4 * width, width)
        file.matrix(f"{block}ffn_down.weight", width, 4 * width)
    file.close()


def _rwkv6(path: Path, kind: str, size: str) -> None:
    from tests.graphs.sources.rwkv_package import SIZES

    dims = SIZES[size]
    width, rank, ffn = dims["width"], dims["rank"], dims["ffn"]
    head = width // dims["heads"]
    file = _File(path, "rwkv6", kind)
    file.writer.add_context_length(1 << 20)
    file.writer.add_embedding_length(width)
    file.writer.add_block_count(dims["layers"])
    file.writer.add_feed_forward_length(ffn)
    file.writer.add_layer_norm_eps(1e-5)
    file.writer.add_wkv_head_size(head)
    file.writer.add_time_mix_extra_dim(rank)
    file.writer.add_time_decay_extra_dim(2 * rank)
    file.writer.add_head_count(0)
    file.writer.add_vocab_size(dims["vocab"])
    file.matrix("token_embd.weight", dims["vocab"], width)
    file.matrix("output.weight", dims["vocab"], width)
    file.norm("token_embd_norm", width, bias=True)
    file.norm("output_norm", width, bias=True)
    small = 1 / np.sqrt(width)
    for layer in range(dims["layers"]):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            file.norm(block + norm, width, bias=True)
        # llama.cpp keeps the small matrices of a layer in fp32, in every format.
        file.plain(f"{block}time_mix_w1.weight", 5 * rank, width, low=-small, high=small)
        file.plain(f"{block}time_mix_w2.weight", 5, width, rank, low=-small, high=small)
        file.plain(f"{block}time_mix_lerp_x.weight", width)
        file.plain(f"{block}time_mix_lerp_fused.weight", 5, 1, 1, width)
        file.plain(f"{block}time_mix_first.weight", dims["heads"], head)
        file.plain(f"{block}time_mix_decay.weight", width, low=-3.0, high=0.5)
        file.plain(f"{block}time_mix_decay_w1.weight", 2 * rank, width, low=-small, high=small)
        file.plain(f"{block}time_mix_decay_w2.weight", width, 2 * rank, low=-small, high=small)
        for name in ("key", "value", "receptance", "gate", "output"):
            file.matrix(f"{block}time_mix_{name}.weight", width, width)
        file.plain(f"{block}channel_mix_lerp_k.weight", width)
        file.plain(f"{block}channel_mix_lerp_r.weight", width)
        file.matrix(f"{block}channel_mix_key.weight", ffn, width)
        file.matrix(f"{block}channel_mix_value.weight", width, ffn)
        file.matrix(f"{block}channel_mix_receptance.weight", width, width)
    file.close()


_WRITERS: dict[str, Any] = {"llama": _llama, "mpt": _mpt, "rwkv6": _rwkv6}


def write_gguf(path: Path, model: str, kind: str, size: str) -> None:
    """Write a model ("llama", "mpt", "rwkv6") in a format ("f32", "f16", "q8_0", "q4_0")."""
    _WRITERS[model](path, kind, size)
