"""Options that the commands of diagnosis share: what to run on, and where the answer goes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from fp8watch.diagnose.subject import SUBJECT_HELP
from fp8watch.selection.module_filter import FilterFn


def add_subject(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The function that builds model and batch, and which modules count."""
    parser.add_argument("subject", metavar="MODULE:FUNCTION", nargs="?" if optional else None, help=SUBJECT_HELP)
    parser.add_argument(
        "--only", metavar="PATTERN", action="append", help="shell pattern of module names; may be given again"
    )
    parser.add_argument("--backend", help="which kernels quantise (default: the fastest that can)")
    add_traceback(parser)


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """For errors of the subject itself."""
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def add_answers(parser: argparse.ArgumentParser) -> None:
    """JSON instead of text, and a picture."""
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write a picture as well")


def check_files(args: argparse.Namespace) -> None:
    """Before anything is computed: what is asked for can be written.

    Raises:
        ValueError: with value, rule and remedy.
    """
    for option, name in (("--svg", "svg"), ("-o", "output")):
        file: Path | None = getattr(args, name, None)
        if file is None:
            continue
        if file.is_dir():
            raise ValueError(f"{option} {file}: is a folder; give a file")
        if not file.parent.is_dir():
            raise ValueError(f"{option} {file}: there is no folder {file.parent}; make it, or give another file")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"{option} {file}: may not be written; give another file")


def answer(args: argparse.Namespace, text: str, data: dict[str, Any], picture: str | None = None) -> None:
    """Print, and write the picture."""
    sys.stdout.write((json.dumps(data, indent=1, allow_nan=False) if args.json else text) + "\n")
    if picture is not None and getattr(args, "svg", None) is not None:
        args.svg.write_text(picture, encoding="utf-8")


def filter_of(args: argparse.Namespace) -> FilterFn | None:
    """`--only` as a filter_fn; what it does not match stays out, what it matches is as the precision map says."""
    patterns = args.only
    if not patterns:
        return None
    from fnmatch import fnmatchcase

    return lambda _module, name: None if any(fnmatchcase(name, p) for p in patterns) else False
