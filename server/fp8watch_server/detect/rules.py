"""Rules files: thresholds for some runs, checked before they are used. `fp8watch rules check FILE`.

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

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fp8watch_agent.checks import Rule, checked, near
from fp8watch_server.config.file import FileError, read_file
from fp8watch_server.detect.modes import SLUGS
from fp8watch_server.detect.thresholds import BY_NAME, DEFAULTS, Threshold, Thresholds

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


class RulesError(FileError):
    """A rules file that cannot be used. `problems` holds every line of what is wrong with it."""


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
    return check(read_file(path, RulesError))


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
                f'[{name}]: unknown section; known are [defaults] and [runs."PATTERN"]{near(name, ("defaults", "runs"))}'
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
                    problems.append(f"{where} disable {slug!r}: no failure mode{near(str(slug), SLUGS)}")
            continue
        threshold = BY_NAME.get(name)
        if threshold is None:
            hint = near(name, tuple(BY_NAME))
            problems.append(f"{where} {name}: unknown threshold{hint}; `fp8watch rules list` shows all of them")
            continue
        try:
            values[name] = checked(value, _type_of(threshold))
        except ValueError as e:
            problems.append(f"{where} {name} = {value!r}: {e}")
    if values.get("attention_logit_warning", 0) > values.get("attention_logit_critical", math.inf):
        problems.append(f"{where} attention_logit_warning is above attention_logit_critical: the page would come first")
    if values.get("frozen_clip_depth", 0) > values.get("clip_depth", DEFAULTS.clip_depth):
        problems.append(f"{where} frozen_clip_depth is above clip_depth: a frozen scale would be called a clip")
    return Section(pattern, values, frozenset(disable))


def _type_of(threshold: Threshold) -> Any:
    """Bounds, and how a number is read: in the unit of the threshold, or with the unit behind it."""
    unit, remedy = threshold.unit, f"the default is {threshold.default:g}"
    rule = f"must be a number of {unit} from {threshold.low:g} to {threshold.high:g}"

    def number(value: Any) -> Any:
        if isinstance(value, str):
            got = _QUANTITY.fullmatch(value)
            if got is None:
                raise msgspec.ValidationError
            given = got[2]
            if given and _SAME_UNIT.get(given.lower(), given) != unit:
                raise ValueError(f"the unit is {unit}, not {given}; {rule}, {remedy}")
            value = float(got[1]) / (100 if given in ("%", "percent") else 1)
        in_range = isinstance(value, float) and threshold.low <= value <= threshold.high
        if threshold.whole and in_range and not value.is_integer():
            raise ValueError(f"must be a whole number of {unit}; {remedy}")
        return value

    return Annotated[float, Meta(ge=threshold.low, le=threshold.high), Rule(f"{rule}; {remedy}", number)]
