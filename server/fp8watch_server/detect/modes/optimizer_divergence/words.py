"""What is said of optimizer-divergence: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.families import update_words
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if update_words.is_one(f.extra.get("kind")):
        return update_words.words(f)
    if f.extra.get("kind") == "clipping-lost":
        return _of_clipping(f)
    if f.extra.get("kind") == "second-moments":
        return _of_second_moments(f)
    if f.extra.get("kind") == "shrinking":
        return _of_shrinking(f)
    if f.extra.get("kind") == "logits":
        return _of_logits(f)
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


def _of_clipping(f: Finding) -> tuple[str, str]:
    limit, largest = number(baseline(f, "grad_norm")), number(evidence(f, "grad_norm"))
    since = next((e.since_step for e in f.evidence if e.field == "clip_norm"), f.onset)
    now = evidence(f, "clip_norm")
    clips = "nothing clips them" if now in (None, "none") else f"they are clipped to {number(now)}"
    return (
        f"Gradients leave their clipping: norm {largest}, clipped to {limit} until step {since}",
        f"clip_grad_norm_ held the gradients of each step before to a norm of {limit}. Since step {since} {clips}, and their norm has "
        f"reached {largest}: updates are larger than they ever were allowed to be. FP8 is not the cause.",
    )


def _of_second_moments(f: Finding) -> tuple[str, str]:
    share, eps = number(evidence(f, "second_moments_zero")), evidence(f, "eps")
    name = evidence(f, "first_of_them")
    where = f" The first is {name}." if name else ""
    of_eps = f"eps alone, {number(eps)}" if eps else "eps alone"
    return (
        f"{share} % of the optimizer's second moments are 0 where first moments are not",
        f"Adam divides by the root of the second moment and eps: where the second moment is 0 that is {of_eps}, and an ordinary first "
        f"moment becomes a step without measure.{where} A state format that does not hold squares of small gradients does this (float16 below "
        "6e-8, 8-bit and 4-bit states), a state that was set to zero, or one that was loaded in part. FP8 GEMMs are not the cause.",
    )


def _read_by(f: Finding, what: str) -> str:
    """How many sites that is, where some of them read the same tensor."""
    sites, votes = f.extra.get("num_sites"), evidence(f, f"shrinking_{what}")
    return f", read at {sites} sites (the same tensor counts once)" if sites and votes and sites > votes else ""


def _of_shrinking(f: Finding) -> tuple[str, str]:
    what, share = str(f.extra.get("what", "weights")), number(evidence(f, "shrinks"))
    num, of = number(evidence(f, f"shrinking_{what}")), f.extra.get("num_known")
    if what == "weights":
        why = (
            "Weight decay does that where it is not multiplied by the learning rate, is set far too large, or is applied twice; gradients "
            "move weights up as well as down."
        )
    else:
        seen = "The weights of the GEMMs do not, so what" if f.extra.get("weights_seen") else "What"
        why = f"{seen} lies in front of them may do it: gains of norms that weight decay reaches, a factor, the values that enter."
    return (
        f"{num} of {of} {what} shrink together: {share} % in each step",
        f"The largest values of {num} of {of} {what} have become smaller together and step by step, by {share} % in each, since step {f.onset}"
        f"{_read_by(f, what)}. "
        f"{why}",
    )


def _of_logits(f: Finding) -> tuple[str, str]:
    before, lr = (number(v) for v in f.extra.get("lr_jump") or (None, None))
    logit, usual = number(evidence(f, "max_attention_logit")), number(baseline(f, "max_attention_logit"))
    since = next((e.since_step for e in f.evidence if e.field == "max_attention_logit"), f.step)
    at = f" of {f.extra['attention']}" if f.extra.get("attention") else ""
    return (
        f"Attention logits grow{at} after LR {before} → {lr}: {usual} → {logit}",
        f"The LR went from {before} to {lr}, beginning at step {f.onset}, and the largest attention logit{at} has grown from {usual} to {logit} "
        f"since step {since}: the updates are too large.",
    )


_SECOND = (
    ("silent-data-corruption", "moments changed while no optimizer ran, and second moments are not 0"),
    ("recipe-mismatch", "a checkpoint was loaded in that step, without the optimizer's state"),
)
_LOGITS = (("attention-logit-growth", "logits grew before the LR did, or go on when it is back"),)
_SHRINKING = (
    ("dead-layer", "one layer alone has faded, the others have not"),
    ("bad-batch", "they fell in one step, with other data"),
)
_CLIPPING = (
    ("recipe-mismatch", "another limit is meant: the gradient norm stays where it was"),
    ("bad-batch", "the norm leaped in one batch and came back"),
)


def alternatives(f: Finding) -> tuple[tuple[str, str], ...] | None:
    """What else it could be, of findings that are about no weights that grow; None for those that are."""
    kind = str(f.extra.get("kind", ""))
    if update_words.is_one(kind):
        return update_words.alternatives(kind)
    return {"second-moments": _SECOND, "clipping-lost": _CLIPPING, "logits": _LOGITS, "shrinking": _SHRINKING}.get(kind)


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if update_words.is_one(kind := p.extra.get("kind", "")):
        return update_words.fixes(str(kind))
    if p.extra.get("kind") == "clipping-lost":
        return [
            Fix("code", "Call clip_grad_norm_ between backward and optimizer.step again, with the norm of before: look at what changed at that step."),
            Fix("code", "Go back to the checkpoint before it where loss or weights have grown since."),
        ]  # fmt: skip
    if p.extra.get("kind") == "second-moments":
        return [
            Fix("code", "Keep second moments in float32, or in bfloat16: their dtype follows that of the parameters that the optimizer was given."),
            Fix("code", "Raise eps above the square root of the least number that the state holds: 1e-4 in float16, where 1e-8 itself is 0."),
            Fix("code", "Where the state was set to zero or loaded in part: load all of it from the checkpoint, or begin with a warm-up of the LR."),
        ]  # fmt: skip
    if p.extra.get("kind") == "shrinking":
        return [
            Fix("code", "Look at weight decay: its size, whether it is multiplied by the LR, and whether another part of the loop decays weights too."),
            Fix("code", "Leave gains of norms and biases out of weight decay: a group of their own with weight_decay=0."),
            Fix("code", "Go back to the checkpoint before it: what has shrunk does not come back."),
        ]  # fmt: skip
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
