"""The committed dashboards, and what Grafana would make of their queries before it sends them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards" / "grafana" / "dashboards"
POSTGRES, PROMETHEUS = "fp8watch-postgres", "fp8watch-prometheus"
BUILT_IN = {"__data", "__interval", "__rate_interval"}
_VARIABLE = re.compile(r"\$\{(\w+)(?:\.[\w.]+)?(?::(\w+))?\}|\$(?!__(?:time|unix))(\w+)")


def load() -> dict[str, dict[str, Any]]:
    """Every dashboard by its uid."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


@dataclass(frozen=True)
class Query:
    """One query of a dashboard: of a panel, a variable or an annotation."""

    board: str
    where: str
    source: str
    text: str
    panel: dict[str, Any] | None = None
    over_time: bool = False
    instant: bool = False

    def __str__(self) -> str:
        return f"{self.board.removeprefix('fp8watch-')}: {self.where}"


def queries(boards: dict[str, dict[str, Any]], source: str) -> list[Query]:
    """All queries to one data source."""
    return [q for uid, board in boards.items() for q in _of_board(uid, board) if q.source == source]


def _of_board(uid: str, board: dict[str, Any]) -> Iterator[Query]:
    for panel in board["panels"]:
        for target in panel["targets"]:
            text = target.get("rawSql") or target["expr"]
            yield Query(
                uid,
                f"{panel['title']} {target['refId']}",
                target["datasource"]["uid"],
                text,
                panel,
                over_time=target.get("format") == "time_series",
                instant=bool(target.get("instant")),
            )
    for v in board["templating"]["list"]:
        if v["type"] == "query":
            text = v["query"]["query"] if isinstance(v["query"], dict) else v["query"]
            yield Query(uid, f"variable {v['name']}", v["datasource"]["uid"], text)
    for a in board["annotations"]["list"]:
        yield Query(uid, f"annotation {a['name']}", a["datasource"]["uid"], a["target"]["rawSql"])


def names_of_variables(text: str) -> set[str]:
    """Variables that a text asks for."""
    return {m[1] or m[3] for m in _VARIABLE.finditer(text)}


def interpolated(text: str, values: dict[str, str | list[str]]) -> str:
    """Variables put in, in the format that is asked for."""

    def put(m: re.Match[str]) -> str:
        name, how = m[1] or m[3], m[2]
        value = values[name]
        if how == "sqlstring":
            several = value if isinstance(value, list) else [value]
            return ",".join("'" + v.replace("'", "''") + "'" for v in several)
        assert isinstance(value, str)
        return value

    return _VARIABLE.sub(put, text)


def sql(text: str, values: dict[str, str | list[str]], since: str, until: str) -> str:
    """Macros and variables as the data source for PostgreSQL expands them."""
    text = interpolated(text, {**values, "__interval": "1m"})
    text = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 BETWEEN '{since}' AND '{until}'", text)
    text = re.sub(r"\$__timeGroup\((\w+), 1m\)", r"floor(extract(epoch from \1)/60)*60", text)
    assert "$" not in text, f"not expanded: {text}"
    return text


def promql(text: str) -> str:
    """Variables put in, as where nothing is chosen."""
    text = interpolated(text, {"run": ".*", "instance": ".*", "__rate_interval": "1m"})
    assert "$" not in text, f"not expanded: {text}"
    return text
