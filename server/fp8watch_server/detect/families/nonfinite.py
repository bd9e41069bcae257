"""The first non-finite value of a step: modes 1 (nan-in-loss), 17 (inf-laundering), 23 (nan-in-activation).

Shapes:     StepView -> at most one finding
Thread:     detect worker

One question, asked in the order of execution: what broke first? Everything after it in the step is its consequence.

    a degenerate scale before any NaN or Inf          -> zero-tile-eps (2)
    a GEMM's output, its operands finite              -> kernel-output-fault (19)
    Inf in an operand, loss finite or not seen        -> inf-laundering (17): the cast made it FP8_MAX
    any other NaN or Inf in an operand                -> nan-in-activation (23)
    forward operands finite, loss not                 -> nan-in-loss (1): gradients are its consequence
Gradients that overflowed in a step that was skipped are no fault: whether that goes on, scale-collapse (22) says.
A weight changes only between steps, so a non-finite weight was made by an earlier step: `weight_born`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fp8watch_agent.experts import NONFINITE_EXPERT, NONFINITE_EXPERT_ROW
from fp8watch_agent.record import Measured, StepStatus
from fp8watch_server.detect.families import degenerate, kernel_output
from fp8watch_server.detect.finding import LOSS_FLOW, Evidence, Finding
from fp8watch_server.detect.step_view import GRAD_OUTPUT, OUTPUT, WEIGHT, Mask, StepView

_MAX_INDEX = 1 << 31


def loss_is_broken(view: StepView) -> bool:
    """The loss of this step is there, and is NaN or Inf."""
    loss = view.scalar("loss")
    return loss is not None and not math.isfinite(loss)


def _overflowed(view: StepView) -> Mask:
    """Records of gradients that overflowed, and whose step was skipped for it: how a loss scale is found, and no fault. [n]

    Where no scale was recorded, the engine that skips steps has it: then an Inf, and nothing broken but gradients, tells.
    """
    gradients = np.asarray(view.role == GRAD_OUTPUT)
    if view.status != StepStatus.SKIPPED or loss_is_broken(view):
        return np.zeros_like(gradients)
    if view.scalar("loss_scale") is not None:
        return gradients
    overflow = not (view.nonfinite & ~gradients).any() and (view.infinite & gradients).any()
    return gradients if overflow else np.zeros_like(gradients)


def examine(
    view: StepView, degenerate_mask: Mask, output_mask: Mask, zero_tiles: degenerate.ZeroTiles
) -> Finding | None:
    """What broke first in this step; None where nothing did.

    Args:
        view: the step.
        degenerate_mask: [n], records with a degenerate scale.
        output_mask: [n], records whose GEMM made something non-finite of finite operands.
        zero_tiles: what is normal, for the evidence.
    """
    overflowed = _overflowed(view)
    broken = view.in_flow(view.nonfinite & ~overflowed)
    weights = broken[view.role[broken] == WEIGHT]
    bad_scale = view.in_flow(degenerate_mask)
    if (
        len(bad_scale)
        and not len(weights)
        and (not len(broken) or view.flow[bad_scale[0]] < view.flow[broken[0]])
        and not view.nonfinite[bad_scale[0]]
    ):
        before = bad_scale[view.flow[bad_scale] < view.flow[broken[0]]] if len(broken) else bad_scale
        return degenerate.finding(view, before, broken, zero_tiles)
    outputs = view.in_flow(output_mask & ~overflowed)  # a product that is too large overflows where it is made
    if len(outputs) and not len(weights):
        behind = broken[~np.isin(broken, outputs)]
        if not len(behind) or view.flow[outputs[0]] <= view.flow[behind[0]]:
            return kernel_output.finding(view, outputs, behind)
    loss_broken = loss_is_broken(view)
    forward = broken[view.role[broken] != GRAD_OUTPUT]
    if loss_broken and not len(forward):
        return _nan_in_loss(view, broken)
    if not len(broken):
        return None
    named = weights if len(weights) else broken
    first = int(named[0])
    laundered = bool(view.infinite[first]) and not loss_broken and view.role[first] != OUTPUT
    if laundered and view.scalar("loss") is None and view.role[first] != GRAD_OUTPUT:
        # Without a loss only the operands can tell whether the Inf went on as NaN.
        laundered = not np.any(view.raw("num_nan")[forward[forward != first]] > 0)
    return _in_operand(view, "inf-laundering" if laundered else "nan-in-activation", first, broken)


def _in_operand(view: StepView, mode: str, first: int, broken: npt.NDArray[np.int64]) -> Finding:
    """A finding placed at record `first`; all of `broken` are hit."""
    facts = view.facts(first)
    element, tile = view.element(first)
    weight_born = facts.operand == "weight"
    evidence: list[Evidence] = []
    for name in ("num_inf", "num_nan"):
        count = int(view.raw(name)[first])
        if count:
            evidence.append(Evidence(name, count, 0, "elements", view.step))
    if view.has(Measured.AMAX)[first]:
        sentinels = int(view.raw("num_sentinel_tiles")[first])
        if sentinels:
            evidence.append(Evidence("num_sentinel_tiles", sentinels, 0, "tiles", view.step))
    if mode == "inf-laundering" and view.has(Measured.COUNTS | Measured.CAST)[first]:
        evidence.append(Evidence("num_underflow", int(view.raw("num_underflow")[first]), None, "elements", view.step))
    if entered := kernel_output.num_entered(view, first):
        evidence.append(Evidence("num_nonfinite_input", entered, 0, "elements", view.step))
    loss = view.scalar("loss")
    if loss is not None:
        evidence.append(Evidence("loss", loss, None, "", view.step))
    if len(broken) > 1:
        evidence.append(Evidence("nonfinite_sites", len(broken), 0, "sites", view.step))
    others = broken[broken != first]
    return Finding(
        mode=mode,
        severity="critical",
        step=view.step,
        rank=view.rank,
        site=facts.id,
        tile=tile,
        element=element,
        evidence=tuple(evidence),
        verdict="fp8" if mode == "inf-laundering" else "shared",
        rank_in_flow=int(view.flow[first]),
        extra={
            "sites": view.site_ids(np.concatenate([[first], others])),
            "num_sites": len(broken),
            "operands": [facts.operand],
            "weight_born": weight_born,
            "probe": facts.is_probe,
            "entered": kernel_output.num_entered(view, first),
            "given_finite": _given_finite(view, first),
            "kind": "inf" if view.infinite[first] else "nan",
            **_expert(view, f"{facts.module}.{facts.operand}.{facts.direction}"),
        },
    )


def _given_finite(view: StepView, first: int) -> bool:
    """Whether record `first` is what a module in high precision returned, and what that was given was measured and is finite."""
    facts, table = view.facts(first), view.columns.table
    if not facts.is_probe or facts.operand != "output":
        return False
    known = (table.module[view.row] == table.module[view.row[first]]) & view.has(Measured.COUNTS | Measured.CAST)
    given = [i for i in np.flatnonzero(known) if view.facts(int(i)).operand == "input"]
    return bool(given) and not view.nonfinite[given].any()


def _expert(view: StepView, site: str) -> dict[str, int]:
    """Expert and row of the expert that the named element lies in, where the step says so."""
    logs = view.logs()
    expert, row = logs.get(NONFINITE_EXPERT + site), logs.get(NONFINITE_EXPERT_ROW + site)
    if expert is None or not (0 <= expert < _MAX_INDEX):
        return {}
    return {"expert": int(expert)} | ({"expert_row": int(row)} if row is not None and 0 <= row < _MAX_INDEX else {})


def _nan_in_loss(view: StepView, gradients: npt.NDArray[np.int64]) -> Finding:
    loss = view.scalar("loss")
    forward_seen = int(np.count_nonzero(view.has(Measured.COUNTS | Measured.CAST) & (view.role != GRAD_OUTPUT)))
    evidence = [
        Evidence("loss", loss, "finite", "", view.step),
        Evidence("nonfinite_forward_operands", 0 if forward_seen else None, 0, "sites", view.step),
        Evidence("forward_operands_seen", forward_seen, None, "sites", view.step),
    ]
    if len(gradients):
        evidence.append(Evidence("nonfinite_gradients", len(gradients), 0, "sites", view.step))
    return Finding(
        mode="nan-in-loss",
        severity="critical",
        step=view.step,
        rank=view.rank,
        site=None,
        tile=None,
        element=None,
        evidence=tuple(evidence),
        verdict="shared" if forward_seen else "unknown",
        rank_in_flow=LOSS_FLOW,
        extra={
            "sites": view.site_ids(gradients),
            "num_sites": len(gradients),
            "operands": [],
            "forward_seen": forward_seen,
            "kind": "nan" if loss is not None and math.isnan(loss) else "inf",
        },
    )
