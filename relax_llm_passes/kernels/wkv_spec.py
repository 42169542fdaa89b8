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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .norm_program import Tensor

__all__ = ["ROLES_BONUS", "ROLES_DELTA", "WkvSpec"]

ROLES_BONUS = ("r", "k", "v", "w", "u", "state")
ROLES_DELTA = ("r", "k", "v", "w", "a", "b", "state")


@dataclass(frozen=True)
class WkvSpec:
    """One matrix-valued recurrence (RWKV-5, 6, 7).

    Attributes
    ----------
    tensors : tuple[Tensor, ...]
        Parameters: the roles in the order of `ROLES_BONUS` or `ROLES_DELTA`, then the output and
        the new state. All are compact; a tensor of one value per channel and token is read as
        (B, T, H, N) or (B, H, T, N) whatever its own rank.
    batch, tokens, heads : int or expression
        Extents; `tokens` may be a variable of the tensors' shapes.
    size : int
        N, the channels of a head.
    delta : bool
        RWKV-7's form (a, b and the output from the new state) instead of RWKV-5/6's (u).
    value_major : bool
        The state is stored (value, key) instead of (key, value).
    decay_per_token : bool
        w has a token axis (RWKV-6, 7); otherwise it is (H, N).
    head_major : bool
        Tensors are (B, H, T, N).
    order : tuple[str, ...]
        Parameters by role ("out" and "new_state" included) where they come in another order.
    """

    tensors: tuple[Tensor, ...]
    batch: Any
    tokens: Any
    heads: Any
    size: int
    delta: bool = False
    value_major: bool = False
    decay_per_token: bool = True
    head_major: bool = False
    order: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return ROLES_DELTA if self.delta else ROLES_BONUS

    def position(self, role: str) -> int:
        """Index of a role ("out" and "new_state" included) among the parameters."""
        return (self.order or (*self.roles, "out", "new_state")).index(role)

    def token_offset(self, b: Any, t: Any, h: Any) -> Any:
        """Flat index of channel 0 of token `t` and head `h` in a per-token tensor."""
        if self.head_major:
            return ((b * self.heads + h) * self.tokens + t) * self.size
        return ((b * self.tokens + t) * self.heads + h) * self.size

    def offset(self, role: str, b: Any, t: Any, h: Any) -> Any:
        """Flat index of channel 0 of a role's vector."""
        if role == "u" or (role == "w" and not self.decay_per_token):
            return h * self.size
        return self.token_offset(b, t, h)

    def state_index(self, b: Any, h: Any, key: Any, value: Any) -> Any:
        """Flat index into the state."""
        base = (b * self.heads + h) * (self.size * self.size)
        if self.value_major:
            return base + value * self.size + key
        return base + key * self.size + value

    def staged(self) -> Sequence[str]:
        """Roles every thread of a head needs for each token."""
        per_token = ["r", "k"]
        if self.delta:
            per_token += ["a", "b"]
        if self.decay_per_token:
            per_token.append("w")
        return per_token

    def fixed(self) -> Sequence[str]:
        """Roles every thread of a head needs once."""
        return [r for r in ("u", "w") if r in self.roles and r not in self.staged()]
