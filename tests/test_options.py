"""Typed options from keywords and from text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from relax_llm_passes import InputError, UnknownNameError
from relax_llm_passes.options import describe, document, from_text, make


@dataclass(frozen=True)
class Options:
    """Options of a pass.

    Attributes
    ----------
    rows : int
        How many rows.
        And a second line.
    names : tuple[str, ...]
        Which names.
    """

    rows: int = 4
    scale: float = 1.5
    fast: bool = True
    style: Literal["half", "pairs"] = "half"
    limit: int | None = None
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rows", "16", 16),
        ("rows", "-3", -3),
        ("scale", "2", 2.0),
        ("scale", "1e-5", 1e-5),
        ("fast", "off", False),
        ("fast", "True", True),
        ("style", "pairs", "pairs"),
        ("limit", "none", None),
        ("limit", "9", 9),
        ("names", "a+b.c", ("a", "b.c")),
        ("names", "", ()),
    ],
)
def test_text_to_value(name, text, value):
    found = from_text("P", Options, name, text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rows", "many", "P.rows='many': expected int"),
        ("rows", "1.5", "expected int"),
        ("fast", "perhaps", "expected true or false"),
        ("style", "thirds", "expected one of half, pairs"),
        ("limit", "x", "expected int"),
    ],
)
def test_bad_text_says_what_is_expected(name, text, expected):
    with pytest.raises(InputError, match=expected):
        from_text("P", Options, name, text)


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="did you mean 'rows'"):
        from_text("P", Options, "row", "1")
    with pytest.raises(UnknownNameError, match="unknown option of P 'stile'; did you mean 'style'"):
        make("P", Options, {"stile": "half"})


@pytest.mark.parametrize(
    "values", [{"rows": "4"}, {"rows": True}, {"fast": 1}, {"style": "x"}, {"names": "a"}]
)
def test_wrong_types_are_refused(values):
    with pytest.raises(InputError, match="expected"):
        make("P", Options, values)


def test_right_types_are_taken():
    made = make("P", Options, {"rows": 2, "scale": 3, "limit": 7, "names": ("a",)})
    assert (made.rows, made.scale, made.limit, made.names) == (2, 3, 7, ("a",))


def test_description_and_documentation():
    rows = {name: (kind, default) for name, kind, default in describe(Options)}
    assert rows["rows"] == ("int", "4")
    assert document(Options)["rows"] == "How many rows. And a second line."
    assert document(Options)["names"] == "Which names."


def test_every_option_of_every_pass_is_documented():
    import relax_llm_passes as rlp

    for factory in rlp.list_passes():
        names = {name for name, _, _ in describe(factory.options_type)}
        assert names == names & set(document(factory.options_type)), factory.name
