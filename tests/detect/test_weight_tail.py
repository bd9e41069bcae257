"""A weight whose amax leaves the others behind has an outlier only if its tail got heavier: full samples say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.light import lightly
from detect.scenarios import DOWN, GATE
from detect.single_steps import evidence
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain

AT, STEPS, UNTIL = 120, 200, 70


def grown(amax: float, rms: float | None, kurtosis: float = 1.3) -> Trace:
    """A weight whose amax and root mean square gain so many octaves in 70 steps, and its kurtosis a factor.

    `rms` None: nothing of energies was measured, which this run has none of.
    """
    t = healthy(3, STEPS)
    one = t.mask(DOWN, "weight")
    share = np.clip((np.arange(STEPS) - AT) / UNTIL, 0, 1)
    c = t.columns
    energy = (c["amax_max"] / 4.2) ** 2 * c["num_elements"]
    c["signal_energy"] = energy if rms is not None else np.zeros_like(energy)
    c["signal_energy"][:, one] *= np.exp2(2 * (rms or 0.0) * share)[:, None]
    c["noise_energy"] = c["signal_energy"] * 10**-3.15
    t.grow(one, amax * share)
    t.set_kurtosis(one, kurtosis**share)
    return t


def found_in(t: Trace, every: int = 1) -> list[Finding]:
    engine = DetectionEngine(t.facts)
    return [f for b in lightly(t.batches(), every) for f in engine.observe(b) if f.mode == "outlier-growth"]


def incidents(t: Trace, every: int = 1) -> list[Folded]:
    return fold(found_in(t, every), t.facts)


@pytest.mark.parametrize("every", [1, 12])
@pytest.mark.parametrize(("amax", "rms"), [(1.2, 0.5), (1.3, 1.3), (2.4, 2.0)], ids=["amax-more", "as-one", "far"])
def test_a_weight_that_grows_without_a_tail_is_information(amax: float, rms: float, every: int) -> None:
    t = grown(amax, rms)
    [incident] = incidents(t, every)
    assert incident.severity == "info"
    said = explain(incident.named, t.facts)
    assert said.title.startswith(f"{DOWN} weight (fprop) grows away from the other weights: amax +")
    assert "As measured last no few elements stand apart in it: the root mean square grew by" in said.cause
    assert "a bell curve has 3" in said.cause
    assert said.fix[0]["text"].startswith("Nothing need change while its SQNR stays.")
    unmeasured = tuple(e for e in incident.named.evidence if e.field not in ("rms_growth", "kurtosis"))
    cause = explain(replace(incident.named, evidence=unmeasured), t.facts).cause
    assert "Its tail was not measured behind that." in cause
    assert "none" not in cause


@pytest.mark.parametrize("every", [1, 12])
@pytest.mark.parametrize(
    ("amax", "rms", "kurtosis"),
    [(1.3, 0.3, 8.0), (3.0, 1.9, 8.0), (2.6, 0.3, 1.3), (0.95, None, 1.3)],
    ids=["kurtosis", "a-row-owns-the-energy", "one-element", "not-measured"],
)
def test_a_tail_that_got_heavier_is_an_outlier(amax: float, rms: float | None, kurtosis: float, every: int) -> None:
    t = grown(amax, rms, kurtosis)
    warnings = [f for f in found_in(t, every) if f.severity == "warning"]
    assert warnings
    assert explain(warnings[0], t.facts).title.startswith(f"Outliers grow in {DOWN} weight (fprop): amax +")


def test_a_weight_that_grows_eight_times_as_large_as_one_is_a_warning() -> None:
    found = found_in(t := grown(5.0, 5.0))
    assert {f.severity for f in found} == {"info", "warning"}
    assert explain(found[-1], t.facts).title.startswith(f"{DOWN} weight (fprop) grows away from the other weights")


def test_an_outlier_is_told_before_a_weight_that_has_none() -> None:
    t = grown(1.6, 1.6)
    other = t.mask(GATE, "weight")
    t.grow(other, 1.6 * np.clip((np.arange(STEPS) - AT) / UNTIL, 0, 1))
    t.set_kurtosis(other, 8.0 ** np.clip((np.arange(STEPS) - AT) / UNTIL, 0, 1))
    warnings = [f for f in found_in(t) if f.severity != "info"]
    assert {t.facts[f.site or 0].module.rpartition("mlp.")[2] for f in warnings} == {"gate_proj"}


@pytest.mark.parametrize(("rms", "kurtosis"), [(0.3, 1.3), (0.3, 8.0), (None, 1.3)])
def test_both_ends_of_amax_are_as_far_apart_as_the_growth_that_is_told(rms: float | None, kurtosis: float) -> None:
    found = found_in(grown(1.3, rms, kurtosis))
    assert found
    for f in found:
        amax = next(e for e in f.evidence if e.field == "amax_max")
        assert np.log2(float(amax.value) / float(amax.baseline or 0)) == pytest.approx(
            evidence(f)["amax_growth"], abs=0.01
        )
        assert ("rms_growth" in evidence(f)) is (rms is not None)


def test_energies_that_no_sample_has_yet_excuse_nothing() -> None:
    t = grown(1.3, 1.3)
    t.columns["measured"][AT - 80 :] &= ~int(Measured.ENERGIES | Measured.MOMENTS)
    assert {f.severity for f in found_in(t)} == {"warning"}


def test_an_input_that_is_borne_keeps_no_weight_from_being_told() -> None:
    t = grown(5.0, 5.0)
    share, where = np.clip((np.arange(STEPS) - AT) / 12, 0, 1), t.mask(GATE, "input")
    t.grow(where, 4.0 * share)
    t.set_kurtosis(where, 16.0**share)
    found = found_in(t)
    told = {(t.facts[f.site or 0].operand, f.severity) for f in found if f.step == STEPS - 1}
    assert told == {("input", "info"), ("weight", "warning")}
