"""What collectives in fewer bits would do: gradients summed over ranks, and what experts are sent and send back."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fnmatch import fnmatchcase

from fp8watch.diagnose.collectives import REDUCE_FORMATS, collectives_what_if
from fp8watch.diagnose.subject import SUBJECT_HELP, load_subject
from fp8watch.diagnose.subject_arguments import add_answers, add_traceback, answer

HELP = "what collectives in BF16, FP16 or FP8 would do to gradients, and to what experts are sent"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "subject", metavar="MODULE:FUNCTION", help=f"{SUBJECT_HELP}. Here it must be one: a batch a rank"
    )
    parser.add_argument("--ranks", type=int, default=8, help="over which a gradient is summed (default: %(default)s)")
    parser.add_argument(
        "--format", action="append", choices=list(REDUCE_FORMATS), metavar="NAME",
        help=f"of the gradients; may be given again; one of {', '.join(REDUCE_FORMATS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--sent", metavar="PATTERN", action="append",
        help="shell pattern of modules that tokens are sent to; may be given again (default: experts.N)",
    )  # fmt: skip
    add_traceback(parser)
    add_answers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables."""
    subject = load_subject(args.subject)
    if not isinstance(subject.batch, Iterator):
        raise ValueError(f"{args.subject!r} gave one batch: return an iterator, each rank has a batch of its own")
    sent = (lambda name: any(fnmatchcase(name, p) for p in args.sent)) if args.sent else None
    found = collectives_what_if(
        subject.model, subject.batches(), subject.loss_fn, ranks=args.ranks, formats=args.format, sent=sent
    )
    answer(args, str(found), found.as_json(), found.as_svg())
    return 0
