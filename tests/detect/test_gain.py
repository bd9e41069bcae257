"""A quantiser that changes the size of its operand: a lasting bias is a warning, more than rounding can do is a page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.healthy_run import Run
from detect.single_steps import DOWN, detect, evidence, modes

from fp8watch_agent.record import Measured
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.families import gain
from fp8watch_server.detect.finding import SiteFacts

STEPS = range(60, 90)


def biased(run: Run, operand: str, error: float, *, owner: float = 1e-5, from_step: int = 0, known: bool = True):
    """A change of rows: one site's gain is off, and its largest element owns a share of its energy."""
    i = run.index(DOWN, operand)

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        held = rows["measured"][i] & int(Measured.ENERGIES)
        if not held:
            return
        signal = float(rows["amax_max"][i]) ** 2 / owner
        tiles = rows["num_tiles"][i] - rows["num_zero_tiles"][i]
        rows["signal_energy"][i] = signal
        rows["noise_energy"][i] = signal * (rows["tile_noise_ratio_sum"][i] / tiles + error**2)
        if known:
            rows["measured"][i] |= int(Measured.GAIN)
            rows["gain_energy"][i] = signal * (error if step >= from_step else 0.001)

    return change


@pytest.mark.parametrize("operand", ["input", "weight"])
@pytest.mark.parametrize("error", [-0.012, 0.008])
def test_a_lasting_bias_is_a_warning(operand: str, error: float) -> None:
    run = Run()
    found = detect(run, biased(run, operand, error), STEPS)
    assert modes(found) == {"chronic-quantization-noise"}
    first = found[0]
    assert first.severity == "warning"
    assert run.facts[first.site or 0].operand == operand
    assert first.extra["by"] == "gain"
    assert evidence(first)["gain_error"] == pytest.approx(error)
    assert first.step >= STEPS.start + 7  # eight of ten


@pytest.mark.parametrize(
    ("operand", "error", "owner"),
    [("input", 0.003, 1e-5), ("grad_output", 0.03, 1e-5), ("input", 0.03, 0.05), ("input", 0.058, 1.0)],
    ids=["within", "of a gradient", "of a few large elements", "of one element"],
)
def test_what_is_healthy_is_not_told(operand: str, error: float, owner: float) -> None:
    run = Run()
    assert detect(run, biased(run, operand, error, owner=owner), STEPS) == []


def test_a_bias_that_nobody_measured_is_not_told() -> None:
    run = Run()
    assert detect(run, biased(run, "input", 0.3, known=False), STEPS) == []


@pytest.mark.parametrize(("operand", "error"), [("input", 0.31), ("weight", -0.3), ("grad_output", -0.08)])
def test_more_than_rounding_can_do_is_a_fault_of_the_quantiser_at_once(operand: str, error: float) -> None:
    run = Run()
    found = detect(run, biased(run, operand, error, from_step=65), range(60, 68))
    first = found[0]
    assert (first.mode, first.severity, first.step) == ("quantiser-fault", "critical", 65)
    assert run.facts[first.site or 0].operand == operand
    assert evidence(first)["gain_error"] == pytest.approx(error)


def test_e5m2_has_twice_the_room() -> None:
    run = Run()
    i = run.index(DOWN, "input")
    run.sites[i] = replace(run.sites[i], format="E5M2")
    facts = dict(run.facts)
    facts[run.sites[i].id] = replace(facts[run.sites[i].id], format="E5M2")
    engine, found = DetectionEngine(facts), []
    for first in range(60, 90, 3):
        found += engine.observe(run.batch(range(first, first + 3), biased(run, "input", 0.008)))
    assert modes(found) == set()


def of_columns(run: Run, operand: str, columns: int) -> dict[int, SiteFacts]:
    """Facts of a run in which one operand has so many columns."""
    i = run.index(DOWN, operand)
    facts = dict(run.facts)
    facts[run.sites[i].id] = replace(facts[run.sites[i].id], shape=(256, columns))
    return facts


@pytest.mark.parametrize(
    ("operand", "columns", "error", "told"),
    [
        ("input", 64, -0.0058, False),  # a Whisper of 64 channels over padded frames
        ("input", 64, 0.011, False),
        ("input", 64, -0.014, True),
        ("input", 16, -0.017, True),  # truncation is at −2.5 % and beyond, however few columns
        ("input", 1024, -0.0058, True),
        ("weight", 64, -0.0058, True),
    ],
)
def test_rows_that_are_alike_are_rounded_alike(operand: str, columns: int, error: float, told: bool) -> None:
    run = Run()
    engine, found = DetectionEngine(of_columns(run, operand, columns)), []
    for first in range(60, 90, 3):
        found += engine.observe(run.batch(range(first, first + 3), biased(run, operand, error)))
    assert (modes(found) == {"chronic-quantization-noise"}) is told
    if told and operand == "input" and columns == 16:
        assert next(e.baseline for e in found[0].evidence if e.field == "gain_error") == "±0.015"


def of_one_size(run: Run, operand: str, error: float, size: float, *, apart: float = 1.0, from_step: int = 0):
    """A change of rows: that bias, of an operand whose energy lies at `size` of amax² in the mean, in tiles up to `apart` times apart."""
    i, change = run.index(DOWN, operand), biased(run, operand, error, from_step=from_step)

    def both(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        change(rows, s, step)
        rows["measured"][i] |= int(Measured.MOMENTS)
        rows["moment2"][i] = rows["num_elements"][i] * 0.2
        rows["moment4"][i] = size * rows["moment2"][i]
        rows["amax_min_nonzero"][i] = rows["amax_max"][i] / apart
        rows["scale_inv_min"][i] = rows["scale_inv_max"][i]

    return both


@pytest.mark.parametrize(
    ("operand", "error", "size", "apart", "told"),
    [
        ("weight", -0.0137, 0.81, 1.0, False),  # of k learning rates, after k steps of Adam
        ("weight", -0.0219, 0.84, 1.0, False),
        ("weight", 0.008, 0.60, 1.0, True),  # uniform
        ("weight", -0.0437, 0.81, 1.0, True),  # truncation
        ("weight", -0.0437, 0.40, 1.0, True),
        ("input", 0.0137, 0.84, 1.0, False),  # 512 tiles, all of one size
        ("input", 0.0137, 0.84, 1.5, True),  # an owner in each tile
        ("weight", 0.0137, 0.84, 1.5, False),  # four tiles are few
    ],
)
def test_values_of_one_size_are_rounded_alike(
    operand: str, error: float, size: float, apart: float, told: bool
) -> None:
    run = Run()
    found = detect(run, of_one_size(run, operand, error, size, apart=apart), STEPS)
    assert (modes(found) == {"chronic-quantization-noise"}) is told
    assert bool(found) is told


@pytest.mark.parametrize(("error", "size", "told"), [(0.055, 1.0, False), (0.065, 1.0, True), (0.055, 0.6, True)])
def test_no_rounding_is_further_off_than_half_a_step(error: float, size: float, told: bool) -> None:
    run = Run()
    found = detect(run, of_one_size(run, "weight", error, size, from_step=65), range(60, 68))
    assert ("quantiser-fault" in modes(found)) is told


def test_the_room_of_values_of_one_size_holds_for_codes_of_both_formats() -> None:
    """Clusters of many widths, at many places between two codes, beside many values that are nothing: none is further off."""
    rng = np.random.default_rng(0)
    for bits, e5m2 in ((3, False), (2, True)):
        for _ in range(400):
            width, spread = 10 ** rng.uniform(-3, -0.5), rng.normal(size=4096).clip(-4, 4) / 4
            x = (1 + width * (spread if rng.random() < 0.5 else rng.uniform(-1, 1, 4096))) * 2 ** rng.uniform()
            x = np.where(rng.random(4096) < rng.uniform(0.1, 1), x, x / 256)
            step = np.exp2(np.floor(np.log2(x)) - bits)
            error = float((x * (np.round(x / step) * step - x)).sum() / (x**2).sum())
            u = (x / x.max()) ** 2
            fields = {"moment2": u.sum(), "moment4": (u**2).sum(), "num_tiles": 1.0, "num_zero_tiles": 0.0}
            fields |= {"amax_max": 1.0, "amax_min_nonzero": 1.0}
            room = float(gain.of_one_size(lambda name, of=fields: np.array([of[name]]), np.array([e5m2]))[0])
            assert room == 0.0 or abs(error) <= max(room, 0.005), (width, error, room)
    assert float(gain.of_one_size(lambda name: np.array([np.nan]), np.array([False]))[0]) == 0.0


def off_scale(change, ratio: float, index: int, from_step: int):
    """The same, with a scale beside the codes that is not the amax's."""

    def both(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        change(rows, s, step)
        if step >= from_step:
            rows["num_off_scale_tiles"][index] = rows["num_tiles"][index]
            rows["scale_ratio_min"][index] = rows["scale_ratio_max"][index] = ratio
            rows["tile_noise_ratio_sum"][index] = 0.7 * rows["num_tiles"][index]  # 1.5 dB

    return both


def test_scales_rounded_up_beside_codes_that_were_not_are_the_quantisers() -> None:
    """transformers 47030: what comes out is larger, which neither a clip nor an underflow does."""
    run = Run()
    change = off_scale(biased(run, "input", 0.31, from_step=65), 0.4, run.index(DOWN, "input"), 65)
    found = detect(run, change, range(60, 68))
    assert {f.mode for f in found if f.step == 65} == {"quantiser-fault"}
    assert (found[0].severity, found[0].step) == ("critical", 65)


def test_an_operand_under_three_db_is_critical_whatever_explains_it() -> None:
    run = Run()
    change = off_scale(biased(run, "input", -0.3, from_step=65), 1.3, run.index(DOWN, "input"), 65)
    found = detect(run, change, range(60, 68))
    assert (found[0].mode, found[0].severity, found[0].step) == ("scale-rounding", "critical", 65)
