"""Tiles that are nothing beside the largest may lose all of that: of an operand that is well as a whole it is information."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from detect.healthy_run import Run
from detect.play import play
from detect.scenarios import Case
from detect.single_steps import DOWN, detect, evidence, modes
from detect.trace import Trace, healthy

from fp8watch_agent.histogram_code import encode_histogram
from fp8watch_agent.record import AMAX_BUCKET_OFFSET, ROW, Measured
from fp8watch_server.incidents.explain import explain

STEPS = range(60, 90)


def with_faint(rows: np.ndarray, tiles: float, elements: float = 0.0) -> None:
    """Of each row so many tiles and elements are nothing beside the largest, as shares; all others are as large as it."""
    num = rows["num_tiles"] - rows["num_zero_tiles"]
    bucket = np.floor(np.log2(rows["amax_max"] / 1.75)).astype(int) + AMAX_BUCKET_OFFSET
    rows["amax_hist"] = 0
    rows["amax_hist"][..., 0] = rows["num_zero_tiles"]
    rows["amax_hist"][..., 1] = low = np.rint(tiles * num).astype(int)
    np.put_along_axis(rows["amax_hist"], bucket[..., None], (num - low)[..., None], -1)
    rows["depth_hist"] = 0
    rows["depth_hist"][..., -1] = deep = np.rint(elements * rows["num_nonzero"]).astype(int)
    rows["depth_hist"][..., 2] = rows["num_nonzero"] - deep
    rows["measured"] |= int(Measured.DEPTH)


def faded(
    run: Run,
    *,
    octaves: float,
    whole_db: float,
    tile_db: float = 20.6,
    underflow: float = 0.6,
    tiles: float = 0.008,
    elements: float = 0.55,
):
    """A change of rows: as waves of distances are, which decay without end."""
    i = run.index(DOWN, "input")

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["amax_min_nonzero"][i] = rows["amax_max"][i] * 2.0**-octaves
        rows["tile_noise_ratio_sum"][i] = (rows["num_tiles"][i] - rows["num_zero_tiles"][i]) * 10 ** (-tile_db / 10)
        rows["noise_energy"][i] = rows["signal_energy"][i] * 10 ** (-whole_db / 10)
        rows["num_underflow"][i] = int(underflow * rows["num_nonzero"][i])
        with_faint(rows[i : i + 1], tiles, elements)

    return change


def test_faint_tiles_of_an_operand_that_is_well_are_information() -> None:
    run = Run()
    found = detect(run, faded(run, octaves=90, whole_db=34.1), STEPS)
    assert modes(found) == {"chronic-quantization-noise"}
    assert {f.severity for f in found} == {"info"}
    assert evidence(found[0])["sqnr_db"] == pytest.approx(34.1, abs=0.01)
    said = explain(found[0], run.facts)
    assert said.title.startswith(f"Quantisation noise beside faint tiles in {DOWN} input")
    assert "The operand as a whole is at 34.1 dB. About 0.8 % of its tiles are 2^30 times smaller" in said.cause
    assert "about 54 % of its elements are 2^30 times smaller than the largest of their tile, or more." in said.cause
    assert len(said.fix) == 1


def test_an_operand_with_one_scale_has_no_tiles_that_are_faint_and_elements_that_are() -> None:
    t = healthy(3, 120, recipe="delayed")
    where = t.mask(DOWN, "input")
    t.columns["num_underflow"][:, where] = t.columns["num_nonzero"][:, where] * 6 // 10
    give_histograms(t, where, tiles=0.0)
    t.columns["signal_energy"] = np.full(t.columns["amax_max"].shape, 1.0)
    t.columns["noise_energy"] = np.full(t.columns["amax_max"].shape, 10**-3.4)
    found = [f for f in play(Case([t], 0)) if f.mode == "chronic-quantization-noise"]
    assert {f.severity for f in found} == {"info"}
    said = explain(found[0], t.facts)
    assert said.title.startswith(f"Quantisation noise beside faint elements in {DOWN} input")
    assert "The operand as a whole is at 34 dB. About 54 % of its elements are 2^30 times smaller" in said.cause


@pytest.mark.parametrize(
    "how",
    [
        {"octaves": 12, "tiles": 0.0}, {"whole_db": 20.0}, {"tiles": 0.004}, {"tiles": 0.0}, {"elements": 0.4}, {"underflow": 0.7},
    ],
    ids=["small-tokens", "noisy-as-a-whole", "too-few-tiles", "no-tile-counted", "too-few-elements", "more-flushed"],
)  # fmt: skip
def test_what_else_is_lost_is_a_warning_as_ever(how: dict[str, float]) -> None:
    run = Run()
    found = detect(run, faded(run, **{"octaves": 90, "whole_db": 34.1} | how), STEPS)
    assert modes(found) == {"chronic-quantization-noise"}
    assert {f.severity for f in found} == {"warning"}


@pytest.mark.parametrize(("tile_db", "severity"), [(32.9, "info"), (20.0, "warning")])
def test_across_them_the_same_elements_become_zero_in_tiles_that_are_well(tile_db: float, severity: str) -> None:
    t = healthy(3, 120)
    along, across = (t.mask(DOWN, "input", direction) for direction in ("rowwise", "columnwise"))
    assert along.any()
    assert across.any()
    t.columns["amax_min_nonzero"][:, along] = t.columns["amax_max"][:, along] * 2.0**-90
    for sites, db in ((along, 20.6), (across, tile_db)):
        t.set_sqnr(sites, np.full(120, db))
        t.columns["num_underflow"][:, sites] = t.columns["num_nonzero"][:, sites] * 6 // 10
    give_histograms(t, along)
    t.columns["signal_energy"] = np.full(t.columns["amax_max"].shape, 1.0)
    t.columns["noise_energy"] = np.full(t.columns["amax_max"].shape, 10**-3.4)
    found = [f for f in play(Case([t], 0)) if f.mode == "chronic-quantization-noise"]
    assert {f.severity for f in found} == {severity}


def give_histograms(t: Trace, sites: np.ndarray, tiles: float = 0.008) -> None:
    """Such tiles and elements to these sites of a trace."""
    names = ("num_tiles", "num_zero_tiles", "num_nonzero", "amax_max", "measured")
    rows = np.zeros((t.num_steps, int(sites.sum())), dtype=ROW)
    for name in names:
        rows[name] = t.columns[name][:, sites]
    with_faint(rows, tiles, 0.55)
    for name in ("amax_hist", "depth_hist"):
        t.columns[name] = np.zeros((*t.columns["amax_max"].shape, rows[name].shape[-1]), dtype=np.uint8)
        t.columns[name][:, sites] = encode_histogram(rows[name])
    t.columns["measured"] = t.columns["measured"] | int(Measured.DEPTH)


def test_a_gradient_with_faint_tokens_is_excused_nothing() -> None:
    t = healthy(3, 120)
    gradient = t.mask(DOWN, "grad_output")
    t.columns["amax_min_nonzero"][:, gradient] = t.columns["amax_max"][:, gradient] * 2.0**-60
    t.set_sqnr(gradient, np.full(120, 20.6))
    give_histograms(t, gradient)
    t.columns["signal_energy"] = np.full(t.columns["amax_max"].shape, 1.0)
    t.columns["noise_energy"] = np.full(t.columns["amax_max"].shape, 10**-3.4)
    found = [f for f in play(Case([t], 0)) if f.mode == "chronic-quantization-noise"]
    assert {f.severity for f in found} == {"warning"}


def test_another_operand_that_is_noisy_is_told_before_the_faint_one() -> None:
    run = Run()
    faint, other = faded(run, octaves=90, whole_db=34.1), run.index("layers.0.mlp.gate_proj", "input")

    def both(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        faint(rows, s, step)
        rows["tile_noise_ratio_sum"][other] = rows["num_tiles"][other] * 10**-2.0

    found = [f for f in detect(run, both, STEPS) if f.severity != "info"]
    assert found
    assert run.facts[found[-1].site or 0].module == "layers.0.mlp.gate_proj"


@pytest.mark.parametrize(("back", "found"), [(-60.0, False), (-93.0, True)], ids=["by-chance", "dying"])
def test_a_smallest_tile_that_comes_back_by_chance_is_not_dying(back: float, found: bool) -> None:
    t = healthy(3, 120)
    where = t.mask(DOWN, "input")  # tiles along channels and across them
    low = np.where(np.arange(120) % 3 == 0, back, -95.0)
    t.columns["amax_min_nonzero"][:, where] = np.exp2(low)[:, None]
    assert ("dying-tile" in {f.mode for f in play(Case([t], 0))}) is found


@pytest.mark.parametrize(("back", "found"), [(6.5, False), (0.5, True)], ids=["by-chance", "dying"])
def test_a_smallest_tile_that_falls_and_is_another_then_is_not_dying(back: float, found: bool) -> None:
    """Squared behind a ReLU: a tile fades, is zero, and the next smallest is an ordinary one."""
    t = healthy(3, 120)
    where = t.mask(DOWN, "input")
    low = np.full(120, -7.0)
    low[80:100] = -7.0 - 0.9 * np.arange(20)
    low[90:100] += back
    low[100:] = low[99] + back / 2
    t.columns["amax_min_nonzero"][:, where] = np.exp2(low)[:, None]
    assert ("dying-tile" in {f.mode for f in play(Case([t], 0))}) is found


@pytest.mark.parametrize("goes_on", [False, True], ids=["settles", "goes-on"])
def test_gradients_that_settle_behind_a_change_of_the_data_are_not_dying(goes_on: bool) -> None:
    t = healthy(3, 120)
    where, since = t.mask(DOWN, "input"), np.clip(np.arange(120) - 80, 0, None)
    low = -16.0 - (since * 0.7 if goes_on else 12.0 * (1 - np.exp(-since / 4.0)))
    t.columns["amax_min_nonzero"][:, where] = np.exp2(low)[:, None]
    assert ("dying-tile" in {f.mode for f in play(Case([t], 0))}) is goes_on


def test_where_nothing_is_quantised_the_verdict_says_so() -> None:
    run = Run()
    found = detect(run, faded(run, octaves=90, whole_db=34.1), STEPS)
    observed = {site: replace(facts, recipe="observe") for site, facts in run.facts.items()}
    assert explain(found[0], run.facts).cause.endswith("Verdict: FP8. A BF16 run would not do this here.")
    said = explain(found[0], observed).cause
    assert said.endswith("Verdict: FP8. This GEMM computes as before: it is what the recipe would do to it.")
