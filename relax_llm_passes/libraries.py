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

__all__ = ["Library", "check", "insert", "list_libraries", "register_library"]


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


def insert(
    steps: list[Step], names: Sequence[str], target: Target, options: Mapping[str, Any]
) -> list[Step]:
    """Return `steps` with the passes and options that the named libraries switch on."""
    check(names)
    merged: dict[str, dict[str, Any]] = {}
    for name in names:
        library = _LIBRARIES[name]
        if target.kind.name not in library.targets:
            raise InputError(
                f"library {name!r} works with {', '.join(library.targets)} targets, "
                f"not with {target.kind.name}"
            )
        for pass_name in library.passes:
            if all(s.name != pass_name for s in steps):
                at = next((i for i, s in enumerate(steps) if s.stage == "lower"), len(steps))
                step = Step(pass_name, "fuse", registry.get_pass(pass_name))
                steps = [*steps[:at], step, *steps[at:]]
        for pass_name, values in library.options.items():
            for key, value in values.items():
                old = merged.setdefault(pass_name, {}).get(key)
                both = isinstance(old, tuple) and isinstance(value, tuple)
                merged[pass_name][key] = old + value if both else value
    for pass_name, values in merged.items():
        values.update(options.get(pass_name, {}))
        transform = registry.get_pass(pass_name, **values)
        steps = [Step(s.name, s.stage, transform) if s.name == pass_name else s for s in steps]
    return steps
