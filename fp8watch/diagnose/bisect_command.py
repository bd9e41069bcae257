"""Which layers, and which of their operands, must leave FP8 for a failure to go: each trial trains in a process of its own."""

from __future__ import annotations

import argparse
import os
import sys

from fp8watch.diagnose.bisection import TrialError, TrialResult, bisect
from fp8watch.diagnose.subject_arguments import add_answers, add_traceback, answer, check_files
from fp8watch_agent.fix_command import address

HELP = "find the layers and operands that must leave FP8 for a failure to go"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a function of a fp8watch.diagnose.Trial: it trains, and "
                        "returns True where it failed, or its losses")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="PATH", help="what the function finds as trial.checkpoint")
    parser.add_argument("--recipe", help="a recipe's name, instead of the function's own")
    parser.add_argument(
        "--limit", type=float, metavar="LOSS", help="a loss above it is a failure (default: not finite)"
    )
    parser.add_argument("--suspect", action="append", metavar="NAME", help="a module to try first, such as one that an "
                        "incident names; may be given again, the most suspected first")  # fmt: skip
    parser.add_argument("--layers-only", action="store_true", help="do not name operands")
    parser.add_argument("--nproc", type=int, default=1, help="processes of a trial, under torchrun (default: 1)")
    parser.add_argument("--state", metavar="FILE", help="keeps finished trials, so that the same command goes on")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for a trial")
    parser.add_argument("--incident", metavar="INCIDENT", help="its id, with FP8WATCH_COLLECTOR, or the address of its page, "
                        "which then shows the result; a token of scope ingest: [FP8WATCH_TOKEN or FP8WATCH_TOKEN_FILE]")  # fmt: skip
    add_answers(parser)
    add_traceback(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command. Exit status: 0 where culprits were named, 1 where none was, 2 where it cannot be run."""
    try:
        check_files(args)
        if args.incident:
            address(args.incident, os.environ.get("FP8WATCH_COLLECTOR"))  # before hours of trials, not behind them
        found = bisect(
            args.target, checkpoint=args.checkpoint, recipe=args.recipe, limit=args.limit, ranking=args.suspect,
            operands=not args.layers_only, nproc=args.nproc, state=args.state, timeout_s=args.timeout, on_progress=_say,
        )  # fmt: skip
    except (ValueError, TypeError, OSError, TrialError) as e:
        return _told(args, e)
    status = 0 if found.verdict == "fp8" else 1
    gone: BrokenPipeError | None = None
    try:
        answer(args, str(found), found.as_json(), found.as_svg())
        sys.stdout.flush()
    except BrokenPipeError as e:  # it is sent all the same
        gone = e
    except OSError as e:
        status = _told(args, e)
    if args.incident:
        try:
            found.send(args.incident)
        except (ValueError, OSError) as e:
            status = _told(args, e)
    if gone is not None:
        raise gone
    return status


def _told(args: argparse.Namespace, e: Exception) -> int:
    if args.traceback:
        raise e
    sys.stderr.write(f"fp8watch diagnose bisect: {e}\n")
    return 2


def _say(trial: TrialResult, num: int) -> None:
    many = f"{len(trial.leave)} names" if len(trial.leave) > 3 else ", ".join(trial.leave) or "nothing"
    outcome = "fails" if trial.failed else "does not fail"
    sys.stderr.write(f"trial {num}: {many} in high precision: {outcome} ({trial.said}), {trial.seconds:.0f} s\n")


def main(argv: list[str] | None = None) -> int:
    """The command by itself."""
    parser = argparse.ArgumentParser(prog="fp8watch diagnose bisect", description=__doc__)
    arguments(parser)
    return run(parser.parse_args(argv))
