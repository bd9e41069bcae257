"""A loss that jumped: what is known of it, and what is said: mode 14, bad-batch, or 13, optimizer-divergence.

Shapes:     a jump, the step in which it is over -> at most one finding
Thread:     detect worker

A jump that comes back is of a batch. One that does not is of other data, of a training that diverges, or a spike of a large one that
takes a hundred steps: five steps do not tell them apart, so nothing is claimed of the data, and the gradient norm says
whether it warns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding, Severity, Verdict
from fp8watch_server.detect.limits import Limits

BRIEF_STEPS = 1
BRIEF_RATIO = 2.0
"""A jump to less than this times the usual loss that is over after so many steps is a notice: data have odd batches."""


@dataclass
class _Inputs:
    """What the inputs looked like in the first step since the jump in which they were measured."""

    step: int
    amax: float  # of the site that stands highest over its own baseline
    usual: float
    site: int
    octaves: float
    ordinary: bool
    moved: bool  # most of them, or one that leaped: no matter of the data
    healthy: bool | None  # the quantisers; None where they were not measured
    entered: bool = False  # most of them, from the first GEMM on


@dataclass
class _Jump:
    step: int
    num: int  # observed steps since
    loss: float
    peak: int  # step of `loss`
    usual: float
    spread: float
    grad_norm: float | None
    usual_grad_norm: float | None
    batch_id: str | None
    lr: tuple[int, float, float] | None  # step, usual, LR of the leap that came right before
    inputs: _Inputs | None
    small: tuple[float, float] | None = None  # rows of its batch and the usual ones, where they are few
    seen_before: int | None = None  # step that had its batch, bit for bit
    small_loss: bool = False  # even at its height, beside the first of the run
    unfrozen: tuple[int, int, int] | None = None  # step of the first gradients of sites, how many, of how many
    written: tuple[int, int] | None = None  # weights that were written before this step, of those looked at
    learnt: bool = False  # the usual loss is next to nothing, and the jump is little
    norms: tuple[float, ...] = ()  # of the gradient, since
    scatter: float | None = None  # the largest of before, over or under what was usual, where losses may be negative

    def is_back(self, loss: float) -> bool:
        """Whether this loss is, but for a quarter, where it was."""
        return loss < self.usual + max(3 * self.spread, 0.25 * (self.loss - self.usual))


def norm_jumped(jump: _Jump, limit: Limits) -> bool:
    """The gradient norm jumped as well, as far as it is known."""
    if jump.grad_norm is None or jump.usual_grad_norm is None:
        return True
    return jump.grad_norm > limit.grad_norm_jump * (jump.usual_grad_norm or math.inf)


def finding(now: CrossRankStep, jump: _Jump, limit: Limits, *, back: bool, cut: bool = False) -> list[Finding]:
    """What is said of a jump that is over, or was not back in time, or was cut off by values that broke: at most one."""
    inputs, lr = jump.inputs, jump.lr
    if back and lr is None and inputs is not None and inputs.moved and not inputs.entered:
        return []
    after = now.step - jump.step
    evidence = [Evidence("loss", round(jump.loss, 4), round(jump.usual, 4), "", jump.peak)]
    if jump.grad_norm is not None:
        usual = None if jump.usual_grad_norm is None else float(f"{jump.usual_grad_norm:.4g}")
        evidence.append(Evidence("grad_norm", float(f"{jump.grad_norm:.4g}"), usual, "", jump.step))
    then = now.scalar("loss") or 0.0
    if back:
        evidence.append(Evidence("recovered_after", after, "5 or less", "steps", jump.step))
        evidence.append(Evidence("loss_after", round(then, 4), round(jump.usual, 4), "", now.step))
    else:
        evidence.append(Evidence("steps_above", after, 0, "steps", jump.step))
    if jump.unfrozen is not None:
        at, num, of = jump.unfrozen
        evidence.append(Evidence("first_gradients", num, of - num, "sites", at))
    elif jump.written is not None:
        evidence.append(Evidence("weights_changed", jump.written[0], 0, f"of {jump.written[1]} looked at", jump.step))
    elif jump.seen_before is not None:
        evidence.append(Evidence("batch_of_step", jump.seen_before, None, "step", jump.step))
    if jump.small is not None:
        evidence.append(Evidence("batch_rows", jump.small[0], jump.small[1], "rows", jump.step))
    if inputs is not None and back and inputs.step != jump.step:
        inputs = None  # of another batch than the one that did it
    if inputs is not None:
        evidence.append(Evidence("input_amax", inputs.amax, inputs.usual, "x", inputs.step))
        if inputs.healthy is not None:
            said = "yes" if inputs.healthy else "no"
            evidence.append(Evidence("quantiser_healthy", said, "yes", "", inputs.step))
    healthy = inputs is not None and inputs.healthy is True
    about: dict[str, Any] = {
        "began": jump.step,
        "jump_batch_id": jump.batch_id,
        "shift": not back and not cut,
        "cut": now.step if cut else None,
        "most_of_the_way": back and then > jump.usual + 3 * jump.spread,
        "small_loss": jump.small_loss,
        "learnt": jump.learnt and jump.seen_before is None,
        "jump_of": _why(jump),
        "norm_stays": None if back else _norm_stays(jump, limit),
        "inputs": None
        if inputs is None
        else {"ordinary": inputs.ordinary, "octaves": inputs.octaves, "site": inputs.site, "entered": inputs.entered},
    }
    if lr is not None:
        at, usual_lr, value = lr
        evidence.insert(0, Evidence("lr", value, usual_lr, "", at))
        about |= {"began": at, "not_before": at, "lr_jump": (usual_lr, value), "by_loss": True}
        verdict: Verdict = "shared" if healthy else "unknown"
        return [_of_run(now, "optimizer-divergence", "warning" if back else "critical", evidence, verdict, about)]
    known = inputs is not None and (inputs.ordinary or inputs.entered)
    verdict = "shared" if healthy and known and not cut else "unknown"
    scatters = jump.seen_before is not None and jump.small_loss
    brief = after <= BRIEF_STEPS and (scatters or jump.loss - jump.usual < _odd(jump))
    notice = (
        brief or (jump.learnt and jump.seen_before is None) or jump.small is not None or jump.unfrozen is not None
        if back
        else about["shift"] and not _may_diverge(jump, limit)
    )
    return [_of_run(now, "bad-batch", "info" if notice else "warning", evidence, verdict, about)]


def _odd(jump: _Jump) -> float:
    """Up to which height a jump is that of an odd batch: of losses that may be negative, beside those of before."""
    return (BRIEF_RATIO - 1) * jump.usual if jump.scatter is None else BRIEF_RATIO * jump.scatter


def _norm_stays(jump: _Jump, limit: Limits) -> bool | None:
    """Whether gradients stay larger than they were, too; None where no norm was given."""
    if not jump.norms or not jump.usual_grad_norm:
        return None
    return float(np.median(jump.norms)) > limit.grad_norm_jump * jump.usual_grad_norm


def _may_diverge(jump: _Jump, limit: Limits) -> bool:
    """Whether a loss that was not back in time may be that of a training that diverges: where gradients are as ever, it is of data or
    labels; without a norm, the loss itself stands at multiples. Inputs that are larger from the first GEMM on, parameters that begin to
    train and weights that were written are causes that are known."""
    if jump.unfrozen is not None or jump.written is not None or (jump.inputs is not None and jump.inputs.entered):
        return False
    stays = _norm_stays(jump, limit)
    return stays if stays is not None else 0 < BRIEF_RATIO * jump.usual <= jump.loss


def _why(jump: _Jump) -> str | None:
    if jump.unfrozen is not None:
        return "unfrozen"
    return "written" if jump.written is not None else "same batch" if jump.seen_before is not None else None


def _of_run(
    now: CrossRankStep, mode: str, severity: Severity, evidence: list[Evidence], verdict: Verdict, about: dict[str, Any]
) -> Finding:
    none = np.zeros(0, dtype=np.int64)
    found = now.finding(mode, severity, none, evidence, verdict, **about)
    return Finding(**{**found.__dict__, "rank_in_flow": LOSS_FLOW})
