"""What to change for each mode, most likely first, with the exact variable, flag or line.

Upstream:   fp8watch_server.detect.playbook   Downstream: fp8watch_server.incidents.explain
Shapes:     (mode, operand, place) -> fixes
Thread:     any; only data and pure functions
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fp8watch_server.detect.playbook import MODE_BY_SLUG
from fp8watch_server.incidents.fixes_statistical import (
    EPS_VARIABLE,
    FP32_SCALES,
    LATER,
    OPERANDS,
    POWER_2_VARIABLE,
    Fix,
    FixKind,
    Place,
    set_to,
)

__all__ = ["EPS_VARIABLE", "OPERANDS", "POWER_2_VARIABLE", "Fix", "FixKind", "fixes"]


def fixes(
    mode: str,
    *,
    module: str | None = None,
    operand: str | None = None,
    operands: tuple[str, ...] = (),
    eps: float = 0.0,
    power_2_scale: bool = True,
    batch_id: str | None = None,
    lr: float | None = None,
    usual_lr: float | None = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
    backend: str = "",
    verdict: str = "unknown",
) -> list[Fix]:
    """What to change, most likely first, with the exact variable or flag for the operand that is hit.

    Args:
        mode: slug.
        module, operand: the named place.
        operands: roles that are hit.
        eps, power_2_scale: of the named site.
        batch_id: name of the batch, where the user gave one.
        lr, usual_lr: of the step, and before.
        extra: what else the finding knows.
        backend: what quantises at the named site: the switch is that of its framework.
        verdict: of the finding.
    """
    hit = [o for o in OPERANDS if o == operand or o in operands] or list(OPERANDS)
    keep_out = Fix(
        "code",
        f"Until then keep it in BF16: attach(model, filter_fn=lambda module, fqn: False if fqn == {module!r} else None).",
    )
    batch = Fix(
        "data", f"Look at batch {batch_id!r}." if batch_id else "Find the batch: give it to watch.log(batch_id=...)."
    )
    if mode == "nan-in-loss":
        return [
            Fix("data", "Check labels and masks: a batch whose targets are all masked divides 0 by 0."),
            batch,
            Fix("code", "Check the loss itself: log of 0, a softmax over fully masked rows, a wrong ignore_index."),
        ]
    if mode == "zero-tile-eps":
        named = operand or "input"
        others = [o for o in OPERANDS if o != named]
        kind, text = set_to(backend, [named], 1e-10 if eps > 0 else 1e-12, power_2_scale)
        why = (
            f", up from {eps:g}: the eps in use did not guard this tile."
            if eps > 0
            else "; if tiles still degenerate, 1e-10."
        )
        return [
            Fix(kind, f"{text}{why}"),
            Fix(kind, f"The same for the other operands: {set_to(backend, others, 1e-12, power_2_scale)[1]}."),
            Fix("code", "Or use a kernel that sets the scale of a zero tile to 1, as Transformer Engine's does."),
        ]
    if mode == "stale-weight-scale":
        return [
            Fix("flag", "Remove --fp8-param-gather first: it keeps weights and scales that can go stale apart."),
            Fix("code", "Drop cached weights after each update: is_first_microbatch=True in the first micro-batch."),
            Fix("code", "If it persists without a cache, lower the LR by 10 to 20 %."),
        ]
    if mode == "gradient-underflow":
        kind, text = set_to(backend, ["grad_output"], 1e-12, power_2_scale)
        first = (
            Fix(kind, f"{text}: {eps:g} is in use, and may clamp gradients.")
            if eps > 1e-12
            else Fix("code", "Compute the scale from the gradient that is quantised, after loss scaling, in each step.")
        )
        return [
            first,
            Fix("flag", "Use E5M2 for gradients: --fp8-format hybrid (fp8_format HYBRID)."),
            Fix("code", "Check what divides or multiplies the gradient between its amax and its cast."),
        ]
    if mode == "scale-rounding":
        how, text = set_to(backend, hit, None, power_2_scale)
        scales = "power-of-two" if power_2_scale else "FP32"
        return [
            Fix("code", "Round the scale down (scale_inv up), and divide: 448/amax, not 448·(1/amax)."),
            Fix(how, f"The site is registered with {scales} scales; make the kernel agree: {text}."),
            Fix("env", FP32_SCALES),
        ]
    if mode == "optimizer-divergence":
        if lr is not None and usual_lr is not None:
            first = Fix(
                "code", f"Set the LR back from {lr:g} to {usual_lr:g}, and reload the checkpoint before the jump."
            )
        else:
            first = Fix("code", "Lower the LR by 10 to 20 % or more, and go back to the checkpoint before the growth.")
        return [
            first,
            Fix("code", "Look at the LR schedule: a warm-up that restarted, a wrong step count, a scaled batch size."),
            Fix("code", "If the LR is as meant: gradient clipping at 1.0, smaller β2, more warm-up."),
        ]
    if mode == "inf-laundering":
        source = {
            "input": f"Find what computes the input of {module}, and clip it before the cast: x.clamp(-3e4, 3e4).",
            "weight": f"Reload {module} from the last checkpoint whose weights are finite; clip the gradient norm.",
            "grad_output": f"Find what overflows behind {module} in the backward pass; lower the loss scale, clip.",
        }[operand or "input"]
        return [Fix("code", source), keep_out, batch]
    if mode == "nan-in-activation":
        if operand == "weight":
            return [
                Fix("code", "Reload the last checkpoint whose weights are finite: this update wrote the NaN."),
                Fix("code", "Skip updates with a non-finite gradient norm: torch.nn.utils.clip_grad_norm_ tells."),
            ]
        return [
            Fix("code", f"Look at the module right before {module}: its eps, its mask, a softmax over masked rows."),
            Fix("code", "Clip what it gets: x.clamp(-3e4, 3e4); a norm needs eps of 1e-6 or more in BF16."),
            batch,
        ]
    if mode in LATER:
        place = Place(module or "the module", operand or "input", eps, extra, backend, power_2_scale, verdict)
        return LATER[mode](place, keep_out, batch)
    known = MODE_BY_SLUG.get(mode)
    return [Fix("code", f"{known.remedy[0].upper()}{known.remedy[1:]}.")] if known else []
