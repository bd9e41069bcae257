"""The 23 failure modes, and what to change for each: the only table of their names.

Upstream:   fp8watch_server.detect.finding   Downstream: fp8watch_server.incidents.explain
Shapes:     slug -> Mode; (mode, operand, place) -> fixes
Thread:     any; only data and pure functions

Slugs are frozen: alert rules, runbook addresses and silences are written with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FixKind = Literal["env", "flag", "code", "data", "hardware"]

EPS_VARIABLE = {
    "input": "FP8_QUANT_FWD_INP_AMAX_EPS",
    "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS",
    "grad_output": "FP8_QUANT_BWD_GRAD_AMAX_EPS",
}
POWER_2_VARIABLE = {
    "input": "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2",
    "weight": "NVTE_FP8_BLOCK_SCALING_FWD_WEIGHT_POWER2",
    "grad_output": "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2",
}
OPERANDS = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Fix:
    """One thing to change, most likely first in a list of them."""

    kind: FixKind
    text: str

    def as_json(self) -> dict[str, str]:
        """As CONTRACT names it."""
        return {"kind": self.kind, "text": self.text}


@dataclass(frozen=True)
class Mode:
    """One failure mode."""

    number: int
    slug: str
    name: str  # a few words, for a title where nothing better is known
    remedy: str  # one line; the built modes have longer ones in `fixes`
    alternatives: tuple[tuple[str, str], ...] = ()  # (slug, how to tell it apart)


MODES: tuple[Mode, ...] = (
    Mode(
        1,
        "nan-in-loss",
        "NaN born in the loss or the data",
        "check labels, masks and the batch; it is not FP8",
        (
            ("bad-batch", "the loss was finite but far off, and came back within 5 steps"),
            ("kernel-output-fault", "a Linear's output is NaN although its operands are finite: put a probe on it"),
        ),
    ),
    Mode(
        2,
        "zero-tile-eps",
        "zero tile quantised without eps",
        "set the *_AMAX_EPS of the operand to 1e-12, then 1e-10",
        (
            ("dying-tile", "amax_min_nonzero of the site fell for many steps before"),
            ("dead-layer", "every tile of the site is zero, and its gradients too"),
        ),
    ),
    Mode(3, "dying-tile", "tile dying away", "set the *_AMAX_EPS of the operand to 1e-12, then 1e-10"),
    Mode(4, "dead-layer", "dead layer or expert", "look at the router and at requires_grad"),
    Mode(5, "delayed-clip", "outlier clipped by a delayed scale", "blockwise or current scaling, or margin 1 to 2"),
    Mode(6, "frozen-scale", "frozen scale", "reset the amax history; check the amax group and is_first_microbatch"),
    Mode(
        7,
        "stale-weight-scale",
        "stale weight scale",
        "disable --fp8-param-gather, then lower the LR by 10 to 20 %",
        (
            ("scale-rounding", "inputs and gradients are off the invariant too"),
            ("silent-data-corruption", "one block of one rank only, and the weight hash differs between replicas"),
        ),
    ),
    Mode(
        8,
        "gradient-underflow",
        "gradients quantised with a scale far too small",
        "lower the eps of grad_output, or use E5M2 for gradients",
        (
            ("scale-rounding", "the ratio is above 1 instead of far below"),
            ("scale-collapse", "the GradScaler's scale fell step by step before"),
        ),
    ),
    Mode(
        9,
        "scale-rounding",
        "scale computed or rounded wrongly",
        "round scale_inv up; check the POWER2 and FP32_SCALES variables",
        (
            ("stale-weight-scale", "only weights are off the invariant"),
            ("recipe-mismatch", "power_2_scale as registered is not what the kernel does"),
        ),
    ),
    Mode(10, "recipe-mismatch", "recipe changed", "the same FP8 flags and eps as when the checkpoint was saved"),
    Mode(11, "outlier-growth", "outliers growing in one layer", "smooth SwiGLU, keep that input in BF16, weight decay"),
    Mode(12, "attention-logit-growth", "attention logits growing", "QK norm or QK clip"),
    Mode(
        13,
        "optimizer-divergence",
        "optimizer diverging",
        "lower the LR by 10 to 20 % or more; it is not FP8",
        (
            ("outlier-growth", "one layer grows, the others do not"),
            ("stale-weight-scale", "scale_ratio of a weight is outside its bounds"),
            ("bad-batch", "loss and gradient norm jumped and came back within 5 steps"),
        ),
    ),
    Mode(14, "bad-batch", "bad batch or data shift", "look at the batch ids, skip the batch"),
    Mode(15, "silent-data-corruption", "silent data corruption", "drain the node, recompute, reload"),
    Mode(16, "accumulator-precision", "accumulator too narrow", "split accumulator, promotion every 128"),
    Mode(
        17,
        "inf-laundering",
        "Inf laundered by the cast",
        "find the source or clip it; BF16 for that layer until then",
        (
            ("nan-in-activation", "the loss turns NaN in the same step: the Inf did not stay inside the tile"),
            ("outlier-growth", "amax of the site grew for many steps before it reached Inf"),
        ),
    ),
    Mode(18, "sensitive-layer-quantized", "sensitive layer on the FP8 path", "exclude it with filter_fn"),
    Mode(19, "kernel-output-fault", "kernel output fault", "mask or guard; a bug of the kernel"),
    Mode(20, "cross-rank-disagreement", "ranks disagree", "check the amax reduction group (TP or DP)"),
    Mode(21, "chronic-quantization-noise", "too much quantisation noise", "finer granularity, or leave the layer out"),
    Mode(22, "scale-collapse", "scale collapsing", "lower the LR, find the outliers, more margin"),
    Mode(
        23,
        "nan-in-activation",
        "non-finite value from outside the GEMMs",
        "look at that module's inputs, eps and mask; clip",
        (
            ("kernel-output-fault", "the Linear before it got finite operands: put a probe on its output"),
            ("nan-in-loss", "the forward operands are finite and only the loss is NaN"),
        ),
    ),
)

MODE_BY_SLUG: dict[str, Mode] = {m.slug: m for m in MODES}
SLUGS: tuple[str, ...] = tuple(m.slug for m in MODES)


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
) -> list[Fix]:
    """What to change, most likely first, with the exact variable or flag for the operand that is hit.

    Args:
        mode: slug.
        module, operand: the named place.
        operands: roles that are hit.
        eps, power_2_scale: of the named site.
        batch_id: name of the batch, where the user gave one.
        lr, usual_lr: of the step, and before.
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
        if eps > 0:
            first = Fix(
                "env", f"Raise {EPS_VARIABLE[named]} from {eps:g} to 1e-10: the eps in use did not guard this tile."
            )
        else:
            first = Fix("env", f"{EPS_VARIABLE[named]}=1e-12; if tiles still degenerate, 1e-10.")
        return [
            first,
            Fix("env", f"The same for the other operands: {' '.join(f'{EPS_VARIABLE[o]}=1e-12' for o in others)}."),
            Fix("code", "Or use a kernel that sets the scale of a zero tile to 1, as Transformer Engine's does."),
        ]
    if mode == "stale-weight-scale":
        return [
            Fix("flag", "Remove --fp8-param-gather first: it keeps weights and scales that can go stale apart."),
            Fix("code", "Drop cached weights after each update: is_first_microbatch=True in the first micro-batch."),
            Fix("code", "If it persists without a cache, lower the LR by 10 to 20 %."),
        ]
    if mode == "gradient-underflow":
        first = (
            Fix("env", f"{EPS_VARIABLE['grad_output']}=1e-12: {eps:g} is in use, and may clamp gradients.")
            if eps > 1e-12
            else Fix("code", "Compute the scale from the gradient that is quantised, after loss scaling, in each step.")
        )
        return [
            first,
            Fix("flag", "Use E5M2 for gradients: --fp8-format hybrid (fp8_format HYBRID)."),
            Fix("code", "Check what divides or multiplies the gradient between its amax and its cast."),
        ]
    if mode == "scale-rounding":
        value = "1" if power_2_scale else "0"
        variables = " ".join(f"{POWER_2_VARIABLE[o]}={value}" for o in hit)
        kind = "power-of-two" if power_2_scale else "FP32"
        return [
            Fix("code", "Round the scale down (scale_inv up), and divide: 448/amax, not 448·(1/amax)."),
            Fix("env", f"The site is registered with {kind} scales; make the kernel agree: {variables}."),
            Fix("env", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 takes power-of-two rounding out (not on Blackwell)."),
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
    known = MODE_BY_SLUG.get(mode)
    return [Fix("code", f"{known.remedy[0].upper()}{known.remedy[1:]}.")] if known else []
