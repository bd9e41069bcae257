"""Answers of a collector as plain text: tables, times, one run, one incident.

Thread:     any; pure functions
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ABSENT = "-"
MAX_CELL_CHARS = 60
CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")
BLOCKS = "▁▂▃▄▅▆▇█"


def plain(value: object) -> str:
    """A value on one line, without control characters: names come from outside, and a terminal obeys them."""
    return ABSENT if value is None or value == "" else str(value).translate(CONTROL)


def cut(text: str, at_most: int = MAX_CELL_CHARS) -> str:
    """The end of a name tells more than its middle."""
    return text if len(text) <= at_most else f"{text[: at_most // 3]}…{text[-(at_most - at_most // 3 - 1) :]}"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Columns as wide as they need to be; numbers to the right."""
    cells = [[cut(plain(value)) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(heads), *cells]) for i in range(len(heads))]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(heads))
    ]
    for line in [list(heads), *cells]:
        yield "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()


def ago(at: float | None, now: float | None = None) -> str:
    """How long ago, in its largest unit."""
    if at is None:
        return ABSENT
    seconds = max(0.0, (time.time() if now is None else now) - at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{int(seconds)} s ago"


def counted(n: int, word: str) -> str:
    """A number with its word in the right form."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def place(of: Mapping[str, Any]) -> str:
    """Module, operand and tile of an incident."""
    parts = [of.get("module") or "whole run", of.get("operand")]
    tile, ranks = of.get("tile"), of.get("ranks") or []
    parts += [f"tile ({tile[0]}, {tile[1]})"] if tile else []
    parts += [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"] if ranks else []
    return plain(" ".join(str(p) for p in parts if p))


def latest(series: Mapping[str, Any]) -> str:
    """The newest value of a series; NaN and Inf by name."""
    special = {int(i): str(v) for i, v in series.get("nonfinite") or []}
    for i in range(len(series["steps"]) - 1, -1, -1):
        value = special.get(i, series["values"][i])
        if value is not None:
            return value if isinstance(value, str) else f"{value:.4g}"
    return ABSENT


def spark(series: Mapping[str, Any], width: int = 24) -> str:
    """A series as a line of blocks; what is not finite is ✕."""
    special = {int(i) for i, _ in series.get("nonfinite") or []}
    values = [None if i in special else v for i, v in enumerate(series["values"])]
    kept = [i for i, v in enumerate(values) if v is not None or i in special]
    kept = [kept[k * len(kept) // width] for k in range(width)] if len(kept) > width else kept
    known = [v for v in (values[i] for i in kept) if v is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    scale = (len(BLOCKS) - 1) / ((high - low) or 1.0)
    return "".join("✕" if (v := values[i]) is None else BLOCKS[round((v - low) * scale)] for i in kept)


def needs(run: Mapping[str, Any]) -> str:
    """What of a run asks for somebody: incidents that are open, and such as were over before anybody had seen them."""
    of = ((run["num_open_incidents"], "open"), (run.get("num_unseen_incidents"), "not seen yet"))
    return ", ".join(f"{n} {words}" for n, words in of if n)


RUN_HEADS = ("RUN", "NAME", "NEEDS", "STATUS", "STEP", "SITES", "RECIPE", "RANKS", "SEEN")


def run_row(run: Mapping[str, Any], now: float | None = None) -> tuple[object, ...]:
    """A run as a line of `fp8watch runs`."""
    return (
        run["id"], run["name"], needs(run), run["status"], run["last_step"], run["num_sites"], run["recipe"],
        run["world_size"], ago(run["last_seen_at"], now),
    )  # fmt: skip


INCIDENT_HEADS = ("INCIDENT", "SEVERITY", "STATE", "MODE", "STEP", "WHERE", "RUN")


def incident_row(incident: Mapping[str, Any]) -> tuple[object, ...]:
    """An incident as a line of `fp8watch incidents`."""
    state = incident.get("state") or incident["status"]
    where = place(incident["place"])
    return (
        incident["id"],
        incident["severity"],
        state,
        incident["mode"],
        incident["first_step"],
        where,
        incident["run_id"],
    )


def run_lines(run: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]], url: str) -> Iterator[str]:
    """One run."""
    yield f"{plain(run['name'] or run['id'])} ({plain(run['id'])})"
    yield f"  {run['status']}, step {plain(run['last_step'])}, last seen {ago(run['last_seen_at'])}"
    yield f"  recipe {plain(run['recipe'])}, backend {plain(run['backend'])}, {counted(run['world_size'], 'rank')}, {run['num_sites']} sites, attempt {run['attempt']}"
    if run.get("tags"):
        yield f"  tags {plain(', '.join(run['tags']))}"
    if run.get("note"):
        yield f"  note {plain(run['note'])}"
    yield f"  {url}"
    yield ""
    if incidents:
        yield from table(INCIDENT_HEADS, [incident_row(i) for i in incidents])
    else:
        yield "no incidents"


def incident_lines(incident: Mapping[str, Any], url: str) -> Iterator[str]:
    """One incident."""
    steps = f"{incident['first_step']}" + (
        f" to {incident['last_step']}" if incident["last_step"] != incident["first_step"] else ""
    )
    yield f"{incident['severity']}: {plain(incident['title'])}"
    yield f"  {plain(incident['mode'])}, {incident.get('state') or incident['status']}, verdict {incident['verdict']}, since {ago(incident['opened_at'])}"
    yield f"  run {plain(incident['run_id'])}, step {steps}, {place(incident['place'])}"
    yield f"  {url}"
    if incident.get("cause"):
        yield f"why: {plain(incident['cause'])}"
    for evidence in incident.get("evidence") or []:
        baseline = f", before {plain(evidence['baseline'])}" if evidence.get("baseline") is not None else ""
        unit = f" {plain(evidence['unit'])}" if evidence.get("unit") else ""
        yield f"  {plain(evidence['field'])} = {plain(evidence['value'])}{unit}{baseline}"
    for n, fix in enumerate(incident.get("fix") or [], 1):
        yield f"fix {n} ({plain(fix['kind'])}): {plain(fix['text'])}"
