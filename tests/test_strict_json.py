"""Strict reading of JSON into dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from qkablate.strict_json import from_json, parse_json


@dataclass(frozen=True)
class Part:
    kind: Literal["a", "b"]
    margin: float = 0.5


@dataclass(frozen=True)
class Whole:
    name: str
    count: int
    parts: list[Part]
    seeds: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    rate: int | str | None = None
    number: int = field(default=0, metadata={"from_json": int})


VALID = {"name": "x", "count": 3, "parts": [{"kind": "a"}, {"kind": "b", "margin": 1}]}


def test_values_become_dataclasses():
    parts = [Part("a"), Part("b", 1)]
    assert from_json(Whole, VALID) == Whole("x", 3, parts)
    more = {"seeds": [1, 2], "facts": {"a": [1]}, "rate": "auto", "number": "7"}
    assert from_json(Whole, VALID | more) == Whole("x", 3, parts, (1, 2), {"a": [1]}, "auto", 7)
    assert from_json(dict[str, list[float]], {"a": [1, 2.5]}) == {"a": [1, 2.5]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "surprise is not a known key"),
        ({"name": 1}, "name is not of type str"),
        ({"count": True}, "count is not of type int"),
        ({"count": 3.0}, "count is not of type int"),
        ({"parts": {}}, r"parts is not of type list\[.*Part\]"),
        ({"parts": [{"kind": "c"}]}, r"parts\[0\].kind is not of type typing.Literal"),
        ({"parts": [{"kind": "a", "margin": "1"}]}, r"parts\[0\].margin is not of type float"),
        ({"parts": [{"kind": "a", "margin": float("nan")}]}, "margin is not of type float"),
        ({"parts": [{"kind": "a", "margin": float("inf")}]}, "margin is not of type float"),
        ({"parts": [{"kind": "a", "margin": 10**400}]}, "margin is not of type float"),
        ({"parts": [{}]}, r"parts\[0\].kind is missing"),
        ({"parts": [3]}, r"parts\[0\] is not of type Part"),
        ({"seeds": [1, None]}, r"seeds\[1\] is not of type int"),
        ({"facts": []}, "facts is not of type"),
        ({"rate": 0.5}, "rate is not of type"),
        ({"number": "x"}, "invalid literal"),
    ],
)
def test_other_values_are_rejected(change, message):
    with pytest.raises(ValueError, match=message) as error:
        from_json(Whole, VALID | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_only_a_map_is_a_dataclass(value):
    with pytest.raises(ValueError, match="manifest is not of type Whole"):
        from_json(Whole, value, "manifest")


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000])
def test_invalid_or_deep_text_is_rejected(text):
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)
