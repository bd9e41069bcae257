"""Rules files: thresholds for some runs, checked before they are used. `fp8watch rules check FILE`.

Upstream:   (a TOML or JSON file)            Downstream: fp8watch_server.detect.thresholds
Shapes:     text -> Rules; (run id, run name) -> Thresholds
Thread:     any

    [defaults]                     # every run
    clip_depth = 2.0
    disable = ["bad-batch"]

    [runs."llama-*"]               # runs whose id or name matches; later sections win
    underflow_points = "8 %"
    sqnr_drop_db = "4 dB"

A value is a number in the threshold's unit, or a text with the unit. Unknown names, impossible values and wrong units
are refused, each with what would be right.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.detect.thresholds import BY_NAME, DEFAULTS, Threshold, Thresholds

MAX_FILE_BYTES = 1 << 20
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*?)\s*")
_SAME_UNIT = {
    "%": "share",
    "percent": "share",
    "step": "steps",
    "octave": "octaves",
    "db": "dB",
    "seconds": "s",
    "second": "s",
    "octave/step": "octaves/step",
    "x": "ratio",
    "logits": "logit",
}


class RulesError(ValueError):
    """A rules file that cannot be used. `problems` holds every line of what is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Section:
    """Thresholds for runs whose id or name matches `pattern`."""

    pattern: str
    values: Mapping[str, float] = field(default_factory=dict)
    disable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rules:
    """A checked rules file."""

    sections: tuple[Section, ...] = ()

    def thresholds_for(self, run_id: str, run_name: str = "") -> Thresholds:
        """The thresholds of a run: every section that matches, in the order of the file."""
        values: dict[str, float] = {}
        disabled: frozenset[str] = frozenset()
        for section in self.sections:
            if any(fnmatch.fnmatchcase(name, section.pattern) for name in (run_id, run_name) if name):
                values |= section.values
                disabled |= section.disable
        return Thresholds(values, disabled) if values or disabled else DEFAULTS


def load_rules(path: Path) -> Rules:
    """Read and check a file.

    Raises:
        RulesError: every problem of the file, each with value, rule and remedy.
        OSError: it cannot be read.
    """
    raw = path.read_bytes()
    if len(raw) > MAX_FILE_BYTES:
        raise RulesError([f"{path.name} of {len(raw)} bytes: at most {MAX_FILE_BYTES}; split it"])
    try:
        text = raw.decode("utf-8")
        data = json.loads(text) if path.suffix == ".json" else _toml(text)
    except (ValueError, RecursionError) as e:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise RulesError([f"{path.name}: not {kind} ({e}); correct it at that place"]) from e
    return check(data)


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise RulesError(["TOML needs Python 3.11, or the package tomli: install it, or write JSON"]) from None
    return tomllib.loads(text)


def check(data: Any) -> Rules:
    """Check what a file holds.

    Raises:
        RulesError: every problem.
    """
    problems: list[str] = []
    sections: list[Section] = []
    if not isinstance(data, dict):
        raise RulesError([f'{type(data).__name__} at the top: must be tables [defaults] and [runs."PATTERN"]'])
    for name in data:
        if name not in ("defaults", "runs"):
            problems.append(
                f'[{name}]: unknown section; known are [defaults] and [runs."PATTERN"]{_near(name, ("defaults", "runs"))}'
            )
    tables: list[tuple[str, str, Any]] = []
    if "defaults" in data:
        tables.append(("[defaults]", "*", data["defaults"]))
    runs = data.get("runs", {})
    if not isinstance(runs, dict):
        problems.append(f'runs = {runs!r}: must be tables, one a pattern: [runs."llama-*"]')
        runs = {}
    tables += [(f'[runs."{pattern}"]', pattern, table) for pattern, table in runs.items()]
    for where, pattern, table in tables:
        if not isinstance(table, dict):
            problems.append(f"{where} = {table!r}: must be a table of thresholds")
            continue
        sections.append(_section(where, pattern, table, problems))
    if problems:
        raise RulesError(problems)
    return Rules(tuple(sections))


def _section(where: str, pattern: str, table: Mapping[str, Any], problems: list[str]) -> Section:
    values: dict[str, float] = {}
    disable: set[str] = set()
    for name, value in table.items():
        if name == "disable":
            wanted = value if isinstance(value, list) else [value]
            for slug in wanted:
                if slug in SLUGS:
                    disable.add(slug)
                else:
                    problems.append(f"{where} disable {slug!r}: no failure mode{_near(str(slug), SLUGS)}")
            continue
        threshold = BY_NAME.get(name)
        if threshold is None:
            hint = _near(name, tuple(BY_NAME))
            problems.append(f"{where} {name}: unknown threshold{hint}; `fp8watch rules list` shows all of them")
            continue
        got = _value(threshold, value)
        if isinstance(got, str):
            problems.append(f"{where} {name} = {value!r}: {got}")
        else:
            values[name] = got
    if values.get("attention_logit_warning", 0) > values.get("attention_logit_critical", math.inf):
        problems.append(f"{where} attention_logit_warning is above attention_logit_critical: the page would come first")
    if values.get("frozen_clip_depth", 0) > values.get("clip_depth", DEFAULTS.clip_depth):
        problems.append(f"{where} frozen_clip_depth is above clip_depth: a frozen scale would be called a clip")
    return Section(pattern, values, frozenset(disable))


def _value(threshold: Threshold, value: Any) -> float | str:
    """The number, or what is wrong with it."""
    unit, rule = threshold.unit, f"must be a number of {threshold.unit} from {threshold.low:g} to {threshold.high:g}"
    remedy = f"the default is {threshold.default:g}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return f"{rule}; {remedy}"
    number = value
    if isinstance(value, str):
        got = _QUANTITY.fullmatch(value)
        if got is None:
            return f"{rule}; {remedy}"
        given = got[2]
        if given and _SAME_UNIT.get(given.lower(), given) != unit:
            return f"the unit is {unit}, not {given}; {rule}, {remedy}"
        number = float(got[1]) / (100 if given in ("%", "percent") else 1)
    number = float(number)
    if not math.isfinite(number) or not threshold.low <= number <= threshold.high:
        return f"{rule}; {remedy}"
    if threshold.whole and number != int(number):
        return f"must be a whole number of {unit}; {remedy}"
    return number


def _near(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
