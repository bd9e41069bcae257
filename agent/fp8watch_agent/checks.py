"""Values that people gave, checked by msgspec and refused in our own words: value, rule, remedy.

A type carries its bounds as `msgspec.Meta`, and beside them a `Rule`: how a value is read before it is checked, and what
is said when it is refused. msgspec's own words name the type of a program, and no remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rule:
    """What stands beside a type.

    Args:
        text: what is said where `parse` or the type refuses a value.
        parse: given value -> value to check. ValidationError stands for the rule; any other ValueError speaks for itself.
    """

    text: str = ""
    parse: Callable[[Any], Any] = _as_it_is


def checked(value: Any, hint: Any) -> Any:
    """The value, as its type takes it.

    Raises:
        ValueError: the rule, with the remedy; never the value.
    """
    rule = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Rule)), Rule())
    try:
        return msgspec.convert(rule.parse(value), hint)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: a lone surrogate is no text to msgspec
        raise ValueError(rule.text) from None


def argument(name: str, value: Any, hint: Any) -> Any:
    """The value of an argument, as its type takes it.

    Raises:
        ValueError: name, value, rule, remedy.
    """
    try:
        return checked(value, hint)
    except ValueError as e:
        raise ValueError(f"{name}={value!r}: {e}") from None


def digits(text: str) -> int:
    """Parser of a whole number, 0 or more, written in digits alone: Python's own takes `1_0`, `+1` and other scripts' too."""
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise msgspec.ValidationError
    return int(text)


def near(name: object, known: Sequence[str]) -> str:
    """`; did you mean ...?` where something is close."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
