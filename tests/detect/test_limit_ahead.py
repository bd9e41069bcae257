"""A lasting trend is told as information, with an interval that holds; a healthy run has none."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import fold
from detect.play import play
from detect.scenarios import BY_NAME, GATE, Case
from detect.trace import Trace, healthy

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain


def told(trace: Trace) -> list[Finding]:
    return [f for f in play(Case([trace], 0)) if f.mode == "limit-ahead"]


def static(num_steps: int, octaves_a_step: float) -> Trace:
    """Scales that were set once, with two octaves to spare, under an input that grows."""
    trace = healthy(2, num_steps, num_layers=1, recipe="delayed", hybrid=True)
    one = trace.mask(GATE, "input")
    steps = np.arange(num_steps)
    depth = np.exp2(-2 + octaves_a_step * steps + np.random.default_rng(0).normal(0, 0.03, num_steps))
    for name in ("scale_ratio_max", "scale_ratio_min"):
        trace.columns[name][:, one] = depth[:, None]
    return trace


def test_underflow_that_grows_is_told_before_it_passes_its_limit_and_once() -> None:
    """Whether or not the collector restarts meanwhile."""
    trace = BY_NAME["limit-ahead"].make(4, 1).traces[0]
    engine, found = DetectionEngine(trace.facts), []
    for number, batch in enumerate(trace.batches(8)):
        if number == 25:
            engine = DetectionEngine.load(engine.dump(), trace.facts)
        found += [f for f in engine.observe(batch) if f.mode == "limit-ahead"]
    assert found[0].step < 280
    truth = 100 * np.log2(0.1 / 0.004)  # the step at which it passes
    for f in found:
        assert f.severity == "info"
        assert f.extra["last"] + f.extra["soonest"] <= truth <= f.extra["last"] + f.extra["latest"], f.step
    (incident,) = [i for i in fold(found, trace.facts) if i.mode == "limit-ahead"]
    words = explain(incident.first, trace.facts)
    assert words.title.startswith("Underflow of layers.0.mlp.gate_proj input (fprop) heads for 10 %, in about ")
    assert words.place["module"] == GATE
    assert [e["field"] for e in words.evidence] == ["underflow_ratio", "steps_ahead"]


def test_a_static_scale_that_amax_grows_out_of_is_told_before_it_clips() -> None:
    trace = static(330, 0.005)  # 1 at step 400
    found = told(trace)
    assert {f.evidence[0].field for f in found} == {"clip_depth"}
    assert all(f.extra["last"] + f.extra["soonest"] <= 400 <= f.extra["last"] + f.extra["latest"] for f in found)


@pytest.mark.parametrize(("first_step", "said"), [(20_000, True), (300, False)])
def test_logits_are_told_where_they_grow_faster_than_those_of_a_young_model(first_step: int, said: bool) -> None:
    trace = healthy(5, 330, num_layers=1, first_step=first_step)
    trace.logs["max_attention_logit/layers.0"] = 20 * np.exp2(np.arange(330) / 200)
    found = told(trace)
    assert bool(found) is said
    for f in found:
        assert (f.site, f.verdict) == (None, "shared")
        truth = first_step + 200 * np.log2(5)
        assert f.extra["last"] + f.extra["soonest"] <= truth <= f.extra["last"] + f.extra["latest"]
        assert "(max_attention_logit/layers.0) heads for 100" in explain(f, trace.facts).title


def test_what_is_ahead_is_over_when_the_trend_is() -> None:
    trace = static(450, 0.005)
    one = trace.mask(GATE, "input")
    for name in ("scale_ratio_max", "scale_ratio_min"):
        trace.columns[name][300:, one] = trace.columns[name][300, one]  # it grows no more
    steps = [f.step for f in told(trace)]
    assert steps
    assert max(steps) < 420


HEALTHY = [
    (0, "blockwise"),
    *(pytest.param(s, r, marks=pytest.mark.long) for s in (1, 2, 3) for r in ("blockwise", "delayed")),
]


@pytest.mark.parametrize(("seed", "recipe"), HEALTHY)
def test_a_healthy_run_is_heading_nowhere(seed: int, recipe: str) -> None:
    assert told(healthy(seed, 500, num_layers=1, recipe=recipe, hybrid=recipe == "delayed")) == []
