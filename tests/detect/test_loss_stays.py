"""A loss that jumps and is not back: nothing is claimed of data that were not measured, and a training that may diverge warns."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import StepPresent
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain

AT, STEPS = 120, 240


def found_in(t: Trace) -> list[Finding]:
    return play(Case([t], AT))


def spike(t: Trace, height: float, decay: float, norm: float = 6.0) -> None:
    """Loss and gradient norm jump at AT and come back with this time constant; `norm` 1: the norm is as ever."""
    after = np.maximum(np.arange(t.num_steps) - AT, 0) / decay
    on = np.arange(t.num_steps) >= AT
    t.steps["loss"] += on * height * np.exp(-after)
    t.steps["grad_norm"] *= np.where(on, 1 + (norm - 1) * np.exp(-after), 1)


def the_jump(t: Trace) -> Folded:
    [incident] = [i for i in fold(found_in(t), t.facts) if i.mode == "bad-batch"]
    return incident


def test_a_spike_that_takes_a_hundred_steps_is_a_warning_and_no_claim_about_data() -> None:
    t = healthy(3, STEPS)
    spike(t, 3.3, 40)
    incident = the_jump(t)
    assert (incident.severity, incident.named.onset, incident.named.step) == ("warning", AT, AT + 5)
    words = explain(incident.named, t.facts)
    assert words.title.startswith(f"The loss jumped at step {AT} and was not back after 5 steps: ")
    assert "data" not in words.title.lower()
    assert "The gradient norm stays larger too" in words.cause
    assert "checkpoint before" in words.fix[0]["text"]
    assert incident.last_step > AT + 24, "its incident lasts as long as the loss is up"


def test_a_loss_that_never_comes_back_is_critical_after_fifty_steps() -> None:
    t = healthy(3, STEPS)
    spike(t, 6.5, 1e9)
    found = [f for f in found_in(t) if f.mode == "bad-batch"]
    assert next(f.step for f in found if f.severity == "critical") == AT + 50
    assert "was not back after 50 steps" in explain(next(f for f in found if f.severity == "critical"), t.facts).title
    assert the_jump(t).severity == "critical"


def test_another_domain_whose_gradients_are_as_ever_is_information() -> None:
    t = healthy(3, STEPS)
    spike(t, 3.3, 60, norm=1.5)
    incident = the_jump(t)
    assert incident.severity == "info"
    words = explain(incident.named, t.facts)
    assert "The gradient norm is about what it was" in words.cause
    assert not any(f.extra.get("goes_on") for f in found_in(t))


@pytest.mark.parametrize(("height", "severity"), [(1.5, "info"), (6.5, "warning")])
def test_without_a_gradient_norm_multiples_of_the_loss_warn(height: float, severity: str) -> None:
    t = healthy(3, 160)
    spike(t, height, 1e9)
    t.steps["present"] = int(StepPresent.LOSS | StepPresent.LR)
    assert the_jump(t).severity == severity


def test_a_jump_whose_inputs_moved_behind_the_first_gemm_is_told() -> None:
    t = healthy(3, STEPS)
    spike(t, 3.3, 40)
    inputs = t.mask(operand="input")
    t.grow(inputs, 1.6 * (np.arange(STEPS) >= AT))
    first = min((s for s in t.sites if s.operand == "input"), key=lambda s: s.order).module
    t.grow(t.mask(first, "input"), -1.6 * (np.arange(STEPS) >= AT))
    incident = the_jump(t)
    assert (incident.severity, incident.named.verdict) == ("warning", "unknown")


@pytest.mark.parametrize(("since", "verdict"), [(AT - 3, "unknown"), (AT, "shared")])
def test_gradients_that_lost_their_bits_before_the_jump_leave_fp8_open(since: int, verdict: str) -> None:
    """Gradients of the step of the jump come behind its loss."""
    t = healthy(3, 160)
    spike(t, 3.3, 40)
    some = t.mask("layers.1.mlp.down_proj", "grad_output")
    t.set_sqnr(some, t.sqnr(some) - 15.0 * (np.arange(160) >= since)[:, None])
    found = [f for f in found_in(t) if f.mode == "bad-batch"]
    assert not found or found[0].verdict == verdict


def test_losses_around_zero_have_odd_batches_too() -> None:
    """As in GRPO: the tails of Student's t, and gradients as large as the loss is far from 0."""
    num = 1500
    t, far = healthy(3, num, 1), np.random.default_rng(5).standard_t(3, num)
    far[1300] = 200.0
    t.steps["loss"], t.steps["grad_norm"] = 0.02 * far, 0.3 * (1 + np.abs(far))
    told = [(f.severity, f.onset) for f in play(Case([t], AT, per_batch=64), every=1 << 20) if f.mode == "bad-batch"]
    assert ("warning", 1300) in told
    assert len([severity for severity, _ in told if severity != "info"]) <= 2
    assert len(told) > 3, "they are information"
