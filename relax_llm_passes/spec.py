"""The text form of a pipeline: "default,-FuseOps", "clean,fuse", "default,InplaceKVCache{a=1}".

Items are separated by commas and read from left to right:

    default          every pass of the default pipeline
    clean            every pass of that stage
    Name             that pass; one that default has runs there, another goes before stage "lower"
    Name{a=1,b=2}    with options
    -Name, -stage    without it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm

from . import options as _options
from . import registry
from .errors import InputError, UnknownNameError

__all__ = ["Step", "parse_pass_config", "resolve", "split_spec"]


@dataclass(frozen=True)
class Step:
    """One pass in a pipeline."""

    name: str
    stage: str
    transform: tvm.transform.Pass


def split_spec(text: str) -> list[str]:
    """Split at commas outside of braces; empty items are dropped."""
    items, depth, current = [], 0, ""
    for char in text:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            raise InputError(f"pass list {text!r}: '}}' without '{{'")
        if char == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += char
    if depth:
        raise InputError(f"pass list {text!r}: '{{' is not closed")
    return [i.strip() for i in [*items, current] if i.strip()]


_ITEM = re.compile(r"^(?P<minus>-?)(?P<name>[A-Za-z_][\w.]*)(?:\{(?P<options>.*)\})?$")


def _parse_item(item: str) -> tuple[bool, str, dict[str, str]]:
    found = _ITEM.match(item)
    if not found:
        raise InputError(f"pass list item {item!r}: expected Name, -Name or Name{{option=value}}")
    values = {}
    for pair in split_spec(found["options"] or ""):
        name, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"pass list item {item!r}: expected option=value, found {pair!r}")
        values[name.strip()] = value.strip()
    return bool(found["minus"]), found["name"], values


def parse_pass_config(items: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read `Pass.option=value` texts into options by pass.

    Raises
    ------
    UnknownNameError
        For an unknown pass or option.
    InputError
        For text without `.` or `=`, or a value of the wrong type.
    """
    result: dict[str, dict[str, Any]] = {}
    for item in items:
        path, equals, value = item.partition("=")
        name, dot, option = path.partition(".")
        if not equals or not dot:
            raise InputError(f"--pass-config {item!r}: expected Pass.option=value")
        factory = registry.lookup(name.strip())
        result.setdefault(factory.name, {})[option] = _options.from_text(
            factory.name, factory.options_type, option.strip(), value
        )
    return result


def resolve(
    text: str,
    default: Sequence[Step],
    options: dict[str, dict[str, Any]],
    disabled: Sequence[str],
) -> list[Step]:
    """Return the steps that `text` names, with `options` set and `disabled` left out.

    Raises
    ------
    UnknownNameError
        For a name that is neither a pass, nor a pass of the default pipeline, nor a stage.
    """
    known = {s.name for s in default}
    names = known | {p.name for p in registry.list_passes()} | set(registry.STAGES) | {"default"}
    own_options = {name: dict(values) for name, values in options.items()}

    def check(name: str) -> None:
        if name not in names:
            raise UnknownNameError("pass", name, names)

    chosen: list[Step] = []
    for item in split_spec(text):
        minus, name, texts = _parse_item(item)
        check(name)
        if texts:
            factory = registry.lookup(name)
            for option, value in texts.items():
                own_options.setdefault(name, {})[option] = _options.from_text(
                    name, factory.options_type, option, value
                )
        if minus:
            chosen = [s for s in chosen if name not in (s.name, s.stage)]
        else:
            chosen = _with(name, chosen, default)
    for name in disabled:
        check(name)
    for name in own_options:
        registry.lookup(name)
    steps = [s for s in chosen if s.name not in disabled]
    return [
        replace(s, transform=registry.get_pass(s.name, **own_options[s.name]))
        if s.name in own_options
        else s
        for s in steps
    ]


def _with(name: str, chosen: list[Step], default: Sequence[Step]) -> list[Step]:
    """Return `chosen` with the pass or stage `name` added at its place."""
    if name == "default":
        wanted = list(default)
    else:
        wanted = [s for s in default if name in (s.name, s.stage)]
    if wanted:
        have = {id(s) for s in chosen}
        keep = [s for s in default if id(s) in have or s in wanted]
        extra = [s for s in chosen if s not in default]
        return _place(keep, extra)
    if name in registry.STAGES:
        return chosen
    step = Step(name, registry.lookup(name).stage, registry.get_pass(name))
    extra = [s for s in chosen if s not in default]
    return _place([s for s in chosen if s in default], [*extra, step])


def _place(steps: list[Step], extra: list[Step]) -> list[Step]:
    """Put passes that default has not at the end of their stage; optional ones before "lower"."""
    for step in extra:
        order = registry.STAGES.index("fuse" if step.stage == "optional" else step.stage)
        at = len(steps)
        for i, other in enumerate(steps):
            stage = "fuse" if other.stage == "optional" else other.stage
            if registry.STAGES.index(stage) > order:
                at = i
                break
        steps = [*steps[:at], step, *steps[at:]]
    return steps
