"""What is said of scalar-shift: title, cause, and what to change."""

from __future__ import annotations

import math

from fp8watch_server.detect.finding import Evidence, Finding, SiteFacts
from fp8watch_server.detect.modes.scalar_shift.known_names import ENTROPY, KL, LOGPROB, PROB_ERROR, UPDATE_RMS
from fp8watch_server.detect.phrases import number
from fp8watch_server.detect.remedies import Fix, Place

MISMATCH = (KL, LOGPROB, PROB_ERROR)


def _told(f: Finding) -> Evidence | None:
    return next((e for e in f.evidence if e.field == f.extra.get("name")), None)


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if f.extra.get("why") == "fall":
        return _fall_words(f)
    if f.extra.get("why") == "factor":
        return _factor_words(f)
    name, told = f.extra.get("name", "A logged scalar"), _told(f)
    if told is None:
        return f"{name} is not what it was", f"{name} is not what it was; by how much was not measured."
    value, usual, at = number(told.value), number(told.baseline), told.since_step
    what = f", {f.extra['what']}," if f.extra.get("what") else ""
    others = f.extra.get("num_names", 1) - 1
    also = f" So did {others} more logged scalar{'s' if others > 1 else ''}." if others > 0 else ""
    before = f" It was {usual} before." if told.baseline is not None else ""
    if f.extra.get("why") == "nonfinite":
        return (
            f"{name} is {value} since step {at}",
            f"{name}{what} is {value} at step {at}; every value before was a number.{before}{also}",
        )
    if f.extra.get("why") == "band":
        bound = f.extra.get("bound")
        under = bound is not None and isinstance(told.value, int | float) and abs(told.value) < bound
        return (
            f"{name} is {value}: {'under' if under else 'above'} {number(bound)}",
            f"{name}{what} is {value} since step {at}, where {'no less' if under else 'no more'} than {number(bound)} is healthy."
            f"{before}{also}",
        )
    if f.extra.get("why") == "growth":
        return (
            f"{name} grew from {usual} to {value}",
            f"{name}{what} grew from {usual} to {value} since step {at}.{also}",
        )
    if f.extra.get("why") == "level":
        return (
            f"{name} stands at {value} since about step {at}, {usual} before",
            f"{name}{what} stayed about {value} from step {at} to step {f.step}; the 32 values before were about {usual}, and its level never strayed "
            f"half as far.{also}",
        )
    return (
        f"{name} shifted from {usual} to {value} at step {at}",
        f"{name}{what} left its band at step {at} and stays: {usual} before, {value} since.{also}",
    )


def _factor_words(f: Finding) -> tuple[str, str]:
    told = _told(f)
    change = next((e for e in f.evidence if e.field == "gradient_change"), None)
    if told is None or change is None:
        return (
            "Gradient norm stands at another level",
            "The gradient norm stands at another level; by how much was not measured.",
        )
    times = number(round(float(f.extra.get("factor", 1.0)), 4))
    values, at = f"{number(told.baseline)} to {number(told.value)}", told.since_step
    loss = next((e for e in f.evidence if e.field == "loss"), None)
    stands = (
        f" The loss of step {loss.since_step} is {number(loss.value)}, {number(loss.baseline)} before." if loss else ""
    )
    if f.extra.get("changed"):
        return _of_other_weights(f, times, f"The gradient norm went from {values} at step {at} and stays", at)
    if f.extra.get("behind"):
        return (
            f"Gradient norm ×{times} since step {at}, and not by the backward pass",
            f"The gradient norm went from {values} at step {at} and stays, while the gradients that enter the backward GEMMs moved by "
            f"{number(change.value)} octaves only: they are multiplied behind them, as when they are accumulated twice, summed in place "
            f"of averaged over ranks, not cleared, or not unscaled.{stands}",
        )
    if f.extra.get("with_loss") and loss is not None:
        return (
            f"Gradient norm ×{times} since step {at}, with the loss",
            f"The gradient norm went from {values} at step {at} and stays; the median loss went from {number(loss.baseline)} to "
            f"{number(loss.value)} in the same step, and the gradients that enter the backward GEMMs moved by {number(change.value)} octaves. "
            f"The data changed, or the loss is computed by another rule.",
        )
    return (
        f"Gradient norm ×{times} since step {at}, in the whole backward pass",
        f"The gradient norm went from {values} at step {at} and stays, and the gradients that enter the backward GEMMs moved by "
        f"{number(change.value)} octaves with it: the loss is multiplied or divided by another number, or the data changed.{stands}",
    )


def _of_other_weights(f: Finding, times: str, went: str, at: int | None) -> tuple[str, str]:
    """Where the norm is of more weights, or of fewer, than it was."""
    num, of = f.extra["changed"]
    if f.extra.get("factor", 1.0) > 1:
        return (
            f"Gradient norm ×{times} since step {at}, with first gradients of {num} weights",
            f"{went}; {num} of {of} weights had their first gradient then, as where parameters are unfrozen: the norm is of more of them.",
        )
    return (
        f"Gradient norm ×{times} since step {at}, without gradients of {num} weights",
        f"{went}; {num} of {of} weights have had no gradient since, as where parameters are frozen: the norm is of fewer of them.",
    )


def _fall_words(f: Finding) -> tuple[str, str]:
    norm = next((e for e in f.evidence if e.field == "grad_norm"), None)
    fall = next((e for e in f.evidence if e.field == "gradient_fall"), None)
    if norm is not None and isinstance(norm.value, int | float) and isinstance(norm.baseline, int | float):
        if norm.value > 0:
            orders = f", {math.log10(norm.baseline / norm.value):.0f} orders of magnitude"
        else:
            orders = ""
        what = f"Gradient norm fell from {number(norm.baseline)} to {number(norm.value)}"
        cause = f"The gradient norm fell from {number(norm.baseline)} to {number(norm.value)}{orders}, at step {norm.since_step}."
    elif fall is not None:
        what = (
            "Gradients are all zero" if fall.value == "all zero" else f"Gradients fell by {number(fall.value)} octaves"
        )
        cause = f"{what}, in nine of ten layers at least, at step {fall.since_step}."
    else:
        return "Gradients fell", "The gradients fell; by how much was not measured."
    loss = next((e for e in f.evidence if e.field == "loss"), None)
    stands = (
        f" The loss of step {loss.since_step} is {number(loss.value)}, {number(loss.baseline)} before." if loss else ""
    )
    return what, f"{cause}{stands} The weights hardly move any more, except by weight decay."


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    kind = p.extra.get("kind")
    if kind == "factor" and p.extra.get("changed"):
        return [
            Fix(
                "code",
                "If parameters are meant to be frozen or unfrozen there: nothing. A limit for clipping the norm is of another norm since.",
            )
        ]
    if kind == "factor":
        return [
            Fix("code", "Look at what multiplies gradients behind backward: accumulation that adds to a buffer twice, a sum over ranks, unscale_, zero_grad."),
            Fix("code", "Compare p.grad of one weight with float64 autograd on the same micro-batch, with one rank and without accumulation."),
            Fix("code", "Look at what divides the loss: tokens, micro-batches, ranks."),
        ] if p.extra.get("behind") else [
            Fix("code", "Look at what divides the loss: tokens, micro-batches, ranks, a reduction that is sum where it was mean."),
            Fix("data", "Compare the batches of before and after that step."),
        ]  # fmt: skip
    if kind == "grad_norm":
        return [
            Fix(
                "code", "Look at what scales the loss: the loss scale, the division by tokens or by accumulation steps."
            ),
            Fix(
                "code", "Look for a detach or a no_grad between loss and model, and for a mask that hides every token."
            ),
            Fix("code", "Look at gradient clipping: a norm of Inf or a limit near 0 scales all gradients away."),
        ]
    if kind in MISMATCH:
        return [
            Fix(
                "code",
                "Compare log-probabilities of one fixed batch: trainer and rollout engine, each in BF16 and in FP8.",
            ),
            Fix("flag", "Until they agree: rollout in BF16, or truncated importance sampling over the mismatch."),
            Fix(
                "code",
                "Check that the weights that were sent to the rollout engine are those of this step, with their scales.",
            ),
        ]
    if kind == UPDATE_RMS:
        return [
            Fix(
                "code",
                "Clip the update (StableAdamW divides the learning rate by max(1, RMS)), or lower beta2 to 0.95.",
            ),
            Fix("code", "Lower the learning rate by 10 to 20 %."),
        ]
    if kind == ENTROPY:
        return [
            Fix("code", "Look at the reward of the last steps for one answer that always wins."),
            Fix("code", "Raise the entropy bonus or the KL penalty, or lower the learning rate of the policy."),
        ]
    return [
        Fix("code", f"Look at what computes {p.extra.get('name', 'it')}, and at what else changed in that step."),
        Fix("code", "If it was meant to change: nothing. Silence scalar-shift for this run where it often does."),
    ]
