"""Libraries by name, as tvmc's composite targets had them: "cublas, cuda -arch=sm_90".

A library is a name with the passes and options that it switches on. Other packages register
theirs with `register_library` from a plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm.target import Target

from . import registry
from .errors import InputError, UnknownNameError
from .spec import Step

__all__ = ["Library", "check", "insert", "list_libraries", "options", "register_library"]


@dataclass(frozen=True)
class Library:
    """What naming a library before the target does.

    Attributes
    ----------
    name : str
        As written before the target.
    targets : tuple[str, ...]
        Target kinds it can be used with.
    passes : tuple[str, ...]
        Passes added to the pipeline (before stage "lower").
    options : mapping
        Options by pass name, beneath those the caller gives.
    """

    name: str
    targets: tuple[str, ...]
    passes: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    summary: str = ""


_LIBRARIES: dict[str, Library] = {}


def register_library(library: Library) -> Library:
    """Register a library; the same name again replaces it."""
    _LIBRARIES[library.name] = library
    return library


def list_libraries() -> list[Library]:
    """Return the registered libraries by name."""
    registry.load_plugins()
    return [_LIBRARIES[n] for n in sorted(_LIBRARIES)]


def check(names: Sequence[str]) -> None:
    """Raise UnknownNameError for a library that nobody registered."""
    registry.load_plugins()
    for name in names:
        if name not in _LIBRARIES:
            raise UnknownNameError("library", name, _LIBRARIES)


def insert(steps: Sequence[Step], names: Sequence[str], target: Target) -> list[Step]:
    """Return `steps` with the passes that the named libraries switch on, before stage "lower".

    Raises
    ------
    UnknownNameError
        For a library that nobody registered.
    InputError
        For one that does not work with targets of this kind.
    """
    check(names)
    result = list(steps)
    for name in names:
        library = _LIBRARIES[name]
        if target.kind.name not in library.targets:
            raise InputError(
                f"library {name!r} works with {', '.join(library.targets)} targets, "
                f"not with {target.kind.name}"
            )
        for pass_name in library.passes:
            if all(s.name != pass_name for s in result):
                at = next((i for i, s in enumerate(result) if s.stage == "lower"), len(result))
                result.insert(at, Step(pass_name, "fuse", registry.get_pass(pass_name)))
    return result


def options(
    names: Sequence[str], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the options of the named libraries beneath those that the caller gives.

    Where two libraries set the same option to tuples (`prefer`), they are joined in order.
    """
    merged: dict[str, dict[str, Any]] = {}
    for name in names:
        for pass_name, values in _LIBRARIES[name].options.items():
            own = merged.setdefault(pass_name, {})
            for key, value in values.items():
                old = own.get(key)
                if isinstance(old, tuple) and isinstance(value, tuple):
                    value = old + value
                own[key] = value
    for pass_name, values in given.items():
        merged.setdefault(pass_name, {}).update(values)
    return merged
