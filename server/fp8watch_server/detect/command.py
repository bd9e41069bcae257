"""`fp8watch rules check FILE` and `fp8watch rules list`: what a rules file says, before a collector reads it.

Thread:     main
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from fp8watch_server.detect.rules import RulesError, load_rules
from fp8watch_server.detect.thresholds import TABLE

DESCRIPTION = "What a rules file says, before a collector reads it."


def main(argv: list[str], false_alarms: Callable[[str | None, str | None], int] | None = None) -> int:
    """Exit status 0: the file can be used. 1: it cannot, with every reason. 2: usage.

    Args:
        false_alarms: prints what people said was none, of a database and of one mode or all; None: that is not offered.
    """
    parser = argparse.ArgumentParser(prog="fp8watch rules", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check a rules file")
    check.add_argument("file", type=Path)
    check.add_argument("--run", help="show the thresholds that this run would get")
    commands.add_parser("list", help="every threshold: default, unit, range, where it comes from")
    if false_alarms is not None:
        said = commands.add_parser(
            "false-alarms", help="incidents that people marked as false alarms, with what was measured"
        )
        said.add_argument("--database-url", default=None, help="database of the collector [FP8WATCH_DATABASE_URL]")
        said.add_argument("--mode", default=None, help="only of this failure mode")
    args = parser.parse_args(argv)
    if args.command == "false-alarms" and false_alarms is not None:
        return false_alarms(args.database_url, args.mode)
    if args.command == "list":
        for t in TABLE:
            print(f"{t.name:<30} {t.default:>8g} {t.unit:<13} {t.low:g} … {t.high:g}   {t.source}")
        return 0
    return _check(args.file, args.run)


def _check(path: Path, run: str | None) -> int:
    try:
        rules = load_rules(path)
    except RulesError as e:
        for problem in e.problems:
            print(f"{path}: {problem}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"{path}: cannot be read ({e.strerror}); give the path of a rules file", file=sys.stderr)
        return 1
    for section in rules.sections:
        off = f", {len(section.disable)} modes off" if section.disable else ""
        print(f"{section.pattern}: {len(section.values)} thresholds{off}")
    if run is not None:
        chosen = rules.thresholds_for(run)
        for name, value in chosen.changed().items():
            print(f"  {name} = {value:g}")
        for slug in sorted(chosen.disabled):
            print(f"  {slug}: off")
    print(f"{path}: ok")
    return 0
