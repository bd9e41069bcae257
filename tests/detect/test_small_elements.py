"""Small elements that become 0 beside many that are not are information; where an outlier owns the scale they are a warning."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect.light import lightly
from detect.play import play
from detect.scenarios import DOWN, Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain

STEPS, MODE = 120, "chronic-quantization-noise"


def after_gelu(operand: str = "input", recipe: str = "blockwise", share: float = 0.12) -> tuple[Trace, np.ndarray]:
    """A run in which so many elements of one operand become 0, and the sites: as behind a GELU, amax is five times the root mean
    square and the kurtosis is six."""
    t = healthy(3, STEPS, recipe=recipe, power_2_scale=recipe == "blockwise")
    where, c = t.mask(DOWN, operand), t.columns
    c["num_underflow"][:, where] = (c["num_nonzero"][:, where] * share).astype(np.int64)
    c["signal_energy"] = (c["amax_max"] / 5.0) ** 2 * c["num_elements"]
    c["noise_energy"] = c["signal_energy"] * 10**-3.15
    c["moment4"][:, where] = 6.0 * c["moment2"][:, where] ** 2 / c["num_nonzero"][:, where]
    t.set_sqnr(where, np.full(STEPS, 31.5))
    return t, where


def found(t: Trace) -> list[Finding]:
    return [f for f in play(Case([t], 0)) if f.mode == MODE]


@pytest.mark.parametrize("every", [1, 16])
def test_what_an_activation_leaves_of_negative_values_is_information(every: int) -> None:
    t, _ = after_gelu()
    engine = DetectionEngine(t.facts)
    got = [f for b in lightly(t.batches(), every) for f in engine.observe(b) if f.mode == MODE]
    assert {f.severity for f in got} == {"info"}
    said, module = explain(got[0], t.facts), t.facts[got[0].site or 0].module
    assert said.title == f"Small elements of {module} input (fprop) become 0: 0.12 of all"
    assert "those that are 2^18 times smaller than the largest of their tile, or more" in said.cause
    assert "amax is 5 times the root mean square, the kurtosis is 6, the tile SQNR is 31.5 dB" in said.cause
    assert [f["text"].startswith("Nothing need change.") for f in said.fix] == [True]


def owned_by_one(t: Trace, where: np.ndarray) -> None:
    """Each tile has one giant, which has all of its energy."""
    c = t.columns
    c["signal_energy"][:, where] = c["amax_max"][:, where] ** 2 * c["num_tiles"][:, where]
    c["noise_energy"][:, where] = c["signal_energy"][:, where] * 10**-3.15
    c["moment4"][:, where] *= 128 / 6


def owned_in_some_tiles(t: Trace, where: np.ndarray) -> None:
    """A quarter of the tokens has the giants: moments, which are those of each tile, do not show it."""
    c = t.columns
    c["signal_energy"][:, where] = c["amax_max"][:, where] ** 2 * c["num_tiles"][:, where] / 4
    c["noise_energy"][:, where] = c["signal_energy"][:, where] * 10**-3.15


def noisy_as_a_whole(t: Trace, where: np.ndarray) -> None:
    t.columns["noise_energy"][:, where] = t.columns["signal_energy"][:, where] * 10**-2.7


def noisy_tiles(t: Trace, where: np.ndarray) -> None:
    t.set_sqnr(where, np.full(STEPS, 26.0))


def clamped(t: Trace, where: np.ndarray) -> None:
    t.columns["num_eps_tiles"][:, where] = 1


def of_a_scale_that_nobody_measured(t: Trace, where: np.ndarray) -> None:
    t.columns["measured"][:, where] &= ~int(Measured.RATIO)


def without_moments(t: Trace, where: np.ndarray) -> None:
    t.columns["moment2"][:, where] = t.columns["moment4"][:, where] = 0


@pytest.mark.parametrize(
    "change",
    [
        owned_by_one,
        owned_in_some_tiles,
        noisy_as_a_whole,
        noisy_tiles,
        clamped,
        of_a_scale_that_nobody_measured,
        without_moments,
    ],
    ids=lambda change: change.__name__,
)
def test_what_else_becomes_zero_is_a_warning_as_ever(change: Callable[[Trace, np.ndarray], None]) -> None:
    t, where = after_gelu()
    change(t, where)
    assert "warning" in {f.severity for f in found(t)}


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_one_scale_for_the_whole_tensor_excuses_nothing(recipe: str) -> None:
    t, _ = after_gelu(recipe=recipe)
    assert {f.severity for f in found(t)} == {"warning"}


def test_a_weight_is_excused_nothing() -> None:
    t, _ = after_gelu("weight")
    assert {f.severity for f in found(t)} == {"warning"}


def test_another_operand_that_is_noisy_is_told_first() -> None:
    t, _ = after_gelu()
    other = t.mask("layers.0.mlp.gate_proj", "input")
    t.set_sqnr(other, np.full(STEPS, 20.0))
    got = found(t)
    assert got[-1].severity == "warning"
    assert t.facts[got[-1].site or 0].module == "layers.0.mlp.gate_proj"


def test_an_outlier_that_comes_to_own_the_tiles_is_told_from_its_sample_on() -> None:
    t, where = after_gelu()
    kept = {name: column[:60].copy() for name, column in t.columns.items()}
    owned_by_one(t, where)
    for name, column in kept.items():
        t.columns[name][:60] = column
    severities = {(f.step >= 60, f.severity) for f in found(t)}
    assert severities == {(False, "info"), (True, "warning")}
