"""Addresses of the list of runs: each filter, column and page of it is a link.

Shapes:     run_list.Wanted -> query strings and what the template shows of them
Thread:     any; pure functions
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from fp8watch_server.store.run_list import Found, Wanted

FILTERS = ("status", "severity", "mode", "recipe", "tag", "host", "owner")
CHOICES = {"status": ("running", "stalled", "ended"), "severity": ("critical", "warning", "info")}


@dataclass(frozen=True)
class Column:
    """A head of the table."""

    label: str
    sort: str = ""
    """What it sorts by; '' for not at all."""
    number: bool = False
    kind: str = ""
    """A class of the style sheet."""


COLUMNS = (
    Column("Run", "name"),
    Column("Needs", "need"),
    Column("Incidents"),
    Column("Owner", "owner"),
    Column("Status", "status"),
    Column("Step", "step", number=True),
    Column("Loss", number=True),
    Column("Loss over steps", kind="trend"),
    Column("Recipe", "recipe"),
    Column("Tags", "tags"),
    Column("Ranks", "ranks", number=True),
    Column("Last seen", "seen"),
)


def url(wanted: Wanted, **changes: Any) -> str:
    """The list with other conditions; it begins at its first page unless that is what changes."""
    asked = asdict(replace(wanted, **{"page": 1, **changes}))
    default = asdict(Wanted())
    query = {k: ("1" if v is True else v) for k, v in asked.items() if v != default[k] and v is not False}
    return f"/?{urlencode(query)}" if query else "/"


def heads(wanted: Wanted) -> list[dict[str, Any]]:
    """The columns with their links; a second click turns the order round."""
    out: list[dict[str, Any]] = []
    for column in COLUMNS:
        is_on = column.sort == wanted.sort and bool(column.sort)
        link = url(wanted, sort=column.sort, reverse=is_on and not wanted.reverse) if column.sort else ""
        descends = (column.sort in ("need", "step", "ranks", "seen")) != wanted.reverse
        order = ("descending" if descends else "ascending") if is_on else ""
        out.append({**asdict(column), "url": link, "order": order})
    return out


def active(wanted: Wanted) -> list[tuple[str, str, str]]:
    """(name, value, the list without it) of each condition that is on."""
    on = [(name, getattr(wanted, name)) for name in ("q", *FILTERS)]
    return [(name, value, url(wanted, **{name: ""})) for name, value in on if value]


def pager(wanted: Wanted, found: Found) -> dict[str, Any]:
    """Links to the page before and after, None at an end."""
    before = url(wanted, page=found.page - 1) if found.page > 1 else None
    after = url(wanted, page=found.page + 1) if found.page < found.num_pages else None
    return {"before": before, "after": after, "page": found.page, "num_pages": found.num_pages}


def selects(wanted: Wanted, choices: dict[str, list[str]]) -> list[dict[str, Any]]:
    """The filters with what they offer: values that occur, and the one that is on."""
    out: list[dict[str, Any]] = []
    for name in FILTERS:
        offered = list(CHOICES.get(name) or choices.get(name, []))
        value = getattr(wanted, name)
        if value and value not in offered:
            offered.insert(0, value)
        if offered:
            out.append({"name": name, "value": value, "offered": offered})
    return out
