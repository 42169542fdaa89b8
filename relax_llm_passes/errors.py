"""What this package raises: each message says what was found, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "RelaxLLMError", "UnknownNameError", "UnsupportedError"]


class RelaxLLMError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(RelaxLLMError, ValueError):
    """The caller's input (file, option, module, target) cannot be used as it is."""


class UnsupportedError(InputError):
    """The input is valid, and this package or this machine cannot do it."""


class UnknownNameError(InputError):
    """A name that nothing was registered under, with the closest known ones.

    Parameters
    ----------
    what : str
        The kind of name ("pass", "target", "option of FuseAttention").
    name : str
        What was asked for.
    known : Iterable[str]
        The names that exist.
    """

    def __init__(self, what: str, name: str | None = None, known: Iterable[str] = ()) -> None:
        known = sorted(known)
        self.name = name or ""
        self.known = known
        if name is None:  # a text that is complete, from the other side of TVM's FFI
            super().__init__(what)
            return
        folded = {k.lower(): k for k in known}
        close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
        hint = f"; did you mean {folded[close[0]]!r}?" if close else "."
        listed = ", ".join(known) if known else "none"
        super().__init__(f"unknown {what} {name!r}{hint} Known: {listed}")
