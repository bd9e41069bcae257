"""What is said of nan-in-loss: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    title = f"Loss is {'Inf' if f.extra.get('kind') == 'inf' else 'NaN'}"
    seen = f.extra.get("forward_seen")
    if not seen:
        return title, "The loss is not finite. No operand was measured in this step, so where it began is not known."
    return (
        f"{title} while every measured FP8 operand of the forward is finite",
        f"The loss is not finite while all {seen} measured inputs and weights of the step are: it "
        "was born in the loss or came with the data. Non-finite gradients of this step are its consequence.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    return [
        Fix("data", "Check labels and masks: a batch whose targets are all masked divides 0 by 0."),
        p.batch,
        Fix("code", "Check the loss itself: log of 0, a softmax over fully masked rows, a wrong ignore_index."),
    ]
