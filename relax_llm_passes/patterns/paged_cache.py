"""Attentions that a paged KV cache object computes: seen and said, left as they are.

TVM's `nn.llm` models, and mlc-llm's, call `vm.builtin.attention_kv_cache_*` with a cache object.
Pages, rotary and the attention's kernels belong to that object, which is made of PrimFuncs of its
own; there is nothing in the graph that could be fused.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from ..dataflow import FunctionView
from ..report import Refusal

__all__ = ["paged_attentions"]

_BUILTIN = "vm.builtin.attention_kv_cache_"
_ATTENDS = ("attention", "self_attention", "cross_attention")


def paged_attentions(view: FunctionView) -> list[Refusal]:
    """Return a refusal for each call that asks a cache object for an attention."""
    found = []
    for binding in view.bindings:
        name = _packed_name(binding.value)
        if name.startswith(_BUILTIN) and name[len(_BUILTIN) :].startswith(_ATTENDS):
            found.append(
                Refusal(
                    f"{name}: the paged cache object computes it, with the kernels that it was "
                    "made of; left as it is",
                    "attention", view.name, getattr(binding.var, "name", ""),
                )
            )  # fmt: skip
    return found


def _packed_name(value: Any) -> str:
    if not isinstance(value, relax.Call):
        return ""
    # call_pure_packed, and call_dps_packed with its tuple of arguments, name the function first.
    for expr in (value.op, *value.args[:1]):
        if isinstance(expr, relax.ExternFunc):
            return str(expr.global_symbol)
    return ""
