"""Typed options of passes: from keyword arguments, and from text such as `max_rows=16`."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from .errors import InputError, UnknownNameError

__all__ = ["NoOptions", "describe", "document", "from_text", "make"]


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a pass that has none."""


def _hints(options_type: type) -> dict[str, Any]:
    return typing.get_type_hints(options_type)


def _convert(owner: str, name: str, hint: Any, text: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and text.lower() in ("none", "null", ""):
            return None
        for arg in args:
            if arg is not type(None):
                return _convert(owner, name, arg, text)
    if origin is typing.Literal:
        for choice in args:
            if str(choice) == text:
                return choice
        raise InputError(f"{owner}.{name}={text!r}: expected one of {', '.join(map(str, args))}")
    if hint is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise InputError(f"{owner}.{name}={text!r}: expected true or false")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise InputError(f"{owner}.{name}={text!r}: expected {hint.__name__}") from None
    if origin is tuple:
        return tuple(_convert(owner, name, args[0], t) for t in text.split("+") if t)
    return text


def _accepts(hint: Any, value: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(a, value) for a in args)
    if origin is typing.Literal:
        return value in args
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is not None:
        return isinstance(value, origin)
    return isinstance(value, hint) if isinstance(hint, type) else True


def make(owner: str, options_type: type, values: Mapping[str, Any]) -> Any:
    """Build the options dataclass of pass `owner`, checking names and types.

    Raises
    ------
    UnknownNameError
        For a name that `owner` has no option for.
    InputError
        For a value of the wrong type; the message names the type expected.
    """
    hints = _hints(options_type)
    for name, value in values.items():
        if name not in hints:
            raise UnknownNameError(f"option of {owner}", name, hints)
        if not _accepts(hints[name], value):
            expected = getattr(hints[name], "__name__", str(hints[name]))
            raise InputError(f"{owner}.{name}={value!r}: expected {expected}")
    return options_type(**values)


def from_text(owner: str, options_type: type, name: str, text: str) -> Any:
    """Convert the text of one option (`--pass-config Pass.name=text`) to its type."""
    hints = _hints(options_type)
    if name not in hints:
        raise UnknownNameError(f"option of {owner}", name, hints)
    return _convert(owner, name, hints[name], text)


def describe(options_type: type) -> list[tuple[str, str, str]]:
    """Return (name, type, default) of each option."""
    hints = _hints(options_type)
    rows = []
    for f in dataclasses.fields(options_type):
        hint = hints[f.name]
        type_name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        rows.append((f.name, type_name, str(f.default)))
    return rows


def document(options_type: type) -> dict[str, str]:
    """Return what the class's docstring says of each option, in one line each.

    Read from the numpydoc section "Attributes": `name : type`, then indented text.
    """
    texts: dict[str, list[str]] = {}
    current: list[str] | None = None
    lines = inspect.cleandoc(options_type.__doc__ or "").splitlines()
    for line in lines[lines.index("Attributes") + 2 :] if "Attributes" in lines else []:
        if line and not line[0].isspace():
            if set(line) == {"-"}:  # the next section's underline
                break
            names = line.partition(":")[0].split(",")
            current = []
            texts.update((name.strip(), current) for name in names)
        elif current is not None and line.strip():
            current.append(line.strip())
    return {name: " ".join(text) for name, text in texts.items()}
