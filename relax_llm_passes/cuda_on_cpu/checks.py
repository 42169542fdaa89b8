"""Which checks run: by name in a call, by marker or option of pytest, by environment variable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import InputError, UnknownNameError

__all__ = ["CHECKS", "VARIABLE", "choose_checks", "default_checks", "settings", "use_checks"]

CHECKS = {
    "order": "run again in other thread orders; outputs must be the same bits",
    "poison": "device, shared and local memory that nobody wrote reads as NaN",
    "bounds": "accesses outside of allocations and shared variables",
    "races": "data races in shared and in global memory",
    "uninitialised": "reads of shared memory that no thread of the block wrote",
    "divergence": "barriers and warp operations that not all of their threads reach",
    "counters": "bytes, sectors, bank conflicts, lanes of each launch",
}
VARIABLE = "RELAX_LLM_CUDA_CHECKS"
# These look at every load and store, so they need the instrumented build.
_INSTRUMENTED = frozenset({"bounds", "races", "uninitialised", "counters"})

_default: list[frozenset[str]] = []  # a stack: the last one counts


def choose_checks(which: bool | str | Iterable[str] | None) -> frozenset[str]:
    """Return the names of the checks that a choice stands for.

    Parameters
    ----------
    which : bool, str, iterable of str or None
        True or None: :func:`default_checks`. False: none but "order" and "poison", which cost
        little. Text: "all", "none", or names with commas; names with a minus are left out of all
        ("-races,-order").

    Raises
    ------
    UnknownNameError
        Not a check, with the nearest names.
    InputError
        Names to run and names to leave out in one choice.
    """
    if which is None or which is True:
        return default_checks()
    if which is False:
        return frozenset({"order", "poison", "divergence"})
    text = which if isinstance(which, str) else ",".join(which)
    names = [n.strip() for n in text.split(",") if n.strip()]
    if names in (["all"], ["none"]):
        return frozenset(CHECKS if names == ["all"] else ())
    for name in names:
        if name.removeprefix("-") not in CHECKS:
            raise UnknownNameError("check of CUDA code", name, ["all", "none", *CHECKS])
    left_out = {n[1:] for n in names if n.startswith("-")}
    if left_out and len(left_out) != len(names):
        raise InputError(
            f"checks {text!r}: some names are to run, some (with a minus) to be left out of "
            "all; give one or the other"
        )
    return frozenset(set(CHECKS) - left_out if left_out else names)


def default_checks() -> frozenset[str]:
    """What runs where a call does not say: the innermost :func:`use_checks`, the variable, all."""
    if _default:
        return _default[-1]
    return choose_checks(os.environ.get(VARIABLE) or "all")


@contextlib.contextmanager
def use_checks(which: bool | str | Iterable[str] | None) -> Iterator[None]:
    """Inside, these are the checks of every call that does not name its own."""
    _default.append(choose_checks(which))
    try:
        yield
    finally:
        _default.pop()


def settings(names: frozenset[str]) -> dict[str, Any]:
    """The fields of ``Config`` that these checks stand for; "order" is up to the caller."""
    return {
        "checks": bool(names & _INSTRUMENTED),
        "bounds": "bounds" in names,
        "races": "races" in names,
        "uninitialised": "uninitialised" in names,
        "poison": "poison" in names,
        "divergence": "divergence" in names,
        "access_groups": "counters" in names,
    }
