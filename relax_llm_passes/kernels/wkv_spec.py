"""What a wkv recurrence computes: the facts a kernel is keyed by.

Per head, with r, k, v, w (and a, b in RWKV-7) vectors of N channels and a state S of N x N, key
index j and value index i, one token does

    RWKV-5, 6:  y_i = sum_j r_j * (S_ji + u_j * k_j * v_i);  S_ji = w_j * S_ji + k_j * v_i
    RWKV-7:     S_ji = w_j * S_ji + (sum_l a_l * S_li) * b_j + k_j * v_i;  y_i = sum_j r_j * S_ji

w is the factor itself, as the graph computes it (exp(-exp(.)) or other): its formula is none of a
kernel's business. RWKV-4 works per channel (see `wkv4`). Sources: BlinkDL/RWKV-LM and the papers
"Eagle and Finch" (2024) and "RWKV-7 Goose" (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from .norm_math import Functions
from .norm_program import Tensor
from .operand import Plain, address, depends_on, evaluate

__all__ = ["ROLES_BONUS", "ROLES_DELTA", "ROLES_SOFTMAX", "WkvSpec", "compact_operands", "reading"]

ROLES_BONUS = ("r", "k", "v", "w", "u", "state")
ROLES_DELTA = ("r", "k", "v", "w", "a", "b", "state")
ROLES_SOFTMAX = ("k", "v", "w", "u", "num", "den", "peak")


@dataclass(frozen=True)
class WkvSpec:
    """One recurrence over some tokens.

    Attributes
    ----------
    tensors : tuple[Tensor, ...]
        Parameters in order. Those that operands load are named as in the trees; "out", and
        "new_state" ("new_num", "new_den", "new_peak" for RWKV-4) are written.
    operands : mapping
        By meaning (`ROLES_BONUS`, `ROLES_DELTA` or `ROLES_SOFTMAX`): a tree of loads (`operand`) in
        the symbols b, t, h, n; in b, h, j (key) and i (value) for a state.
    out_at : mapping
        How b, t, h and n move through "out".
    batch, tokens, heads : int or expression
        Extents; `tokens` may be a variable of the tensors' shapes.
    size : int or expression
        N, the channels of a head; all channels for RWKV-4.
    delta : bool
        RWKV-7's form (a, b and the output from the new state) instead of RWKV-5/6's (u).
    value_major : bool
        The new state is stored (B, H, value, key) instead of (B, H, key, value).
    """

    tensors: tuple[Tensor, ...]
    operands: Mapping[str, Plain]
    out_at: Mapping[str, Any]
    batch: Any
    tokens: Any
    heads: Any
    size: Any
    delta: bool = False
    value_major: bool = False

    @property
    def single(self) -> bool:
        """Whether it is known to be one token."""
        return isinstance(self.tokens, int) and self.tokens == 1

    def position(self, name: str) -> int:
        """Index of a parameter."""
        return [t.name for t in self.tensors].index(name)

    def state_index(self, b: Any, h: Any, key: Any, value: Any) -> Any:
        """Flat index into the new state."""
        base = (b * self.heads + h) * (self.size * self.size)
        if self.value_major:
            return base + value * self.size + key
        return base + key * self.size + value

    def out_index(self, b: Any, t: Any, h: Any, n: Any) -> Any:
        """Flat index into the output."""
        return address(self.out_at, {"b": b, "t": t, "h": h, "n": n})

    def staged(self) -> Sequence[str]:
        """Vectors along the keys that change from token to token."""
        return [r for r in self._along_keys() if self.single or depends_on(self.operands[r], "t")]

    def fixed(self) -> Sequence[str]:
        """Vectors along the keys that are the same for every token."""
        staged = self.staged()
        return [r for r in self._along_keys() if r not in staged]

    def _along_keys(self) -> list[str]:
        return [r for r in self.operands if r not in ("v", "state")]


def reading(spec: WkvSpec, flat: Sequence[Any], functions: Functions) -> Callable[..., Any]:
    """Return `value(role, **symbols)`: an operand's float32 value, from one-dimensional buffers."""

    def read(name: str, index: Any) -> Any:
        i = spec.position(name)
        x = flat[i][index]
        return x if spec.tensors[i].dtype == "float32" else tirx.Cast("float32", x)

    def value(role: str, **symbols: Any) -> Any:
        return evaluate(spec.operands[role], symbols, read, functions)

    return value


def compact_operands(
    roles: Sequence[str],
    batch: Any,
    tokens: Any,
    heads: Any,
    size: Any,
    value_major: bool = False,
    decay_per_token: bool = True,
    head_major: bool = False,
) -> tuple[dict[str, Plain], dict[str, Any]]:
    """Return operands and `out_at` for compact tensors named as their roles.

    A tensor of one value per channel and token is (B, T, H, N), or (B, H, T, N) for `head_major`;
    u, and w without `decay_per_token`, are (H, N); the state is (B, H, N, N).
    """
    token = heads * size
    if head_major:
        per_token: dict[str, Any] = {"b": tokens * token, "h": tokens * size, "t": size, "n": 1}
    else:
        per_token = {"b": tokens * token, "t": token, "h": size, "n": 1}
    key, value = (1, size) if value_major else (size, 1)
    at: dict[str, Any] = {r: per_token for r in roles}
    at["state"] = {"b": token * size, "h": size * size, "j": key, "i": value}
    at["u"] = {"h": size, "n": 1}
    if not decay_per_token:
        at["w"] = {"h": size, "n": 1}
    return {r: {"load": r, "at": at[r]} for r in roles}, per_token
