"""What optimizer moments in fewer bits would do: a training of some steps with moments as they are, and one for each format."""

from __future__ import annotations

import argparse

from fp8watch.diagnose.moments import MOMENT_FORMATS, moments_what_if
from fp8watch.diagnose.subject import SUBJECT_HELP, load_subject
from fp8watch.diagnose.subject_arguments import add_answers, add_traceback, answer

HELP = "what optimizer moments in BF16 or FP16 would do to updates and weights"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("subject", metavar="MODULE:FUNCTION", help=f"{SUBJECT_HELP}. Here the optimizer is needed")
    parser.add_argument("--steps", type=int, default=20, help="at most (default: %(default)s)")
    parser.add_argument(
        "--format", action="append", choices=list(MOMENT_FORMATS), metavar="NAME",
        help=f"may be given again; one of {', '.join(MOMENT_FORMATS)} (default: all)",
    )  # fmt: skip
    add_traceback(parser)
    add_answers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    subject = load_subject(args.subject)
    if subject.optimizer is None:
        raise ValueError(f"{args.subject!r} gave no optimizer: return (model, batch, loss_fn, optimizer)")
    found = moments_what_if(
        subject.model, subject.batches(), subject.loss_fn, optimizer=subject.optimizer, steps=args.steps,
        formats=args.format,
    )  # fmt: skip
    answer(args, str(found), found.as_json(), found.as_svg())
    return 0
