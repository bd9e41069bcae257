"""`fp8watch runs | incidents | show | compare | report`: a collector's answers in a terminal, and as JSON.

Thread:     main

Exit status: 0 answered, 1 there is no such thing, or the collector does not answer, 2 a question that makes no sense.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from fp8watch_agent.terminal import text
from fp8watch_agent.terminal.collector_client import Asking, NotAnswered, Unknown, add_arguments, segment


def answered(command: str, collector: str | None, ask: Callable[[Asking], int]) -> int:
    """Run a question; errors go to stderr in one line."""
    try:
        asking = Asking(collector)
    except ValueError as e:
        return complain(command, e)
    try:
        return ask(asking)
    except NotAnswered as e:
        return complain(command, e, 1)
    finally:
        asking.close()


def as_json(value: Any) -> None:
    """Print it as JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def complain(command: str, problem: object, status: int = 2) -> int:
    """One line to stderr; returns the exit status."""
    print(f"fp8watch {command}: {problem}", file=sys.stderr)
    return status


def say(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        print(line)


def runs_main(argv: list[str]) -> int:
    """Entry point of `fp8watch runs`."""
    parser = argparse.ArgumentParser(
        prog="fp8watch runs", description="List the runs of a collector, the newest first."
    )
    parser.add_argument("-n", "--number", type=int, default=20, help="at most so many (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args(argv)

    def ask(asking: Asking) -> int:
        found = asking.listed("/api/v1/runs", at_most=max(1, args.number))
        if args.json:
            as_json(found)
        else:
            say(text.table(text.RUN_HEADS, [text.run_row(run) for run in found]) if found else ["no runs"])
        return 0

    return answered("runs", args.collector, ask)


def incidents_main(argv: list[str]) -> int:
    """Entry point of `fp8watch incidents`."""
    parser = argparse.ArgumentParser(prog="fp8watch incidents", description="List incidents, the newest first.")
    parser.add_argument("--run", help="only of this run (default: all)")
    parser.add_argument("--status", choices=("open", "acknowledged", "resolved"), help="only those")
    states = ("asks", "open", "acknowledged", "unseen", "seen", "fixed", "false-alarm")
    parser.add_argument("--state", choices=states, help="only those; asks: open, or over and not seen yet")
    parser.add_argument("--severity", choices=("info", "warning", "critical"), help="only those")
    parser.add_argument("--mode", help="only of this failure mode")
    parser.add_argument("-n", "--number", type=int, default=20, help="at most so many (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args(argv)

    def ask(asking: Asking) -> int:
        path = f"/api/v1/runs/{segment(args.run)}/incidents" if args.run else "/api/v1/incidents"
        query = {"status": args.status, "state": args.state, "severity": args.severity, "mode": args.mode}
        found = asking.listed(path, query, at_most=max(1, args.number))
        if args.json:
            as_json(found)
        else:
            rows = [text.incident_row(incident) for incident in found]
            say(text.table(text.INCIDENT_HEADS, rows) if found else ["no incidents"])
        return 0

    return answered("incidents", args.collector, ask)


def show_main(argv: list[str]) -> int:
    """Entry point of `fp8watch show`."""
    parser = argparse.ArgumentParser(prog="fp8watch show", description="Show one run, or one incident.")
    parser.add_argument("ID", help="of a run or an incident")
    add_arguments(parser)
    args = parser.parse_args(argv)

    def ask(asking: Asking) -> int:
        try:
            incident = asking.json(f"/api/v1/incidents/{segment(args.ID)}")
        except Unknown:
            run = asking.json(f"/api/v1/runs/{segment(args.ID)}")
            incidents = asking.listed(f"/api/v1/runs/{segment(args.ID)}/incidents", at_most=20)
            if args.json:
                as_json({**run, "incidents": incidents})
            else:
                say(text.run_lines(run, incidents, f"{asking.url}/runs/{segment(run['id'])}"))
            return 0
        if args.json:
            as_json(incident)
        else:
            say(text.incident_lines(incident, f"{asking.url}/incidents/{segment(incident['id'])}"))
        return 0

    return answered("show", args.collector, ask)


def compare_main(argv: list[str]) -> int:
    """Entry point of `fp8watch compare`."""
    parser = argparse.ArgumentParser(
        prog="fp8watch compare", description="Say where two runs part, and how they differ; ranks of one run alike."
    )
    parser.add_argument("A", help="a run's id")
    parser.add_argument("B", help="another's, or the same with other ranks")
    parser.add_argument("--rank-a", type=int, help="only this rank of the first (default: all)")
    parser.add_argument("--rank-b", type=int, help="only this rank of the second (default: all)")
    parser.add_argument("--from", dest="from_step", type=int, metavar="STEP", help="only from this step on")
    parser.add_argument("--to", dest="to_step", type=int, metavar="STEP", help="only up to this step")
    add_arguments(parser)
    args = parser.parse_args(argv)

    def ask(asking: Asking) -> int:
        query = {"a": args.A, "b": args.B, "rank_a": args.rank_a, "rank_b": args.rank_b}
        found = asking.json("/api/v1/compare", {**query, "from": args.from_step, "to": args.to_step})
        if args.json:
            as_json(found)
            return 0
        print(text.plain(found["sentence"]))
        if found["facts"]:
            print()
            say(text.table(("WHAT DIFFERS", "A", "B"), [(f["fact"], f["a"], f["b"]) for f in found["facts"]]))
        if found["not_looked_at"]:
            print("\nnot looked at:")
            say(f"  {text.plain(line)}" for line in found["not_looked_at"])
        return 0

    return answered("compare", args.collector, ask)


def report_main(argv: list[str]) -> int:
    """Entry point of `fp8watch report`."""
    parser = argparse.ArgumentParser(
        prog="fp8watch report", description="Write an incident into one HTML file that needs no network."
    )
    parser.add_argument("INCIDENT", help="its id")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to; - is standard output (default: report-INCIDENT.html)"
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="replace names of runs, modules, hosts, people, batches and logged scalars",
    )
    add_arguments(parser, json=False)
    args = parser.parse_args(argv)

    def ask(asking: Asking) -> int:
        query = {"redact": "1" if args.redact else None}
        body = asking.get(f"/incidents/{segment(args.INCIDENT)}/report.html", query, accept="text/html")
        if args.output == "-":
            sys.stdout.buffer.write(body)
            return 0
        path = Path(args.output or f"report-{args.INCIDENT[:12].replace('/', '-')}.html")
        try:
            path.write_bytes(body)
        except OSError as e:
            return complain("report", f"{path} cannot be written: {e}", 1)
        print(f"wrote {path} ({len(body) / 1024:.0f} KiB)")
        return 0

    return answered("report", args.collector, ask)
