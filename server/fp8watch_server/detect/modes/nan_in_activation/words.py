"""What is said of nan-in-activation: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import element_words, site_words, tile_words
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    kind = "Inf" if f.extra.get("kind") == "inf" else "NaN"
    where, at, unobserved = site_words(s), tile_words(f), f.extra.get("unobserved")
    element = element_words(f)
    if s is not None and s.operand == "weight":
        if (step := f.extra.get("norm_step")) is not None:
            return (
                f"{kind} is already in the weights: {where}{at}, behind a gradient norm of step {step} that was not finite",
                f"{where} was not finite before it was quantised{element}, and the gradient norm of step {step} was not either: the update of that "
                "step wrote it. Where gradients are clipped by such a norm, all of them become NaN, and with them all weights: this one is "
                "the first in the order of the model, which need not be where it began.",
            )
        return (
            f"{kind} is already in the weights: {where}{at}",
            f"{where} was not finite before it was quantised{element}. A weight changes between steps: an update wrote "
            "it, or what loads or edits weights.",
        )
    if s is not None and s.is_probe and s.operand == "input":
        return (
            f"{kind} entered {s.module}{at}",
            f"What {s.module} was given is the first measured value of the step that is not finite{element}: it was made before, by "
            "a norm, attention, an elementwise operation, or what is not observed there.",
        )
    if s is not None and (entered := f.extra.get("entered")):
        came = f"{entered} elements of its input were" if entered > 1 else "its input was"
        return (
            f"{kind} entered {s.module}{at}",
            f"What {s.module} returned is the first measured value of the step that is not finite{element}, and {came} not finite already: "
            "it was made before, by a norm, attention, an elementwise operation, or what is not observed there.",
        )
    if s is not None and f.extra.get("given_finite"):
        return (
            f"{kind} came out of {s.module}, and none went in{at}",
            f"What {s.module} returned is the first measured value of the step that is not finite{element}, and what it was given is finite: "
            "its weight made it, which is in high precision and not looked at, or what it computes.",
        )
    if unobserved:
        return (
            f"{kind} reached {where}, perhaps out of a GEMM that is not observed{at}",
            f"{where} is the first measured operand of the step that is not finite{element}, and no measured scale before it is "
            "broken. "
            f"Between it and the operand before it run GEMMs that are not observed: {', '.join(unobserved)}. "
            "One of them made it, or what lies around them: a norm, attention, an elementwise operation.",
        )
    return (
        f"{kind} reached {where} from outside the GEMMs{at}",
        f"{where} is the first measured operand of the step that is not finite{element}, and no measured scale before "
        "it is broken: it was made outside the GEMMs, by a norm, attention, an elementwise operation or an embedding.",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.operand == "weight":
        return [
            Fix("code", "Reload the last checkpoint whose weights are finite: this update wrote the NaN."),
            Fix("code", "Skip updates with a non-finite gradient norm: torch.nn.utils.clip_grad_norm_ tells."),
        ]
    if p.extra.get("given_finite"):
        return [
            Fix("code", f"Look at its weight: `torch.isfinite(model.get_submodule({p.module!r}).weight).all()`. Where it is not finite, reload the last checkpoint in which it is."),
            Fix("code", f"Where it is finite, what {p.module} computes overflows: keep it in float32, and bound what it is given."),
            p.batch,
        ]  # fmt: skip
    return [
        Fix("code", f"Look at the module right before {p.module}: its eps, its mask, a softmax over masked rows."),
        Fix("code", "Clip what it gets: x.clamp(-3e4, 3e4); a norm needs eps of 1e-6 or more in BF16."),
        p.batch,
    ]
