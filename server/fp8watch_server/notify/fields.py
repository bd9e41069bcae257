"""Fields of a table of a routes file, each checked: value, rule, remedy.

Upstream:   (a table of a file)    Downstream: fp8watch_server.notify.routes_file
Shapes:     dict -> durations, numbers, names, secrets
Thread:     start of the process; pure but for the files that secrets are in
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
NAMES = re.compile(r"[A-Za-z0-9_-]{1,40}")
MAX_SECRET_BYTES = 64 << 10


def near(name: object, known: Sequence[str]) -> str:
    """`; did you mean ...?` where something is close."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


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

    def duration(self, name: str, default: float, *, low: float = 0.0, high: float = math.inf) -> float:
        """Seconds, of "10 s" or a number of seconds."""
        value = self._table.get(name, default)
        seconds = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        elif isinstance(value, str) and (got := _QUANTITY.fullmatch(value)):
            unit = _ALSO.get(got[2], got[2]) or "s"
            seconds = float(got[1]) * DURATION.get(unit, math.nan)
        if name in self._table and not low <= seconds <= high:
            units = ", ".join(DURATION)
            self._say(name, f'{value!r} must be a time from {low:g} s to {high:g} s, such as "30 s" (units: {units})')
            return default
        return seconds

    def whole(self, name: str, default: int, *, high: int) -> int:
        """A whole number of 0 or more."""
        value = self._table.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= high:
            self._say(name, f"{value!r} must be a whole number from 0 (no limit) to {high}; the default is {default}")
            return default
        return value

    def flag(self, name: str) -> bool:
        """true or false; absent: false."""
        value = self._table.get(name, False)
        if not isinstance(value, bool):
            self._say(name, f"{value!r} must be true or false")
            return False
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """A word out of some."""
        value = self._table.get(name)
        if isinstance(value, str) and value in known:
            return value
        shown = "is missing;" if value is None else f"{value!r}"
        self._say(name, f"{shown} must be one of {', '.join(known)}{near(value, known)}")
        return ""

    def names(self, name: str) -> tuple[str, ...]:
        """A list of texts; absent: empty."""
        value = self._table.get(name, [])
        if isinstance(value, list) and all(isinstance(v, str) and v for v in value):
            return tuple(value)
        self._say(name, f'{value!r} must be a list of texts, such as {name} = ["..."]')
        return ()

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
