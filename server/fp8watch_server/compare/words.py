"""The one sentence of a comparison, and what it does not speak of.

Shapes:     Parting, names of sites -> text
Thread:     any; pure functions

Every number in a sentence was measured, and stands with its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8watch_server.compare.first_difference import Parting

NAMED = 3


@dataclass
class Compared:
    """What could be compared, and what could not."""

    steps: Sequence[int] = ()
    num_sites: int = 0
    num_measured_sites: int = 0
    """Of these, measured in the same step on both sides at least once."""
    num_with_loss: int = 0
    """Of the steps, those in which both sides have a loss."""
    only_a: Sequence[str] = ()
    only_b: Sequence[str] = ()
    num_only_steps: tuple[int, int] = (0, 0)
    num_named_data: int = 0
    """Steps in which both sides named their batches."""
    data_of_first_rank: bool = False
    """Names of batches were compared of rank 0 only, and there are others."""
    share: float = 1.0
    """Of the common steps, the share in which a common site was measured on both sides, in the mean over the sites."""
    cut_at: int | None = None
    """Sites were compared up to this step."""
    largest_gap: float | None = None
    """Largest difference of the losses over the loss."""


def site_name(module: str, operand: str) -> str:
    """A site as a sentence names it: both directions of an operand hold the same values."""
    return f"{module} {operand}"


def sentence(found: Parting, of: Compared, names: Sequence[str]) -> str:
    """Where two sides part, or that they do not, and over what that was looked at."""
    if not of.steps:
        return "They have no step in common: nothing can be compared."
    over = f"{len(of.steps)} common step{'s' if len(of.steps) != 1 else ''} ({of.steps[0]} to {of.steps[-1]})"
    looked = _looked(of)
    if found.step is None:
        return _together(found, of, names, over, looked)
    if _seen_later(found):
        parted = _left_the_noise(found, names)
    else:
        parted = f"{_before(found)}{_place(found, names)}"
    return " ".join(part for part in (_start(found), parted, _seen(found, of)) if part)


def _seen_later(found: Parting) -> bool:
    """They were apart for good only after the step back to which a site was out, and no bit says which came first."""
    bits = found.identical and found.differs_at == found.step
    return found.seen_at != found.step and bool(found.sites) and found.by != "nonfinite" and not bits


def _left_the_noise(found: Parting, names: Sequence[str]) -> str:
    first = _named(found.sites, names)
    return f"They leave the noise at step {found.seen_at}; what was outside of its band longest until then is {first}, from step {found.step} on."


def _looked(of: Compared) -> str:
    parts = ["loss"] if of.num_with_loss else []
    if of.num_measured_sites:
        parts.append(f"amax of {of.num_measured_sites} common site{'s' if of.num_measured_sites != 1 else ''}")
    return " and ".join(parts)


def _start(found: Parting) -> str:
    if not found.weights_differ:
        return ""
    return f"They do not start from the same weights ({found.weights_differ} of {found.num_weights} differ at their first step)."


def _together(found: Parting, of: Compared, names: Sequence[str], over: str, looked: str) -> str:
    if not looked:
        return f"Neither loss nor a common site was measured on both sides in {over}: nothing can be said."
    if found.identical == len(of.steps):
        return f"They are identical to the last bit in {looked}, in all of {over}."
    gap = f", losses at most {of.largest_gap:.2%} apart" if of.largest_gap is not None else ""
    if found.differs_at is not None:
        first = f", first in {_named(found.differs_in, names)}" if found.differs_in else ", first in the loss"
        text = f"They are identical to the last bit before step {found.differs_at}, differ from there on{first}, and do not part: {looked} stay within the noise in {over}{gap}."
        return text
    own = "; amax is not held against the other's, because the weights are others" if found.weights_differ else ""
    shown = "loss" if found.weights_differ else looked
    stay = "stays" if shown == "loss" else "stay"
    if found.weights_differ and not of.num_with_loss:
        return f"{_start(found)} No loss was logged on both sides: whether they part was not looked at."
    return " ".join(
        t for t in (_start(found), f"They do not part: {shown} {stay} within the noise in {over}{gap}{own}.") if t
    )


def _before(found: Parting) -> str:
    if found.identical and found.differs_at == found.step:
        return f"They are identical to the last bit before step {found.step}, and part there"
    return f"They part at step {found.step}"


def _place(found: Parting, names: Sequence[str]) -> str:
    if not found.sites and found.weights_differ:
        return " in the loss."
    if not found.sites:
        return " in the loss; no site that was compared left its band before." if found.by in ("loss", "drift") else "."
    gap = ""
    if found.step is not None and found.within_at is not None and found.step - found.within_at > 1:
        gap = f" (measured on both sides at step {found.within_at} before, and not in between)"
    return f", first in {_named(found.sites, names)}{gap}."


def _seen(found: Parting, of: Compared) -> str:
    text = ""
    if found.by == "nonfinite":
        text = f"At step {found.seen_at} one side is not finite, and the other is."
    elif found.seen_at != found.step and not _seen_later(found):
        text = f"They leave the noise at step {found.seen_at}."
    if found.loss_step is None:
        return f"{text} The losses do not part.".strip() if of.num_with_loss else text
    if found.sites:
        text += f" The losses part {'slowly, ' if found.by == 'drift' else ''}from step {found.loss_step} on."
    return text.strip()


def _named(sites: Sequence[int], names: Sequence[str]) -> str:
    """The first of them; how many more there are at the same step."""
    told = list(dict.fromkeys(names[i] for i in sites))
    more = f" and {len(told) - 1} more after it in the same step" if len(told) > 1 else ""
    return told[0] + more


def not_looked_at(of: Compared) -> list[str]:
    """What the sentence does not speak of, a line each."""
    out = []
    if of.steps and not of.num_named_data:
        out.append(
            "data: not both sides named their batches, so whether they saw the same data was not looked at: watch.log(batch_id=…)"
        )
    elif of.num_named_data < len(of.steps):
        out.append(f"data: both sides named their batches in {of.num_named_data} of {len(of.steps)} common steps")
    if of.num_named_data and of.data_of_first_rank:
        out.append("data of other ranks than 0: choose a rank to compare its batches")
    if of.steps and of.num_with_loss < len(of.steps):
        out.append(f"loss: logged on both sides in {of.num_with_loss} of {len(of.steps)} common steps")
    for side, names in (("the first", of.only_a), ("the second", of.only_b)):
        if names:
            shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            out.append(f"sites that only {side} has: {shown}")
    for side, n in zip(("the first", "the second"), of.num_only_steps, strict=True):
        if n:
            out.append(f"steps that only {side} has: {n}")
    if of.num_measured_sites < of.num_sites:
        out.append(
            f"sites that were never measured in the same step on both sides: {of.num_sites - of.num_measured_sites} of {of.num_sites}"
        )
    if of.num_measured_sites and of.share < 0.9:
        out.append(f"amax: a common site was measured on both sides in {of.share:.0%} of the common steps")
    if of.cut_at is not None:
        out.append(f"amax after step {of.cut_at}: choose later steps (from, to) to compare them")
    return out
