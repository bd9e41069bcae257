"""`fp8watch calibrate`: a recipe file from some steps in high precision."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8watch.diagnose.calibrate import calibrate
from fp8watch.diagnose.subject import load_subject
from fp8watch.diagnose.subject_arguments import add_subject, check_files, filter_of


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="fp8watch calibrate",
        description="Watch some steps of a copy in high precision, and write the recipe that follows, for "
        "fp8watch.attach(model, recipe='FILE').",
    )
    add_subject(made)
    made.add_argument("--steps", type=int, default=20, help="at most (default: %(default)s)")
    made.add_argument("-o", "--output", type=Path, metavar="FILE", help="a .toml file (default: standard output)")
    made.add_argument("--svg", metavar="FILE", type=Path, help="write a picture as well")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run; exit status 2 where the arguments cannot work."""
    args = parser().parse_args(None if argv is None else list(argv))
    try:
        if args.output is not None and args.output.suffix != ".toml":
            raise ValueError(f"-o {args.output}: must end in .toml, by which attach(recipe=...) knows a recipe file")
        check_files(args)
        subject = load_subject(args.subject)
        found = calibrate(
            subject.model, subject.batches(), subject.loss_fn, args.steps, optimizer=subject.optimizer,
            filter_fn=filter_of(args), backend=args.backend,
        )  # fmt: skip
        if args.svg is not None:
            args.svg.write_text(found.as_svg(), encoding="utf-8")
        if args.output is None:
            sys.stdout.write(found.toml())
        else:
            args.output.write_text(found.toml(), encoding="utf-8")
            sys.stdout.write(
                f"{found}\nwritten to {args.output}: fp8watch.attach(model, recipe={str(args.output)!r})\n"
            )
    except BrokenPipeError:
        raise  # the reader has what it wanted, which fp8watch.cli knows
    except (TypeError, ValueError, OSError) as e:
        if args.traceback:
            raise
        sys.stderr.write(f"fp8watch calibrate: {e}\n")
        return 2
    return 0
