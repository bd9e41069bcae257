"""What a GEMM reads, held against its operand: mode 24, quantiser-fault.

Shapes:     StepView -> at most one finding
Thread:     detect worker

Two kinds of evidence. Counts of a look that the agent takes in turn (`fp8watch.quantize.self_consistency`): each is 0
whatever the data are, so there is no threshold and no warm-up. And the tile SQNR of a full sample: where each tile has a
scale of its own amax, quantisation cannot take half of the energy, so an operand under 3 dB is destroyed, not noisy; nor can
rounding make many elements of many sizes larger or smaller by 5 %, so a gain error of that size is a scale read as another.
Where the statistics say themselves that a scale is wrong, the modes of the scale invariant tell it, unless the operand
comes out larger than it went in: the codes were then made with another scale than the one beside them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_agent.experts import CHECKED_EXPERT
from fp8watch_agent.record import QUANTISER_FAULTS, Measured
from fp8watch_server.detect.families import experts, fault_why, gain
from fp8watch_server.detect.families.invariant import tile_sqnr_db
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.sample_gaps import ENERGIES
from fp8watch_server.detect.step_view import OUTPUT, Mask, StepView

UNITS = {
    "num_nan_codes": "elements",
    "num_off_grid": "elements",
    "num_zeroed_tiles": "tiles",
    "num_wrong_scales": "tiles",
}
_WRONG, _RESCALED, _DESTROYED = 1, 2, 4
_LEAST_AMAX = 2.0**-100
"""Below this the scale of a tile overflows, and what is lost is the range of float32."""


def quantiser_faults(view: StepView, limit: Limits) -> list[Finding]:
    """The operands of one step of one rank that their GEMMs read wrongly."""
    kinds = view.judged(_kinds, limit.destroyed_gain, limit.destroyed_sqnr_db)
    hit = kinds != 0
    if not hit.any():
        return []
    wrong, rescaled = (kinds & _WRONG) != 0, (kinds & _RESCALED) != 0
    at = view.in_flow(hit)
    first = int(at[0])
    facts = view.facts(first)
    evidence = []
    for name in QUANTISER_FAULTS if wrong[first] else ():
        if count := int(view.raw(name)[first]):
            evidence.append(Evidence(name, count, 0, UNITS[name], view.step))
    if wrong[first]:
        tiles = int(view.raw("num_checked_tiles")[first])
        evidence.append(Evidence("num_checked_tiles", tiles, None, "tiles", view.step))
    if rescaled[first]:
        error = float(gain.of_view(view)[0][first])
        evidence.append(Evidence("gain_error", round(error, 4), f"±{limit.destroyed_gain:g}", "share", view.step))
    db = float(tile_sqnr_db(view)[first]) if view.has(Measured.ENERGIES)[first] else np.nan
    if np.isfinite(db):
        evidence.append(Evidence("tile_sqnr_db", round(db, 2), "28 or more", "dB", view.step))
    if len(at) > 1:
        evidence.append(Evidence("wrong_sites", len(at), 0, "sites", view.step))
    found = [
        Finding(
            mode="quantiser-fault",
            severity="critical",
            step=view.step,
            rank=view.rank,
            site=facts.id,
            tile=view.tile("fault_tile", first) if wrong[first] else view.tile("noise_tile", first),
            element=None,
            evidence=tuple(evidence),
            verdict="fp8",
            rank_in_flow=int(view.flow[first]),
            extra={
                "sites": view.site_ids(at),
                "num_sites": len(at),
                "operands": view.operands(at),
                "direction": facts.direction,
                "sampled": "num_checked_tiles" if wrong[first] else ENERGIES,
                "not_before": 0,  # it is looked at in turn: since when it has been so is not known
                **(experts.checked(view, CHECKED_EXPERT, facts) if wrong[first] else {}),
            },
        )
    ]
    return [fault_why.told(f, fault_why.of(view, facts)) for f in found]


def _kinds(view: StepView, gain_limit: float, limit_db: float) -> npt.NDArray[np.uint8]:
    """What is wrong with each record, as bits. [n]"""
    checked = view.has(Measured.QUANTISER)
    wrong = np.zeros(len(view), dtype=np.bool_)
    if checked.any():
        for name in QUANTISER_FAULTS:
            wrong |= checked & (view.raw(name) > 0)
    wrong &= ~(view.has(Measured.RATIO) & (view.raw("num_off_scale_tiles") > 0))
    judged = _judged(view)
    if not judged.any():
        return np.asarray(wrong * _WRONG, dtype=np.uint8)
    intact = judged & (view.raw("num_off_scale_tiles") == 0)
    rescaled, larger = gain.rescaled(view, gain_limit)
    rescaled = (intact & rescaled) | (judged & larger)
    destroyed = intact & _destroyed(view, limit_db)
    return np.asarray(wrong * _WRONG | rescaled * _RESCALED | destroyed * _DESTROYED, dtype=np.uint8)


def _destroyed(view: StepView, limit_db: float) -> Mask:
    """Records of which less than half of the energy is left, in the mean of tiles that all have a scale. [n]"""
    with np.errstate(invalid="ignore"):
        return np.asarray((tile_sqnr_db(view) < limit_db) & (view.raw("amax_min_nonzero") > _LEAST_AMAX))


def _judged(view: StepView) -> Mask:
    """Records with energies, and nothing in the operand that says why they should be off. [n]"""
    table, row = view.columns.table, view.row
    judged: Mask = view.has(Measured.ENERGIES | Measured.AMAX) & (view.role != OUTPUT) & table.current_scaling[row]
    if not judged.any():
        return judged
    judged &= ~view.nonfinite & (view.raw("num_eps_tiles") == 0)
    return np.asarray(judged & (view.raw("amax_max") > _LEAST_AMAX))
