"""What is said of scale-collapse: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import evidence, number, since, site_words
from fp8watch_server.detect.remedies import Fix, Place
from fp8watch_server.detect.switches import margin


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if f.extra.get("grad_scaler"):
        return _overflows(f, s)
    return (
        f"Scale of {site_words(s)} fell by {number(evidence(f, 'scale_fall'))} octaves",
        f"The delayed scale of {site_words(s)} follows an amax that runs away{since(f)}: "
        f"{evidence(f, 'steps_to_floor')} steps to the floor at this rate.",
    )


def _overflows(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    skipped, scale = evidence(f, "skipped_steps"), number(evidence(f, "loss_scale"))
    where = f" The first gradient that was not finite in step {f.step} is {site_words(s)}." if s else ""
    if f.severity == "info":
        return (
            f"Gradients overflowed in step {f.step}, and the step was skipped",
            f"An Inf, in gradients alone, and a step without an update: how a loss scale is found. None was recorded here.{where}",
        )
    if skipped is not None and (f.severity == "critical" or evidence(f, "loss_scale") is None):
        last = f", and the loss scale is {scale}" if evidence(f, "loss_scale") is not None else ""
        return (
            f"{skipped} steps in a row were skipped{last}",
            f"Each observed step{since(f)} went by without an update. A loss scale that is too high is found in fewer.{where}",
        )
    return (
        f"GradScaler halved {evidence(f, 'halvings_without_growth')} times without growing: {scale}",
        "Each halving is an overflow and a step that was skipped. Without growth between them overflows are the rule, and small "
        f"gradients vanish at the other end.{where}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.extra.get("grad_scaler"):
        return [
            Fix("code", "Find what overflows: the first non-finite gradient of the skipped steps names the module."),
            Fix("code", "Lower the LR, and clip the gradient norm at 1.0 after unscale_."),
            Fix("code", "Train in BF16 instead of FP16 where the hardware has it: it needs no loss scale."),
        ]
    return [
        Fix("code", f"Find what grows in {p.module}: outlier-growth and attention-logit-growth say where it begins."),
        Fix("code", "Lower the LR by 10 to 20 %, and add weight decay there."),
        *margin(p, 1, "Head room until then"),
    ]
