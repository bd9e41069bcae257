"""`fp8watch load`: load-test a collector with a synthetic fleet.

Thread:     main
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from fp8watch_agent.settings import AgentSettings, read_token_file
from fp8watch_server.load.drive import LoadReport, Refused, reach, run_load
from fp8watch_server.load.fleet import RANKS_PER_HOST, Fleet, FleetPlan
from fp8watch_server.load.stream import LoadPlan

EXIT_USAGE = 2
DEFAULT_URL = "http://127.0.0.1:8420"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="fp8watch load",
        description="Send the statistics of a made-up training run to a collector. The same seed sends the same bytes.",
        epilog="A token comes from FP8WATCH_TOKEN or FP8WATCH_TOKEN_FILE.",
    )
    made.add_argument("--url", default=os.environ.get("FP8WATCH_COLLECTOR") or DEFAULT_URL, help="the collector")
    made.add_argument("--ranks", type=_positive, default=8, help="ranks of the run (default: 8)")
    made.add_argument("--sites", type=_positive, default=160, help="quantised operands of the model (default: 160)")
    made.add_argument("--steps", type=_positive, default=60, help="optimizer steps (default: 60)")
    made.add_argument("--steps-per-batch", type=_positive, default=1, help="steps in one body (default: 1)")
    made.add_argument("--every", type=_positive, default=1, help="full statistics each n-th step (default: 1)")
    made.add_argument("--rate", type=float, default=0.0, help="steps per second of a rank; 0: no pause (default: 0)")
    made.add_argument("--seed", type=int, default=0, help="all numbers follow from it (default: 0)")
    made.add_argument("--run", default="", help="id of the run (default: load-SEED-TIME, a new one)")
    made.add_argument("--senders", type=_positive, default=None, help="threads (default: one a rank, at most 32)")
    made.add_argument("--prepare", action="store_true", help="make all bodies before the first is sent")
    made.add_argument(
        "--fleet",
        type=float,
        default=None,
        metavar="SECONDS",
        help="very many ranks: each sends a batch every so many seconds (0: no pause), hosts of 8 in one request, "
        "bodies of 16 recorded ranks under headers of their own",
    )
    made.add_argument(
        "--merge-steps",
        type=_positive,
        default=1,
        help="of a fleet: steps that share a record, as agents of many ranks do",
    )
    made.add_argument(
        "--break", dest="broken", type=_place, default=None, metavar="RANK:BATCH", help="of a fleet: put an Inf there"
    )
    return made


def _place(text: str) -> tuple[int, int]:
    rank, _, number = text.partition(":")
    if not (rank.isascii() and rank.isdecimal() and number.isascii() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a rank and the number of its batch from 0, as 17:3")
    return int(rank), int(number)


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 or more")
    return value


def main(argv: list[str] | None = None) -> int:
    """Send the load and print a report."""
    args = parser().parse_args(argv)
    plan = LoadPlan(
        num_ranks=args.ranks,
        num_sites=args.sites,
        num_steps=args.steps,
        steps_per_batch=args.steps_per_batch,
        every=args.every,
        seed=args.seed,
        run=args.run or f"load-{args.seed}-{int(time.time())}",
        step_s=1.0 / args.rate if args.rate > 0 else 1.0,
        merge_steps=args.merge_steps,
    )
    if args.fleet is None and (args.broken is not None or args.merge_steps > 1):
        print("fp8watch load: --break and --merge-steps are of a fleet; give --fleet SECONDS", file=sys.stderr)
        return EXIT_USAGE
    try:
        file = os.environ.get("FP8WATCH_TOKEN_FILE")
        token = read_token_file(Path(file)) if file else os.environ.get("FP8WATCH_TOKEN") or None
        url = AgentSettings.from_environ({}, collector=args.url).collector or args.url
        reach(url, token)
        print(f"run {plan.run}: {plan.num_ranks} ranks × {plan.num_sites} sites × {plan.num_steps} steps to {url}")
        if args.fleet is not None:
            fleet = FleetPlan(plan, args.fleet, RANKS_PER_HOST, args.broken)
            report: LoadReport = Fleet(fleet, url, token=token, num_senders=args.senders or 8).run()
        else:
            report = run_load(plan, url, token=token, rate=args.rate, num_senders=args.senders, prepared=args.prepare)
    except (Refused, ValueError) as e:
        print(f"fp8watch load: {e}; check --url and FP8WATCH_TOKEN", file=sys.stderr)
        return EXIT_USAGE
    print("\n".join(report.lines()))
    return 1 if report.num_refused else 0
