"""A watch as a person sees it: one line, and a card in a notebook.

Thread:     the one that shows it; asks the collector, if there is one, for at most ASK_S
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fp8watch_agent.terminal.collector_client import Asking, NotAnswered, segment

ASK_S = 1.5
POINTS = 120
WIDTH, HEIGHT = 180, 34


@dataclass(frozen=True)
class Said:
    """What the collector says of a run; None: it was not asked, or did not answer."""

    incidents: Sequence[Mapping[str, Any]] | None = None
    loss: Mapping[str, Any] | None = None
    why: str = ""
    """Why it said nothing."""


NOT_ASKED = Said(why="an error")


def ask(collector: str | None, run_id: str) -> Said:
    """Incidents of a run that ask for somebody, and its loss."""
    if collector is None:
        return Said(why="no collector")
    try:
        asking = Asking(collector, timeout_s=ASK_S)
    except ValueError as e:
        return Said(why=str(e))
    try:
        of_run = f"/api/v1/runs/{segment(run_id)}"
        incidents = asking.listed(f"{of_run}/incidents", {"state": "asks"}, at_most=20)
        return Said(incidents, asking.json(f"{of_run}/scalars", {"name": "loss", "points": POINTS}))
    except NotAnswered as e:
        return Said(why=str(e))
    finally:
        asking.close()


def line(summary: Mapping[str, Any], *, detached: bool) -> str:
    """The watch in one line."""
    state = (
        "detached"
        if detached
        else f"step {summary['last_step']}"
        if summary["last_step"] is not None
        else "no step yet"
    )
    where = f", {summary['url']}" if summary["url"] else ""
    return (
        f"<fp8watch.Watch run {summary['run_id']}: {state}, {summary['num_sites']} sites, {summary['recipe']}{where}>"
    )


def card(summary: Mapping[str, Any], said: Said, *, detached: bool) -> str:
    """The watch as HTML: run, step, sites, incidents, loss, link. Loads nothing and runs nothing."""
    step = summary["last_step"]
    rows = [
        ("step", "none yet" if step is None else str(step)),
        ("sites", str(summary["num_sites"])),
        ("recipe", str(summary["recipe"])),
        ("incidents", _incidents(said)),
    ]
    cells = "".join(
        f'<span style="margin-right:18px"><small style="opacity:.65">{escape(k)}</small> {v if k == "incidents" else escape(v)}</span>'
        for k, v in rows
    )
    url = summary["url"]
    link = (
        f'<a href="{escape(url)}" target="_blank" rel="noreferrer">{escape(url)}</a>'
        if url
        else escape(f"spool {summary['spool']}; send it with fp8watch sync")
    )
    state = ' <small style="opacity:.65">detached</small>' if detached else ""
    return (
        '<div style="border:1px solid currentColor;border-radius:7px;padding:9px 14px;max-width:760px;font-family:system-ui,sans-serif;font-size:13px">'
        f'<strong>fp8watch</strong> run {escape(str(summary["run_id"]))}{state}<div style="margin:6px 0">{cells}</div>{_spark(said.loss)}<div>{link}</div></div>'
    )


def _incidents(said: Said) -> str:
    if said.incidents is None:
        return f'<span title="{escape(said.why)}">not known ({escape(said.why[:60])})</span>'
    if not said.incidents:
        return "none asks for you"
    first = said.incidents[0]
    over = " (over, not seen yet)" if first.get("state") == "unseen" else ""
    return f'<strong style="color:#d2480f">{len(said.incidents)}: {escape(str(first["title"])[:90])}{over}</strong>'


def _spark(series: Mapping[str, Any] | None) -> str:
    """The loss over steps; what is not finite is left out of the line and counted."""
    if series is None:
        return ""
    special = {int(i) for i, _ in series.get("nonfinite") or []}
    points = [
        (s, v)
        for i, (s, v) in enumerate(zip(series["steps"], series["values"], strict=True))
        if v is not None and i not in special
    ]
    if len(points) < 2:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    path = "".join(
        f"{'L' if k else 'M'}{(s - first) / max(1, last - first) * WIDTH:.1f} {2 + (high - v) / ((high - low) or 1.0) * (HEIGHT - 4):.1f}"
        for k, (s, v) in enumerate(points)
    )
    bad = f", {len(special)} not finite" if special else ""
    words = f"loss {points[0][1]:.4g} at step {first} to {points[-1][1]:.4g} at step {last}{bad}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{words}"><path d="{path}" fill="none" stroke="currentColor" stroke-width="1.4"/></svg>'
        f' <small style="opacity:.65">{words}</small>'
    )
