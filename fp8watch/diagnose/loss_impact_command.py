"""What FP8 costs in each layer of a model, on one batch, in nats of the loss."""

from __future__ import annotations

import argparse

from fp8watch.diagnose.impact_picture import impact_picture
from fp8watch.diagnose.loss_impact import loss_impact
from fp8watch.diagnose.subject import load_subject
from fp8watch.diagnose.subject_arguments import add_answers, add_subject, answer, filter_of
from fp8watch.recipe import RECIPES

HELP = "what FP8 costs in each layer, in nats of the loss"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_subject(parser)
    parser.add_argument(
        "--recipe", help=f"one of {', '.join(RECIPES)}, or a recipe file (default: the model's own, else blockwise)"
    )
    parser.add_argument("--measure", action="store_true", help="also run each layer in FP8 alone: a pass for each")
    parser.add_argument("--backward", action="store_true", help="also dgrad and wgrad, projected on the update")
    add_answers(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    subject = load_subject(args.subject)
    found = loss_impact(
        subject.model, subject.one(), subject.loss_fn, recipe=args.recipe, filter_fn=filter_of(args), backend=args.backend,
        measure=args.measure, backward=args.backward, optimizer=subject.optimizer,
    )  # fmt: skip
    answer(args, str(found), found.as_json(), impact_picture(found))
    return 0
