"""Each failure mode is named, at its place, and is not taken for its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from detect.healthy_run import Run
from detect.single_steps import DOWN, detect, evidence, modes

from fp8watch_agent.record import Measured, StepPresent, StepStatus
from fp8watch_server.incidents.explain import explain

NAN, INF = float("nan"), float("inf")


def put_inf(rows: np.ndarray, i: int, element: tuple[int, int] = (37, 200)) -> None:
    rows["num_inf"][i], rows["num_sentinel_tiles"][i], rows["amax_max"][i] = 1, 1, INF
    rows["first_nonfinite"][i] = (*element, 0)


def put_nan(rows: np.ndarray, mask: np.ndarray | int, element: tuple[int, int] = (5, 130)) -> None:
    rows["num_nan"][mask] = 7
    rows["first_nonfinite"][mask] = (*element, 0)


def put_degenerate(rows: np.ndarray, i: int) -> None:
    rows["scale_inv_min"][i], rows["num_off_scale_tiles"][i], rows["num_zero_tiles"][i] = 0.0, 3, 131
    rows["off_scale_tile"][i] = (0, 1)


def after(rows: np.ndarray, order: int) -> np.ndarray:
    return rows["order"] > order


def test_an_inf_with_a_finite_loss_is_laundered_and_its_tile_is_named() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 65:
            put_inf(rows, run.index(DOWN, "input"))

    [finding] = detect(run, change)
    assert (finding.mode, finding.severity, finding.step, finding.verdict) == ("inf-laundering", "critical", 65, "fp8")
    assert finding.site == run.sites[run.index(DOWN, "input")].id
    assert finding.element == (37, 200)
    assert finding.tile == (37, 1)
    assert evidence(finding)["num_inf"] == 1
    assert evidence(finding)["num_sentinel_tiles"] == 1


def test_the_first_in_execution_order_is_named_even_when_it_is_registered_later() -> None:
    run = Run()
    early, late = run.index("layers.0.mlp.up_proj", "input"), run.index(DOWN, "input")

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["order"][[early, late]] = rows["order"][[late, early]]  # it ran the other way round
        if step == 65:
            put_inf(rows, early)
            put_inf(rows, late)

    [finding] = detect(run, change)
    assert finding.site == run.sites[late].id
    assert set(finding.extra["sites"]) == {run.sites[early].id, run.sites[late].id}


def test_a_sentinel_tile_tells_of_an_inf_where_elements_were_not_counted() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["measured"] &= ~int(Measured.COUNTS)
        if step == 65:
            i = run.index(DOWN, "input")
            put_inf(rows, i)
            rows["num_inf"][i] = 0

    [finding] = detect(run, change)
    assert finding.mode == "inf-laundering"


def test_an_inf_without_any_loss_is_laundered_and_says_that_no_loss_was_seen() -> None:
    run = Run(with_loss=False)

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 65:
            put_inf(rows, run.index(DOWN, "input"))

    [finding] = detect(run, change)
    assert finding.mode == "inf-laundering"
    assert finding.extra["loss_seen"] is False


def test_an_inf_that_reaches_the_loss_is_not_laundered() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 65:
            put_inf(rows, run.index(DOWN, "input"))
            s["loss"] = NAN

    [finding] = detect(run, change)
    assert (finding.mode, finding.verdict) == ("nan-in-activation", "shared")


def test_a_loss_that_breaks_alone_is_the_loss_and_its_gradients_and_weights_are_its_consequence() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 65:
            s["loss"] = NAN
            put_nan(rows, run.roles == "grad_output")
        if step >= 66:
            put_nan(rows, slice(None))

    found = detect(run, change)
    assert modes(found) == {"nan-in-loss"}
    assert [f.step for f in found] == [65, 66, 67, 68, 69]
    assert [f.extra["consequence"] for f in found] == [False, True, True, True, True]
    assert found[0].site is None
    assert evidence(found[0])["nonfinite_gradients"] == 28


def test_a_degenerate_scale_owns_every_nan_behind_it() -> None:
    run = Run()
    i = run.index("layers.0.mlp.gate_proj", "input")

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 65:
            put_degenerate(rows, i)
            put_nan(rows, after(rows, run.sites[i].order))
            rows["num_nan"][run.roles == "weight"] = 0
            s["loss"] = NAN
        if step > 65:
            put_nan(rows, slice(None))
            put_degenerate(rows, i)
            s["loss"] = NAN

    found = detect(run, change)
    assert modes(found) == {"zero-tile-eps"}
    assert found[0].site == run.sites[i].id
    assert found[0].tile == (0, 1)
    assert evidence(found[0])["num_zero_tiles"] == 131
    assert [e.baseline for e in found[0].evidence if e.field == "num_zero_tiles"] == [0]
    assert all(f.extra["consequence"] for f in found[1:])


def test_a_degenerate_scale_behind_a_nan_is_the_nans_consequence() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 65:
            put_nan(rows, run.index("layers.0.mlp.up_proj", "input"))
            put_degenerate(rows, run.index(DOWN, "input"))
            s["loss"] = NAN

    [finding] = detect(run, change)
    assert finding.mode == "nan-in-activation"
    assert finding.site == run.sites[run.index("layers.0.mlp.up_proj", "input")].id


def test_weights_that_come_in_broken_are_named_as_such() -> None:
    run = Run()
    found = detect(run, lambda rows, s, step: put_nan(rows, slice(None)), range(3), per_batch=1)
    assert modes(found) == {"nan-in-activation"}
    assert found[0].extra["weight_born"] is True
    assert run.facts[found[0].site or 0].operand == "weight"


@pytest.mark.parametrize(("norm", "said"), [(61, True), (60, False), (None, False)])
def test_weights_that_break_behind_a_gradient_norm_that_was_not_finite_say_so(norm: int | None, said: bool) -> None:
    """One gradient is NaN, clipping makes all of them so, and the update all weights."""
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        s["grad_norm"] = NAN if step == norm else 1.0
        s["present"] |= int(StepPresent.GRAD_NORM)
        if step >= 62:
            put_nan(rows, slice(None))

    found = detect(run, change, per_batch=1)[0]
    words = explain(found, run.facts)
    assert (found.mode, found.step) == ("nan-in-activation", 62)
    assert words.title.startswith("NaN is already in the weights")
    assert words.title.endswith("behind a gradient norm of step 61 that was not finite") is said
    assert ("need not be where it began" in words.cause) is said


def test_a_norm_that_is_not_finite_behind_weights_that_broke_before_wrote_nothing() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        s["grad_norm"] = NAN
        s["present"] |= int(StepPresent.GRAD_NORM)
        put_nan(rows, slice(None))

    found = detect(run, change, per_batch=1)
    assert len(found) > 1
    assert not any("norm_step" in f.extra for f in found)


def test_a_second_independent_cause_later_is_its_own() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 62:
            put_inf(rows, run.index(DOWN, "input"))
        if step == 65:
            s["loss"] = INF
            s["status"] = int(StepStatus.SKIPPED)

    assert [(f.mode, f.step) for f in detect(run, change)] == [("inf-laundering", 62), ("nan-in-loss", 65)]


def test_a_gradscaler_that_finds_its_scale_is_no_fault() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 65:
            put_inf(rows, run.index(DOWN, "grad_output"))
            s["status"], s["loss_scale"] = int(StepStatus.SKIPPED), 65536.0
            s["present"] |= int(StepPresent.LOSS_SCALE)

    assert detect(run, change) == []


def test_a_step_that_died_is_judged() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step == 69:
            s["status"], s["loss"] = int(StepStatus.ABORTED), NAN

    assert [(f.mode, f.step) for f in detect(run, change)] == [("nan-in-loss", 69)]


@pytest.mark.parametrize("power_2_scale", [True, False])
@pytest.mark.parametrize("ratio", [1.3, 0.4])
def test_a_weight_off_the_invariant_is_stale_at_once(power_2_scale: bool, ratio: float) -> None:
    run = Run(power_2_scale=power_2_scale)
    i = run.index("layers.0.mlp.gate_proj", "weight")

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 2:
            rows["scale_ratio_max"][i], rows["scale_ratio_min"][i] = max(ratio, 0.9), min(ratio, 1.0)
            rows["num_off_scale_tiles"][i], rows["off_scale_tile"][i] = 4, (1, 1)

    found = detect(run, change, range(5))
    assert [(f.mode, f.step) for f in found] == [("stale-weight-scale", s) for s in (2, 3, 4)]
    assert found[0].site == run.sites[i].id
    assert found[0].tile == (1, 1)
    assert found[0].severity == "critical"


def test_scales_rounded_up_everywhere_are_not_stale_weights() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["scale_ratio_max"], rows["num_off_scale_tiles"] = 1.6, 40

    assert modes(detect(run, change, range(3))) == {"scale-rounding"}


def test_gradients_with_the_scale_of_something_larger_underflow() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        gradients = run.roles == "grad_output"
        rows["scale_ratio_max"][gradients] = rows["scale_ratio_min"][gradients] = 2.0**-7
        rows["num_off_scale_tiles"][gradients] = 512

    found = detect(run, change, range(3))
    assert modes(found) == {"gradient-underflow"}
    assert found[0].extra["operands"] == ["grad_output"]


def test_a_delayed_recipe_may_clip_without_breaking_an_invariant() -> None:
    run = Run(recipe="delayed")

    def clip(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 60:  # past the warm-up: a young model grows out of any history
            rows["scale_ratio_max"].fill(1.7)

    found = detect(run, clip, range(70))
    assert modes(found) == {"delayed-clip"}  # the clip depth of history, not a broken quantiser
    assert found[0].step < 66


def test_what_was_not_measured_is_never_read_as_zero() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["measured"] = int(Measured.COUNTS)
        for name in ("scale_inv_min", "scale_inv_max", "scale_ratio_max", "scale_ratio_min", "amax_max"):
            rows[name] = 0.0

    assert detect(run, change) == []


def test_a_broken_loss_without_operands_is_not_called_innocent() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["measured"] = 0
        s["loss"] = NAN

    [finding] = detect(run, change, range(60, 61))
    assert (finding.mode, finding.verdict) == ("nan-in-loss", "unknown")


def look(rows: np.ndarray, i: int, **counts: int) -> None:
    rows["measured"][i] |= int(Measured.QUANTISER)
    rows["num_checked_tiles"][i] = 33
    for name, count in counts.items():
        rows[name][i] = count


@pytest.mark.parametrize("count", ["num_nan_codes", "num_off_grid", "num_zeroed_tiles", "num_wrong_scales"])
def test_a_quantiser_that_is_wrong_is_named_in_the_step_of_the_look(count: str) -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        look(rows, run.index(DOWN, "weight"))
        if step == 65:
            look(rows, run.index(DOWN, "input"), **{count: 3})
            rows["fault_tile"][run.index(DOWN, "input")] = (7, 1)

    found = detect(run, change)
    assert [(f.mode, f.severity, f.step, f.tile, f.verdict) for f in found] == [
        ("quantiser-fault", "critical", 65, (7, 1), "fp8")
    ]
    assert run.facts[found[0].site or 0].module == DOWN
    assert evidence(found[0]) | {"tile_sqnr_db": 0} == {count: 3, "num_checked_tiles": 33, "tile_sqnr_db": 0}


def test_where_the_scale_invariant_is_broken_the_quantiser_is_not_told_twice() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        i = run.index(DOWN, "weight")
        if step == 65:
            look(rows, i, num_wrong_scales=33)
            rows["scale_ratio_max"][i], rows["num_off_scale_tiles"][i] = 1.5, 3

    assert modes(detect(run, change)) == {"stale-weight-scale"}


@pytest.mark.parametrize(("db", "clamped", "told"), [(2.5, 0, True), (4.0, 0, False), (2.5, 9, False)])
def test_an_operand_under_three_decibels_is_destroyed_not_noisy(db: float, clamped: int, told: bool) -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        i = run.index(DOWN, "input")
        rows["tile_noise_ratio_sum"][i] = rows["num_tiles"][i] * 10 ** (-db / 10)
        rows["num_eps_tiles"][i] = clamped

    found = detect(run, change, range(60, 62))
    assert ("quantiser-fault" in modes(found)) == told


def test_an_output_off_by_more_than_any_accumulator_is_the_kernels() -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        i = run.index(DOWN, "input")
        rows["measured"][i] |= int(Measured.GEMM)
        rows["gemm_gain_min"][i] = rows["gemm_gain_max"][i] = 1.0
        rows["gemm_error"][i] = 0.01 if step < 65 else 0.3

    found = detect(run, change)
    assert modes([f for f in found if f.step < 65]) == {"accumulator-precision"}
    last = [f for f in found if f.step >= 65]
    assert {(f.mode, f.severity) for f in last} == {("kernel-output-fault", "critical")}
    assert last[0].extra["gain"] is None
