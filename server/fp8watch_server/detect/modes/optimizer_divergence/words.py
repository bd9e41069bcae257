"""What is said of optimizer-divergence: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    jump, grown, moving = f.extra.get("lr_jump"), f.extra.get("num_sites"), f.extra.get("num_moving")
    if jump and f.extra.get("by_loss"):
        usual, loss = number(baseline(f, "loss")), number(evidence(f, "loss"))
        at = next((e.since_step for e in f.evidence if e.field == "loss"), f.step)
        well = {"yes": " The quantisers are healthy.", "no": " The quantisers are not healthy either."}
        health = well.get(str(evidence(f, "quantiser_healthy")), " The quantisers were not measured.")
        return (
            f"Optimizer diverging: loss {usual} → {loss} after LR {number(jump[0])} → {number(jump[1])}",
            f"The LR went from {number(jump[0])} to {number(jump[1])} at step {f.onset}, and the loss jumped from "
            f"{usual} to {loss} at step {at}: the updates are too large.{health}",
        )
    because = f", LR {number(jump[0])} → {number(jump[1])}" if jump else ""
    why = f" The LR went from {number(jump[0])} to {number(jump[1])}." if jump else ""
    holds = " The scale invariant holds." if f.extra.get("invariant_held") else ""
    return (
        f"Optimizer diverging: {grown} of {moving} weights grow at once{because}",
        f"The largest weights of {grown} of {moving} layers grow together, "
        f"{number(f.extra.get('growth'))} octaves a step: the updates are too large.{why}{holds}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.lr is not None and p.usual_lr is not None:
        first = Fix(
            "code", f"Set the LR back from {p.lr:g} to {p.usual_lr:g}, and reload the checkpoint before the jump."
        )
    else:
        first = Fix("code", "Lower the LR by 10 to 20 % or more, and go back to the checkpoint before the growth.")
    return [
        first,
        Fix("code", "Look at the LR schedule: a warm-up that restarted, a wrong step count, a scaled batch size."),
        Fix("code", "If the LR is as meant: gradient clipping at 1.0, smaller β2, more warm-up."),
    ]
