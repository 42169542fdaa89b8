"""Recognise the wkv recurrences (RWKV-4, 5, 6, 7) in the operators that importers produce.

The composite's contract::

    kind "wkv"; outputs "out" (or "out0", "out1", ... where nothing collects them), then the state:
    "state", or "num", "den" and "peak" for RWKV-4
    attrs  form        "bonus" (RWKV-5, 6), "delta" (RWKV-7), "softmax" (RWKV-4)
           size        N: channels of a head; all channels for "softmax"
           heads, batch_axes, tokens
           operands    by meaning (r, k, v, w, u or a and b, state; k, v, w, u, num, den, peak):
                       a tree {"load": role, "at": {symbol: elements}}, {"value": x} or
                       {"op": name, "args": [...]} with the symbols b, t, h, n ("j" the key and "i"
                       the value of a state), "" for a constant offset
           out_at      how b, t, h, n move through "out"; None where there is one output a token
    roles  the tensors that the trees load

Tokens in a row whose state nobody else sees are one composite (see `unrolled`). The spelling of a
token is in `wkv_steps` and `wkv4_steps`. Refused, with the reason: an intermediate (the outer
product, the decayed state) that something else reads, unknown shapes.
"""

from __future__ import annotations

from ..dataflow import FunctionView
from ..outline import Region
from ..report import Refusal
from .unrolled import chains, regions_of
from .wkv4_steps import find_softmax_steps
from .wkv_steps import find_matrix_steps

__all__ = ["KIND", "find_wkv"]

KIND = "wkv"


def find_wkv(view: FunctionView) -> list[Region | Refusal]:
    """Find the recurrences of RWKV-4, 5, 6 and 7 in a scope."""
    out: list[Region | Refusal] = []
    for finder in (find_matrix_steps, find_softmax_steps):
        steps = []
        for item in finder(view, KIND):
            if isinstance(item, Refusal):
                out.append(item)
            else:
                steps.append(item)
        for chain in chains(view, steps):
            out += regions_of(view, chain, KIND)
    return out
