"""TVM's paged KV cache with its own CUDA kernels: one layer, fed in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm import kv_cache

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
TOKENS = 20
# Tokens fed at once. A prefill and decode steps; pages end inside a piece.
DECODING = (15, 1, 1, 1, 1, 1)
# Several tokens after others: what pages give and what the piece gives are merged.
MERGING = (13, 6, 1)


def attention_module(dtype: str, target: Any) -> tvm.IRModule:
    """Functions "create" (the cache) and "attend" (one layer on a fused qkv)."""

    class Model(nn.Module):
        def create(self, max_batch_size: tvm.tirx.Var, max_total: tvm.tirx.Var,
                   prefill_chunk: tvm.tirx.Var, page_size: tvm.tirx.Var):  # fmt: skip
            return kv_cache.TIRPagedKVCache(
                attn_kind="mha", max_batch_size=max_batch_size, max_total_seq_len=max_total,
                prefill_chunk_size=prefill_chunk, page_size=page_size, support_sliding_window=0,
                layer_partition=relax.ShapeExpr([0, 1]), num_hidden_layers=1,
                num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, qk_head_dim=DIM,
                v_head_dim=DIM, mla_original_qk_head_dim=0, mla_original_v_head_dim=0,
                rope_mode=kv_cache.RopeMode.NONE, rope_scale=1, rope_theta=10000,
                rope_scaling={}, rope_ext_factors=relax.prim_value(0), rotary_dim=DIM,
                enable_disaggregation=False, dtype=dtype, target=target)  # fmt: skip

        def attend(self, qkv: nn.Tensor, cache: kv_cache.PagedKVCache):
            return cache.attention_with_fused_qkv(0, qkv, HEADS, sm_scale=DIM**-0.5), cache

    spec = {
        "create": {"max_batch_size": int, "max_total": int, "prefill_chunk": int, "page_size": int},
        "attend": {"qkv": nn.spec.Tensor([1, "n", HEADS + 2 * KV_HEADS, DIM], dtype),
                   "cache": nn.spec.Object(object_type=kv_cache.PagedKVCache)},
    }  # fmt: skip
    return Model().export_tvm(spec=spec)[0]


class PagedAttention:
    """A compiled layer; a call runs every piece over a fresh cache."""

    def __init__(self, dtype: str, target: Any) -> None:
        mod = attention_module(dtype, target)
        executable = tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))
        self.executable = executable
        self.vm = relax.VirtualMachine(executable, tvm.cuda(0))

    def __call__(self, qkv: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
        """(1, TOKENS, HEADS + 2 * KV_HEADS, DIM) to (TOKENS, HEADS, DIM)."""
        shape = tvm_ffi.Shape
        add, begin, end = (
            tvm.get_global_func(f"vm.builtin.kv_state_{name}")
            for name in ("add_sequence", "begin_forward", "end_forward")
        )
        cache = self.vm["create"](shape([1]), shape([64]), shape([64]), shape([PAGE]))
        add(cache, 0)
        outputs, first = [], 0
        for count in pieces:
            begin(cache, shape([0]), shape([count]))
            piece = np.ascontiguousarray(qkv[:, first : first + count])
            x = tvm.runtime.tensor(piece, tvm.cuda(0))
            outputs.append(np.array(self.vm["attend"](x, cache)[0].numpy()))
            end(cache)
            first += count
        return np.concatenate(outputs, 1).reshape(TOKENS, HEADS, DIM)


def attention_reference(qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64: (result, scale of its rounding errors)."""
    q, k, v = np.split(qkv[0].astype("f8"), [HEADS, HEADS + KV_HEADS], axis=1)
    k, v = (a.repeat(HEADS // KV_HEADS, 1) for a in (k, v))
    scores = np.einsum("shd,thd->hst", q, k) * DIM**-0.5
    scores[:, np.triu(np.ones((TOKENS, TOKENS), bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("hst,thd->shd", p, v), np.einsum("hst,thd->shd", p, np.abs(v))
