"""`fp8watch diagnose`: why a run fails and what to change, one subcommand a question.

A subcommand is a row of SUBCOMMANDS: its name, and a module with `HELP`, `arguments(parser)` and `run(args) -> exit status`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from fp8watch.diagnose import (
    bisect_command,
    collectives_command,
    loss_impact_command,
    moments_command,
    what_if_command,
)
from fp8watch.diagnose.subject_arguments import check_files

SUBCOMMANDS: dict[str, ModuleType] = {
    "loss-impact": loss_impact_command,
    "what-if": what_if_command,
    "moments": moments_command,
    "collectives": collectives_command,
    "bisect": bisect_command,
}


def parser() -> argparse.ArgumentParser:
    """The options of all subcommands."""
    made = argparse.ArgumentParser(prog="fp8watch diagnose", description="Why a run fails, and what to change.")
    subparsers = made.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, module in SUBCOMMANDS.items():
        module.arguments(subparsers.add_parser(name, help=module.HELP, description=module.__doc__))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; exit status 2 where its arguments cannot work."""
    args = parser().parse_args(None if argv is None else list(argv))
    try:
        check_files(args)
        return int(SUBCOMMANDS[args.subcommand].run(args))
    except BrokenPipeError:
        raise  # the reader has what it wanted, which fp8watch.cli knows
    except (TypeError, ValueError, OSError) as e:
        if args.traceback:
            raise
        print(f"fp8watch diagnose {args.subcommand}: {e}", file=sys.stderr)
        return 2
