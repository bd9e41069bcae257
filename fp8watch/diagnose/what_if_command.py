"""What other formats would do to each operand of a model and to its loss, on one batch; or, of a run that a collector holds,
what its stored sketches say of underflow and SQNR in other formats."""

from __future__ import annotations

import argparse
import itertools

from fp8watch.diagnose.candidates import CANDIDATES, DEFAULTS
from fp8watch.diagnose.impact_tables import what_if_table
from fp8watch.diagnose.stored_what_if import stored_what_if
from fp8watch.diagnose.subject import load_subject
from fp8watch.diagnose.subject_arguments import add_answers, add_subject, answer, filter_of
from fp8watch.diagnose.what_if import what_if

OF_A_MODEL = ("backend", "format", "history", "summary", "svg")
OF_A_RUN = ("collector", "steps")
HELP = "what other formats would do to each operand, and to the loss"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_subject(parser, optional=True)
    parser.add_argument(
        "--format", action="append", choices=list(CANDIDATES), metavar="NAME",
        help=f"may be given again; one of {', '.join(CANDIDATES)} (default: {', '.join(DEFAULTS)})",
    )  # fmt: skip
    parser.add_argument(
        "--history", type=int, default=0, metavar="N",
        help="batches of an iterator from which delayed scales follow before the one that counts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="formats only, not layer by layer")
    parser.add_argument("--run", help="id of a run: judge its stored sketches instead of a model")
    parser.add_argument(
        "--collector",
        help="with --run: its URL; else FP8WATCH_COLLECTOR. FP8WATCH_TOKEN is a token to read with, FP8WATCH_TOKEN_FILE a file of it",
    )
    parser.add_argument("--steps", metavar="FROM:TO", type=_steps, help="with --run: first and last step that count")
    add_answers(parser)


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    try:
        return int(first) if first else None, int(last if colon else first) if last or not colon else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be FROM:TO, such as 1000:2000") from None


def _check_meant(args: argparse.Namespace) -> None:
    """Options of the other of the two questions are refused."""
    others, of = (OF_A_MODEL, "with") if args.run is not None else (OF_A_RUN, "without")
    given = [f"--{name}" for name in others if getattr(args, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: {'has' if len(given) == 1 else 'have'} no meaning {of} --run; leave out what is not meant"
        )


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    if (args.subject is None) == (args.run is None):
        raise ValueError(
            "give MODULE:FUNCTION to try formats on a model, or --run to judge the stored sketches of a run"
        )
    _check_meant(args)
    if args.run is not None:
        from_step, to_step = args.steps or (None, None)
        stored = stored_what_if(args.run, args.collector, only=args.only, from_step=from_step, to_step=to_step)
        answer(args, str(stored), stored.as_json())
        return 0
    if args.history < 0:
        raise ValueError(f"--history {args.history}: must be 0 or more")
    subject = load_subject(args.subject)
    batches = list(itertools.islice(subject.batches(), args.history + 1))
    if len(batches) <= args.history:
        raise ValueError(
            f"--history {args.history}: the iterator gave {len(batches)} batches, one more than that is needed"
        )
    found = what_if(
        subject.model, batches[-1], subject.loss_fn, formats=args.format, history=batches[:-1], filter_fn=filter_of(args),
        backend=args.backend,
    )  # fmt: skip
    answer(args, what_if_table(found, layers=not args.summary), found.as_json(), found.as_svg())
    return 0
