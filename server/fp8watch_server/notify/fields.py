"""Fields of a table of a routes file, each checked: value, rule, remedy.

Shapes:     dict -> durations, numbers, names, secrets
Thread:     start of the process; pure but for the files that secrets are in
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from fp8watch_agent.checks import Rule, checked, near

DURATION = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_ALSO = {
    "second": "s",
    "seconds": "s",
    "m": "min",
    "minute": "min",
    "minutes": "min",
    "hour": "h",
    "hours": "h",
    "day": "d",
}
_QUANTITY = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]*)\s*")
MAX_SECRET_BYTES = 64 << 10

Flag = Annotated[bool, Rule("must be true or false")]


def _seconds(value: Any) -> Any:
    if isinstance(value, str) and (got := _QUANTITY.fullmatch(value)):
        return float(got[1]) * DURATION.get(_ALSO.get(got[2], got[2]) or "s", math.nan)
    return value


def duration(low: float, high: float) -> Any:
    """Seconds, of "10 s" or a number of seconds."""
    rule = f'must be a time from {low:g} s to {high:g} s, such as "30 s" (units: {", ".join(DURATION)})'
    return Annotated[float, Meta(ge=low, le=high), Rule(rule, _seconds)]


def whole(high: int, default: int) -> Any:
    """A whole number of 0 or more."""
    rule = f"must be a whole number from 0 (no limit) to {high}; the default is {default}"
    return Annotated[int, Meta(ge=0, le=high), Rule(rule)]


def texts(name: str) -> Any:
    """A list of texts, none of them empty."""
    rule = f'must be a list of texts, such as {name} = ["..."]'
    return Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Rule(rule)]


class Fields:
    """One table. What is wrong goes to `problems`; a default stands in for it, so that the rest is checked too.

    Args:
        hide: names of secrets, whose values are not repeated.
    """

    def __init__(
        self, where: str, table: Mapping[str, Any], problems: list[str], known: Sequence[str], hide: Sequence[str] = ()
    ) -> None:
        self._where, self._table, self._problems = where, table, problems
        for name in table:
            if name in hide:
                self._say(
                    name,
                    f"is a secret and never stands in this file; write it into another and give {name}_file, or "
                    f"into the environment and give {name}_env",
                )
            elif name not in known:
                self._say(name, f"unknown{near(name, known)}; known are {', '.join(known)}")

    def _say(self, name: str, text: str) -> None:
        self._problems.append(f"{self._where} {name}: {text}".strip())

    def table(self, name: str, rule: str) -> dict[str, Any]:
        """A table of tables; absent: empty."""
        value = self._table.get(name, {})
        if isinstance(value, dict):
            return value
        self._say(name, f"must be {rule}")
        return {}

    def get(self, name: str, hint: Any, default: Any) -> Any:
        """A value by its type; absent: the default."""
        if name not in self._table:
            return default
        try:
            return checked(self._table[name], hint)
        except ValueError as e:
            self._say(name, f"{self._table[name]!r} {e}")
            return default

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """A word out of some."""
        value = self._table.get(name)
        if isinstance(value, str) and value in known:
            return value
        shown = "is missing;" if value is None else f"{value!r}"
        self._say(name, f"{shown} must be one of {', '.join(known)}{near(value, known)}")
        return ""

    def secret(self, name: str, folder: Path, environ: Mapping[str, str], *, needed: bool = False) -> str:
        """The text in the file that NAME_file names, or in the variable that NAME_env names."""
        path, variable = self._table.get(f"{name}_file"), self._table.get(f"{name}_env")
        if path is not None and variable is not None:
            self._say(name, f"{name}_file and {name}_env are both given; keep one of them")
        elif isinstance(path, str) and "://" in path:
            self._say(
                f"{name}_file", "holds an address, which is a secret; write it into a file and give the file's path"
            )
        elif isinstance(path, str) and path:
            return self._from_file(f"{name}_file", folder / Path(path).expanduser())
        elif isinstance(variable, str) and variable:
            if found := environ.get(variable, "").strip():
                return found
            self._say(f"{name}_env", f"variable {variable} is not set, or empty; set it where the collector is started")
        elif path is not None or variable is not None:
            which = f"{name}_file" if path is not None else f"{name}_env"
            self._say(which, "must be the " + ("path of a file" if path is not None else "name of a variable"))
        elif needed and name not in self._table:
            self._say(name, f"is missing; give {name}_file or {name}_env")
        return ""

    def _from_file(self, name: str, path: Path) -> str:
        try:
            text = path.read_bytes()[:MAX_SECRET_BYTES].decode("utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
            self._say(name, f"{str(path)!r} cannot be read ({reason}); name a readable file with the value in it")
            return ""
        if not text:
            self._say(name, f"{str(path)!r} is empty; write the value into it")
        return text
