"""`fp8watch top`: runs, and the incidents that ask for somebody, live in the terminal.

Thread:     main

What is drawn is rich's, which is an extra of its own: `--once` needs none.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from fp8watch_agent.terminal import text
from fp8watch_agent.terminal.collector_client import Asking, NotAnswered, add_arguments, segment
from fp8watch_agent.terminal.command import answered, as_json, complain, say

NUM_RUNS = 15
NUM_INCIDENTS = 8
POINTS = 120
MISSING = "rich is not installed: pip install 'fp8watch[top]', or --once for one look as plain text"


@dataclass
class Look:
    """What a collector says at one moment."""

    runs: list[dict[str, Any]]
    incidents: list[dict[str, Any]]
    loss: dict[str, dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"runs": [{**run, "loss": self.loss.get(run["id"])} for run in self.runs], "incidents": self.incidents}


def look(asking: Asking) -> Look:
    """Running runs first, those that need somebody before the newest; incidents that are open or that nobody has seen yet."""
    runs = asking.listed("/api/v1/runs", at_most=100)
    order = {"running": 0, "stalled": 1}
    runs = sorted(runs, key=lambda run: (order.get(run["status"], 2), not text.needs(run), -run["last_seen_at"]))[
        :NUM_RUNS
    ]
    loss = {}
    for run in runs:
        if run["last_step"] is not None:
            query = {"name": "loss", "points": POINTS, "from": max(0, run["last_step"] - 4096)}
            loss[run["id"]] = asking.json(f"/api/v1/runs/{segment(run['id'])}/scalars", query)
    return Look(runs, asking.listed("/api/v1/incidents", {"state": "asks"}, at_most=NUM_INCIDENTS), loss)


HEADS = ("RUN", "NEEDS", "STATUS", "STEP", "LOSS", "OVER STEPS", "RECIPE", "RANKS", "SEEN")


def rows(seen: Look) -> list[tuple[object, ...]]:
    """A line of each run."""
    out: list[tuple[object, ...]] = []
    for run in seen.runs:
        series = seen.loss.get(run["id"])
        loss, trend = (text.latest(series), text.spark(series)) if series else (text.ABSENT, "")
        step, name = run["last_step"], run["name"] or run["id"]
        out.append((name, text.needs(run), run["status"], step, loss, trend, run["recipe"], run["world_size"], text.ago(run["last_seen_at"])))  # fmt: skip
    return out


def _plain(seen: Look) -> None:
    say(text.table(HEADS, rows(seen)) if seen.runs else ["no runs"])
    incidents = [text.incident_row(i) for i in seen.incidents]
    say(["", *(text.table(text.INCIDENT_HEADS, incidents) if incidents else ["no incident asks for you"])])


def drawn(seen: Look, url: str, problem: str = "") -> Any:
    """The same as rich draws it. Names are text, never markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def grid(heads: tuple[str, ...], lines: list[tuple[object, ...]], bad: list[str]) -> Table:
        out = Table(box=None, expand=False, pad_edge=False)
        for head in heads:
            out.add_column(head.lower(), header_style="dim", no_wrap=True, overflow="ellipsis")
        for line, style in zip(lines, bad, strict=True):
            out.add_row(*(Text(text.cut(text.plain(value), 40)) for value in line), style=style)
        return out

    styles = ["red" if text.needs(run) else "" if run["status"] == "running" else "dim" for run in seen.runs]
    head = Text(f"{url}   {time.strftime('%H:%M:%S')}   Ctrl-C ends", style="bold")
    if problem:
        head = Text(problem, style="bold yellow")
    severity = ["red" if i["severity"] == "critical" else "yellow" for i in seen.incidents]
    below = (
        grid(text.INCIDENT_HEADS, [text.incident_row(i) for i in seen.incidents], severity)
        if seen.incidents
        else Text("no incident asks for you", style="dim")
    )
    return Group(head, Text(), grid(HEADS, rows(seen), styles), Text(), below)


def top_main(argv: list[str]) -> int:
    """Entry point of `fp8watch top`."""
    parser = argparse.ArgumentParser(
        prog="fp8watch top", description="Show runs, and the incidents that ask for you, live."
    )
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between two looks (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="one look, as plain text")
    add_arguments(parser)
    args = parser.parse_args(argv)
    if not args.every > 0:
        return complain("top", f"--every={args.every}: must be above 0; give seconds, such as 2")

    def ask(asking: Asking) -> int:
        if args.json or args.once:
            seen = look(asking)
            if args.json:
                as_json(seen.as_json())
            else:
                _plain(seen)
            return 0
        try:
            from rich.live import Live
        except ModuleNotFoundError:
            return complain("top", MISSING)
        seen = look(asking)
        with Live(drawn(seen, asking.url), screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(args.every)
                problem = ""
                try:
                    seen = look(asking)
                except NotAnswered as e:  # a collector that restarts comes back: what was seen last stays
                    problem = str(e)
                screen.update(drawn(seen, asking.url, problem), refresh=True)

    try:
        return answered("top", args.collector, ask)
    except KeyboardInterrupt:
        return 0
