"""What other formats would do to each operand of a model and to its loss, on one batch; or, of a run that a collector holds,
what its stored sketches say of underflow and SQNR in other formats."""

from __future__ import annotations

import argparse
import itertools

from fp8watch.diagnose.candidates import CANDIDATES, DEFAULTS
from fp8watch.diagnose.impact_tables import what_if_table
from fp8watch.diagnose.subject import load_subject
from fp8watch.diagnose.subject_arguments import add_answers, add_subject, answer, filter_of
from fp8watch.diagnose.what_if import what_if

HELP = "what other formats would do to each operand, and to the loss"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_subject(parser)
    parser.add_argument(
        "--format", action="append", choices=list(CANDIDATES), metavar="NAME",
        help=f"may be given again; one of {', '.join(CANDIDATES)} (default: {', '.join(DEFAULTS)})",
    )  # fmt: skip
    parser.add_argument(
        "--history", type=int, default=0, metavar="N",
        help="batches of an iterator from which delayed scales follow before the one that counts (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="formats only, not layer by layer")
    add_answers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    if args.history < 0:
        raise ValueError(f"--history {args.history}: must be 0 or more")
    subject = load_subject(args.subject)
    batches = list(itertools.islice(subject.batches(), args.history + 1))
    if len(batches) <= args.history:
        raise ValueError(f"--history {args.history}: the iterator gave {len(batches)} batches, one more than that is needed")
    found = what_if(
        subject.model, batches[-1], subject.loss_fn, formats=args.format, history=batches[:-1], filter_fn=filter_of(args),
        backend=args.backend,
    )  # fmt: skip
    answer(args, what_if_table(found, layers=not args.summary), found.as_json(), found.as_svg())
    return 0
