"""The first sentence of a run's page: what it needs, or what its calm stands for.

Shapes:     a run, its incidents, its agents, what was measured -> Headline
Thread:     any; pure functions but `watched`

Green is said only with what was looked at, and orange only with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.pages import formatting
from fp8watch_server.store import queries
from fp8watch_server.store.incident_states import ACKNOWLEDGED, ASKS_TO_BE_SEEN, OPEN, UNSEEN
from fp8watch_server.store.rows import IncidentRow, ListedRun, RunRow

WINDOW_STEPS = 16
MAX_READ = 20_000
"""Measurements that are looked at to see how often sites are measured."""
EACH_STEP_FROM = 0.9
"""Share of a site's steps: the newest step may have come in part, and a module need not be called in each."""


@dataclass(frozen=True)
class Watched:
    """What was looked at."""

    first_step: int | None
    last_step: int | None
    num_sites: int
    share: float | None
    """Of the newest steps, the share in which a site was measured; None: nothing came."""

    def steps_since(self, step: int | None = None) -> int:
        """Number of steps after `step`, None: of all."""
        if self.first_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - (self.first_step - 1 if step is None else step))

    def each(self) -> str:
        """How often each site is measured."""
        if self.share is None:
            return "not measured"
        if self.share >= EACH_STEP_FROM:
            return "each step"
        return (
            f"each in 1 of {round(1 / self.share)} steps"
            if self.share < 2 / 3
            else f"each in {self.share:.0%} of the steps"
        )


@dataclass(frozen=True)
class Headline:
    """One sentence in plain words."""

    tone: str
    """critical | warning | info | calm"""
    sentence: str
    incident: IncidentRow | None = None
    """What it speaks of."""
    more: str = ""
    """What there is besides."""


def watched(conn: Connection, run: RunRow) -> Watched:
    """Steps and sites of a run, and how often these are measured now."""
    c, last = t.scalar.c, run["last_step"]
    if last is None:
        return Watched(None, None, int(run["num_sites"]), None)
    of_run = (c.run_id == run["id"], c.tenant == t.DEFAULT_TENANT)
    first = conn.execute(sa.select(sa.func.min(c.step)).where(*of_run)).scalar()
    window = min(WINDOW_STEPS, max(2, MAX_READ // max(1, int(run["num_sites"]))))
    low = max(int(first or 0), int(last) - window + 1)
    found = queries.heatmap(conn, run["id"], "amax_max", low, int(last), window)
    nonfinite = len(found["nonfinite"])  # None in `values`, and measured
    measured = nonfinite + sum(v is not None for row in found["values"] for v in row)
    cells = max(1, len(found["sites"])) * (int(last) - low + 1)
    return Watched(first, int(last), int(run["num_sites"]), measured / cells if measured else None)


def headline(
    run: RunRow,
    incidents: Sequence[IncidentRow],
    not_watching: str | None,
    agents: Mapping[str, Any],
    seen: Watched,
    *,
    observed: float | None = None,
    fixed_in: str = "",
) -> Headline:
    """What somebody who has five seconds must know.

    Args:
        incidents: in the order of `page_queries.incidents`.
        not_watching: of `coverage.not_watching`.
        agents: of `coverage.agents`.
        observed: share of the model's GEMM FLOPs that is observed.
        fixed_in: the run in which a cause that is back was closed as fixed.
    """
    asking = [i for i in incidents if i["state"] in (OPEN, UNSEEN) and i["severity"] in ASKS_TO_BE_SEEN]
    if asking:
        return _asking(asking, incidents, seen, fixed_in)
    if not_watching:
        return Headline("warning", f"Not watching: {not_watching.removeprefix('Attached, but ')}")
    if not seen.num_sites:
        return Headline(
            "warning", "Not watching any GEMM: attach took no Linear over; only loss and steps are recorded."
        )
    if run["status"] == "stalled":
        ago = formatting.ago(run["last_seen_at"]).removesuffix(" ago")
        why = f"the last step that came is {run['last_step']}, and the process did not say that it ended"
        return Headline("warning", f"Silent for {ago}: {why}.")
    if seen.share is None:
        why = "paused, outside of attach(windows=), or dropped on the way"
        return Headline("warning", f"No statistics in the last steps: {why}.")
    if lost := _lost(run, agents):
        return Headline("warning", f"Nothing raised, but not everything {lost}.")
    if observed is not None and observed < 0.5:
        part = formatting.ratio(observed)
        return Headline("warning", f"Nothing raised in what is observed: that is {part} of the model's GEMM FLOPs.")
    return _calm(incidents, seen)


def _asking(asking: Sequence[IncidentRow], incidents: Sequence[IncidentRow], seen: Watched, fixed_in: str) -> Headline:
    """Of the worst that asks: when its cause broke first in this run, and when again."""
    worst = asking[0]
    mine = sorted((i for i in asking if _is_again(worst, i)), key=lambda i: i["first_step"])
    first, last, again = mine[0]["first_step"], mine[-1]["last_step"], [i["first_step"] for i in mine[1:]]
    since = f"since step {first}{_and_at(again)}"
    title = mine[0]["title"].rstrip(".")
    if worst["state"] == UNSEEN:
        steps = f"step {first}" if first == last else f"steps {first}–{last}"
        sentence = f"Over, and not seen yet ({steps}{_and_at(again)}): {title}."
    elif worst["regression_of"]:
        where = f"in {fixed_in}" if fixed_in else "before"
        sentence = f"Broken {since}, though closed as fixed {where}: {title}."
    elif worst["severity"] == "critical":
        sentence = f"Broken {since}: {title}."
    else:
        sentence = f"Needs a look {since}: {title}."
    rest = [i for i in asking if i not in mine]
    num_open = sum(i["state"] == OPEN for i in rest)
    counts = [f"{num_open} more open" if num_open else "", f"{len(rest) - num_open} more not seen yet"]
    told = [text for text in (counts if len(rest) > num_open else counts[:1]) if text]
    before = min((i["first_step"] for i in rest if i["attempt"] == worst["attempt"]), default=first)
    if before < first:
        told.append(f"the first at step {before}")
    first_of_all = min(int(i["first_step"]) for i in incidents)
    if seen.first_step is not None and (num := first_of_all - seen.first_step) > 0:
        told.append(f"nothing raised in the {_steps(num)} before step {first_of_all}")
    return Headline(worst["severity"], sentence, mine[0], ", ".join(told))


def _is_again(worst: IncidentRow, other: IncidentRow) -> bool:
    """The same cause in the same attempt, or the incident itself."""
    same = bool(worst.get("cause_id")) and other.get("cause_id") == worst["cause_id"]
    return other is worst or (same and other["attempt"] == worst["attempt"])


def _and_at(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    shown = [str(step) for step in steps[:3]]
    more = f" and {len(steps) - 3} times more" if len(steps) > 3 else ""
    if more or len(shown) == 1:
        return f", again at {', '.join(shown)}{more}"
    return f", again at {', '.join(shown[:-1])} and {shown[-1]}"


def in_order(asking: Sequence[IncidentRow]) -> list[IncidentRow]:
    """Cards of a run: what broke first, then severe before mild, each by the step of its onset."""
    first = min(asking, key=lambda i: (-i["attempt"], i["first_step"]), default=None)
    by_severity = {severity: k for k, severity in enumerate(("critical", "warning", "info"))}
    return sorted(asking, key=lambda i: (i is not first, by_severity.get(i["severity"], 9), i["first_step"]))


def _lost(run: RunRow, agents: Mapping[str, Any]) -> str:
    if agents["num_unwell"]:
        worst = agents["rows"][0]
        others = f", and {agents['num_unwell'] - 1} ranks more" if agents["num_unwell"] > 1 else ""
        how = "came in time" if worst["why"] == [worst["late"]] else "arrived"
        return f"{how}: rank {worst['rank']}: {'; '.join(worst['why'])}{others}"
    if agents["num_missing"]:
        return f"arrived: {agents['num_missing']} of {run['world_size']} ranks never came{agents['since']}"
    return ""


def _calm(incidents: Sequence[IncidentRow], seen: Watched) -> Headline:
    looked = f"{seen.num_sites} sites, {seen.each()}"
    taken = [i for i in incidents if i["state"] == ACKNOWLEDGED]
    if taken:
        owner = f" by {taken[0]['owner']}" if taken[0]["owner"] else ""
        more = f"{len(taken) - 1} more acknowledged" if len(taken) > 1 else ""
        return Headline("info", f"Acknowledged{owner}: {taken[0]['title'].rstrip('.')}.", taken[0], more)
    if not incidents:
        return Headline("calm", f"Nothing raised in {_steps(seen.steps_since())}, {looked}.")
    last = max(int(i["last_step"]) for i in incidents)
    since = seen.steps_since(last)
    if not since:
        return Headline("calm", f"Nothing open, {looked}.")
    return Headline("calm", f"Nothing raised since step {last}: {_steps(since)}, {looked}.")


def _steps(n: int) -> str:
    return f"{formatting.number(n)} step{'' if n == 1 else 's'}"


NEEDS = {
    6: ("critical", "broken now"),
    5: ("critical", "broke, not seen yet"),
    4: ("warning", "not watching"),
    3: ("warning", "warning, open"),
    2: ("warning", "silent"),
    1: ("warning", "warning, not seen yet"),
}
"""store.run_list's need -> tone and reason, for a row of the list."""


def need_of(run: ListedRun, now: float | None = None) -> tuple[str, str, str] | None:
    """Tone, reason and explanation of a run in the list; None where it needs nobody."""
    if not run["need"]:
        return None
    tone, reason = NEEDS[run["need"]]
    if run["need"] == 6 and run["status"] == "ended":
        reason = "ended broken"
    if run["need"] == 2:
        seconds = max(0.0, (time.time() if now is None else now) - run["last_seen_at"])
        return tone, reason, f"nothing came for {seconds / 60:.0f} min, and the process did not say that it ended"
    return tone, reason, run["not_watching"] if run["need"] == 4 else ""
