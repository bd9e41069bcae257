"""What a GEMM made of healthy operands: modes 16 (accumulator-precision) and 19 (kernel-output-fault).

Shapes:     StepView -> records whose GEMM is at fault; at most one finding a mode
Thread:     detect worker

The evidence is sampled: the output of a site's GEMM on some rows against a shadow in high precision (`gemm_error`,
`gemm_gain_*`), and its non-finite values (`output_num_nonfinite`); or a probe on what a Linear returned. It counts for
its module only: fprop reads input and weight, dgrad grad_output and weight, wgrad grad_output and input.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp8watch_agent.experts import CHECKED_PRODUCT
from fp8watch_agent.nonfinite_names import NONFINITE_GRADIENT, NONFINITE_INPUT
from fp8watch_agent.record import Measured
from fp8watch_server.detect.families import experts, fault_why
from fp8watch_server.detect.families.invariant import tile_sqnr_db
from fp8watch_server.detect.finding import Evidence, Finding, Severity
from fp8watch_server.detect.limits import Limits
from fp8watch_server.detect.step_view import GRAD_OUTPUT, INPUT, OUTPUT, WEIGHT, Mask, StepView

READS = {"fprop": (INPUT, WEIGHT), "dgrad": (GRAD_OUTPUT, WEIGHT), "wgrad": (GRAD_OUTPUT, INPUT)}
FACTOR_REST = 0.1
"""Of a gain's distance from 1: an error that is as large, but for this share, is the gain's, and nothing else is wrong."""


def faulty_outputs(view: StepView) -> Mask:
    """Records whose GEMM returned a NaN or an Inf although its operands are finite, and what it reads of them is. [n]"""
    out = np.zeros(len(view), dtype=np.bool_)
    hit = np.flatnonzero(view.judged(_not_finite))
    if len(hit):
        broken = view.nonfinite | (view.has(Measured.QUANTISER) & (view.raw("num_nan_codes") > 0))
        for i in hit:
            made = view.facts(int(i)).gemm in READS and not _operands(view, int(i))[broken].any()
            out[i] = made and not num_entered(view, int(i))
    return out


def _not_finite(view: StepView) -> Mask:
    """Records whose GEMM, or whose probed module, put out something that is not finite. [n]"""
    return np.asarray((_nonfinite_outputs(view) > 0) | ((view.role == OUTPUT) & view.nonfinite))


def num_entered(view: StepView, i: int) -> int:
    """Elements that were not finite in the input of the Linear whose output record i is; 0 where nothing is known."""
    if view.role[i] != OUTPUT or view.facts(i).operand != "output":
        return 0
    num = view.logs().get(NONFINITE_INPUT + view.facts(i).module, 0.0)
    return int(num) if 0 < num < 1 << 53 else 0


def _nonfinite_outputs(view: StepView) -> npt.NDArray[np.int64]:
    """Elements of each record's GEMM output that are not finite, of a look at all of it or at sampled rows. [n]"""
    sampled = np.where(view.has(Measured.GEMM), view.raw("output_num_nonfinite"), 0)
    looked = np.where(view.has(Measured.OUTPUTS), view.raw("num_nonfinite_outputs"), 0)
    return np.asarray(np.maximum(sampled, looked), dtype=np.int64)


def _operands(view: StepView, i: int) -> Mask:
    """Records of the operands that the GEMM of record i reads. [n]"""
    facts = view.facts(i)
    table = view.columns.table
    same = table.module[view.row] == table.module[view.row[i]]
    return np.asarray(same & np.isin(view.role, READS[facts.gemm]))


def finding(view: StepView, at: npt.NDArray[np.int64], broken: npt.NDArray[np.int64]) -> Finding:
    """Mode 19 for records `at`, and `broken` behind them, in the order of execution."""
    first = int(at[0])
    facts = view.facts(first)
    probe = facts.is_probe
    count = int(view.raw("num_nan")[first] + view.raw("num_inf")[first]) if probe else 0
    count = count or int(_nonfinite_outputs(view)[first])
    operands = np.flatnonzero(_operands(view, first))
    evidence = [
        Evidence("output_num_nonfinite", count, 0, "elements", view.step),
        Evidence("nonfinite_operands", 0, 0, f"of {len(operands)} operands", view.step),
    ]
    tokens = _tokens(view, operands)
    if tokens is not None:
        evidence.append(Evidence("tokens", tokens, None, "tokens", None))
    loss = view.scalar("loss")
    if loss is not None:
        evidence.append(Evidence("loss", loss, None, "", view.step))
    if len(broken):
        evidence.append(Evidence("nonfinite_sites", len(broken), 0, "sites", view.step))
    element, tile = view.element(first) if probe else (None, None)
    return Finding(
        mode="kernel-output-fault",
        severity="critical",
        step=view.step,
        rank=view.rank,
        site=facts.id,
        tile=tile,
        element=element,
        evidence=tuple(evidence),
        verdict="shared" if _all_counted(view, first, operands) else "unknown",
        rank_in_flow=int(view.flow[first]),
        extra={
            "sites": view.site_ids(np.concatenate([at, broken])),
            "num_sites": len(at) + len(broken),
            "operands": [],
            "tokens": tokens,
            "gain": None,
            "operands_seen": _all_counted(view, first, operands),
            **_which_gemm(view, first, behind=broken),
        },
    )


def _which_gemm(view: StepView, i: int, behind: npt.NDArray[np.int64]) -> dict[str, str | None]:
    """Where one site feeds dgrad and wgrad, which of them it was: `gemm`, None where nothing tells; nothing of other sites.

    A dgrad hands on what it made, so that gradients behind it are not finite; a wgrad makes the gradient of its weight.
    """
    facts = view.facts(i)
    if facts.operand != "grad_output" or facts.direction != "rowwise" or view.columns.table.across[view.row[i]] >= 0:
        return {}
    if np.any(view.role[behind] == GRAD_OUTPUT):
        return {"gemm": "dgrad"}
    return {"gemm": "wgrad" if view.logs().get(f"{NONFINITE_GRADIENT}{facts.module}.weight") else None}


def _all_counted(view: StepView, i: int, operands: npt.NDArray[np.int64]) -> bool:
    """Whether both roles that the GEMM of record i reads were counted for what is not finite."""
    counted = operands[view.has(Measured.COUNTS)[operands]]
    return set(READS[view.facts(i).gemm]) <= {int(r) for r in view.role[counted]}


def _tokens(view: StepView, operands: npt.NDArray[np.int64]) -> int | None:
    """Rows that went into the GEMM: elements over columns of its input or gradient."""
    for i in operands:
        facts = view.facts(int(i))
        if facts.operand != "weight" and facts.direction == "rowwise" and view.has(Measured.COUNTS)[i]:
            return int(view.raw("num_elements")[i]) // max(facts.shape[1], 1)
    return None


def wrong_outputs(view: StepView, limit: Limits) -> list[Finding]:
    """Modes 16 and 19 by the shadow: outputs that are finite, and not what the operands give.

    A gain is a scale that is wrong, an error beyond what any accumulator loses is an output that is not the product: rows
    that nobody wrote, or operands read in another layout or format. What is left is the accumulator's.
    """
    has = view.has(Measured.GEMM)
    if not has.any():
        return []
    error, low, high = (view.values(name) for name in ("gemm_error", "gemm_gain_min", "gemm_gain_max"))
    with np.errstate(invalid="ignore"):
        scaled = has & ((np.abs(high - 1) > limit.gemm_gain) | (np.abs(low - 1) > limit.gemm_gain)) & (high != 0)
        scaled &= np.isfinite(low) & np.isfinite(high)
        scaled |= has & (error > limit.gemm_wrong)
        noisy = has & ~scaled & (error > limit.gemm_error)
    found = []
    if scaled.any():
        found.append(_wrong(view, view.in_flow(scaled), "kernel-output-fault", "critical"))
    if noisy.any():
        found.append(_wrong(view, view.in_flow(noisy), "accumulator-precision", "warning"))
    return found


def _wrong(view: StepView, at: npt.NDArray[np.int64], mode: str, severity: Severity) -> Finding:
    first = int(at[0])
    facts = view.facts(first)
    gain = float(view.raw("gemm_gain_min")[first])
    other = float(view.raw("gemm_gain_max")[first])
    gain = gain if abs(np.log2(max(gain, 1e-30))) >= abs(np.log2(max(other, 1e-30))) else other
    error = float(view.raw("gemm_error")[first])
    is_factor = abs(error - abs(gain - 1)) <= FACTOR_REST * abs(gain - 1)
    evidence = [
        Evidence("gemm_error", float(f"{view.raw('gemm_error')[first]:.4g}"), "0.002 or less", "ratio", view.step)
    ]
    if mode == "kernel-output-fault":
        evidence.insert(0, Evidence("gemm_gain", float(f"{gain:.6g}"), 1, "ratio", view.step))
    if mode == "accumulator-precision":
        db = tile_sqnr_db(view)[_operands(view, first)]
        if np.isfinite(db).any():
            evidence.append(Evidence("operand_sqnr_db", round(float(np.nanmin(db)), 2), "28 or more", "dB", view.step))
    contraction = {"fprop": facts.shape[1], "dgrad": facts.shape[1], "wgrad": facts.shape[0]}.get(facts.gemm, 0)
    evidence.append(Evidence("contraction", contraction, None, "elements", None))
    if len(at) > 1:
        evidence.append(Evidence("wrong_gemms", len(at), 0, "GEMMs", view.step))
    wrong = {view.facts(int(i)).gemm for i in at}
    shadowed = np.flatnonzero(
        view.has(Measured.GEMM) & (view.raw("gemm_gain_max") > 0)
    )  # only what was looked at is right
    beside = {view.facts(int(i)).gemm for i in shadowed if view.facts(int(i)).module == facts.module}
    healthy = [g for g in ("fprop", "dgrad", "wgrad") if g in beside - wrong]
    found = Finding(
        mode=mode,
        severity=severity,
        step=view.step,
        rank=view.rank,
        site=facts.id,
        tile=None,
        element=None,
        evidence=tuple(evidence),
        verdict="fp8",
        rank_in_flow=int(view.flow[first]),
        extra={
            "sites": view.site_ids(at),
            "num_sites": len(at),
            "operands": [],
            "gain": gain if mode == "kernel-output-fault" and is_factor else None,
            "wrong_output": mode == "kernel-output-fault" and not is_factor,
            "not_before": 0,  # GEMMs are looked at in turn: since when it has been so is not known
            "gemms": list(dict.fromkeys(view.facts(int(i)).gemm for i in at)),
            "right_gemms": healthy,
            "tokens": None,
            "sampled": "gemm_error",
            **experts.checked(view, CHECKED_PRODUCT, facts),
        },
    )
    return fault_why.told_of_product(found, fault_why.of(view, facts), view.columns.table, facts)
