"""The scale invariant: what a quantiser with current scaling cannot break. Modes 7, 8 and 9.

Shapes:     StepView -> at most one finding per mode
Thread:     detect worker

scale_ratio = amax·scale/FP8_MAX, of the tensor about to be multiplied and the scale that the GEMM uses. It is 1 with
FP32 scales and in (0.5, 1] with power-of-two scales, whatever the data are, so there is no threshold to tune and no
warm-up: one broken tile is a broken quantiser. Who is outside says what broke:

    weights only                             -> stale-weight-scale (7): the scale belongs to an older weight
    gradients only, and far below            -> gradient-underflow (8): the scale of something larger
    too large in two roles or more, or else  -> scale-rounding (9): the scale is computed wrongly
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_agent.record import Measured
from fp8watch_server.detect.finding import Evidence, Finding, Severity
from fp8watch_server.detect.step_view import GRAD_OUTPUT, WEIGHT, BatchColumns, Mask, StepView

TOLERANCE = 2.0**-20
"""Relative. amax·(448/amax)/448 in float32 is off by two roundings of 2^-24; a stale scale by more."""

ROUNDING_RATIO = 1.005
"""Above this a scale was rounded up, where the rules round down: stale weights pass it too, so roles must agree."""

UNDERFLOW_RATIO = 0.25
"""A gradient tile that uses less than a quarter of the range has the scale of something else."""


def bounds(power_2_scale: Mask, rounds_up: Mask) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lowest and highest scale_ratio that rounding allows, per record.

    MXFP8 takes the exponent of amax and rounds up: scale_inv = 2^ceil(log2(amax/448)), so the ratio is in (0.5, 1] too.
    """
    low = np.where(power_2_scale | rounds_up, 0.5 * (1 - TOLERANCE), 1 - TOLERANCE)
    return low, np.full(len(low), 1 + TOLERANCE)


def off_scale(columns: BatchColumns) -> tuple[Mask, Mask]:
    """Records below and above their bounds. Records with a NaN or an Inf belong to others. [N], [N]"""
    table = columns.table
    judged = table.current_scaling & ~table.four_bit  # a scale of NVFP4 is itself rounded, to three bits
    usable = columns.has(Measured.RATIO) & judged[columns.row] & ~columns.nonfinite
    smallest = columns.raw("scale_ratio_min").astype(np.float64)
    largest = columns.raw("scale_ratio_max").astype(np.float64)
    # A record whose tiles were all excluded keeps its defaults: Inf and 0.
    usable &= np.isfinite(smallest) & np.isfinite(largest) & (largest > 0)
    low, high = bounds(columns.table.power_2_scale[columns.row], columns.table.rounds_up[columns.row])
    return usable & (smallest < low), usable & (largest > high)


def examine(view: StepView, below: Mask, above: Mask, healthy: Mask) -> list[Finding]:
    """Findings of one step.

    Args:
        view: the step.
        below, above: [n], records outside their bounds.
        healthy: [n], records that may be judged (no degenerate scale).
    """
    below, above = below & healthy, above & healthy
    outside = below | above
    if not outside.any():
        return []
    role = view.role
    rounded_up = above & (view.values("scale_ratio_max") > ROUNDING_RATIO)
    roles_up = np.unique(role[rounded_up])
    found: list[Finding] = []
    rest = outside
    if len(roles_up) >= 2:
        found.append(_finding(view, "scale-rounding", "warning", rounded_up))
        rest = outside & ~rounded_up
    weights = rest & (role == WEIGHT)
    if weights.any():
        found.append(_finding(view, "stale-weight-scale", "critical", weights))
    starved = rest & (role == GRAD_OUTPUT) & below & ~above & (view.values("scale_ratio_min") <= UNDERFLOW_RATIO)
    if starved.any():
        found.append(_finding(view, "gradient-underflow", "critical", starved))
    others = rest & ~weights & ~starved
    if others.any() and not len(roles_up) >= 2:
        found.append(_finding(view, "scale-rounding", "warning", others))
    return found


def _finding(view: StepView, mode: str, severity: Severity, mask: Mask) -> Finding:
    at = view.in_flow(mask)
    first = int(at[0])
    facts = view.facts(first)
    allowed = "in (0.5, 1]" if facts.power_2_scale else "1 ± 2^-20"
    smallest = float(view.raw("scale_ratio_min")[first])
    largest = float(view.raw("scale_ratio_max")[first])
    evidence = [
        Evidence("scale_ratio_max", largest, allowed, "ratio", view.step),
        Evidence("scale_ratio_min", smallest, allowed, "ratio", view.step),
    ]
    if mode == "gradient-underflow":
        evidence.reverse()
    counts = bool(view.has(Measured.COUNTS)[first])
    tiles = int(view.raw("num_off_scale_tiles")[first])
    if tiles:
        of = int(view.raw("num_tiles")[first]) if counts else None
        evidence.append(Evidence("num_off_scale_tiles", tiles, 0, f"of {of} tiles" if of else "tiles", view.step))
    if view.has(Measured.COUNTS | Measured.CAST)[first]:
        for name in ("num_saturated", "num_underflow"):
            count = int(view.raw(name)[first])
            if count:
                evidence.append(Evidence(name, count, None, "elements", view.step))
    sqnr = tile_sqnr_db(view)[first]
    if np.isfinite(sqnr):
        evidence.append(Evidence("tile_sqnr_db", round(float(sqnr), 2), "28 or more", "dB", view.step))
    if len(at) > 1:
        evidence.append(Evidence("off_scale_sites", len(at), 0, "sites", view.step))
    return Finding(
        mode=mode,
        severity=severity,
        step=view.step,
        rank=view.rank,
        site=facts.id,
        tile=view.tile("off_scale_tile", first),
        element=None,
        evidence=tuple(evidence),
        verdict="fp8",
        rank_in_flow=int(view.flow[first]),
        extra={
            "sites": view.site_ids(at),
            "num_sites": len(at),
            "operands": view.operands(at),
            "ratio_max": largest,
            "ratio_min": smallest,
            "power_2_scale": facts.power_2_scale,
        },
    )


def destroyed(view: StepView, rows: npt.NDArray[np.int64], limit_db: float) -> bool:
    """Whether quantisation takes more than half of the energy of one of these operands, all of it finite."""
    if not len(rows) or not view.has(Measured.ENERGIES).any():
        return False
    at = np.isin(view.row, rows) & view.has(Measured.ENERGIES) & ~view.nonfinite
    return bool(np.any(tile_sqnr_db(view)[at] < limit_db)) if at.any() else False


def tile_sqnr_db(view: StepView) -> npt.NDArray[np.float64]:
    """−10·log10 of the mean over non-zero tiles of noise/signal; NaN where it was not measured. [n]"""
    tiles = view.values("num_tiles") - view.values("num_zero_tiles")
    with np.errstate(divide="ignore", invalid="ignore"):
        db = -10.0 * np.log10(view.values("tile_noise_ratio_sum") / tiles)
    return np.where(np.isfinite(db), db, np.nan)
