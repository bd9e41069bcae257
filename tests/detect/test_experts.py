"""An expert that leaves its siblings is named, one without tokens is told, and healthy experts are not."""

from __future__ import annotations

import numpy as np
import pytest
from detect.play import play
from detect.scenarios import DOWN, Case
from detect.trace import healthy

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.incidents.explain import explain

ONSET = 90


def trace(operand: str = "weight"):
    t = healthy(5, 150)
    j = t.one(DOWN, operand)
    return t, j, t.give_experts(j, 8)


def test_an_expert_that_is_blown_up_is_named_although_a_sibling_was_as_large() -> None:
    t, j, vectors = trace()
    vectors["amax"][:, 1:] /= 2**14  # the first holds the amax of the site
    vectors["amax"][ONSET:, 3] *= 2**14
    found = [f for f in play(Case([t], ONSET)) if f.severity != "info"]
    assert {f.mode for f in found} == {"expert-outlier"}
    first = found[0]
    assert first.step - ONSET <= 3
    words = explain(first, t.facts)
    assert words.place["expert"] == 3
    assert words.place["module"].endswith(DOWN)
    assert words.title.startswith("Expert 3 left its siblings: weight of")
    assert first.site == t.sites[j].id


def test_one_look_at_an_input_is_not_enough() -> None:
    t, _, vectors = trace("input")
    at = next(s for s in range(ONSET, ONSET + 3) if (s + t.one(DOWN, "input")) % 3 == 0)
    vectors["amax"][at, 3] *= 2**9
    assert [f for f in play(Case([t], ONSET)) if f.severity != "info"] == []
    vectors["amax"][at : at + 4, 3] *= 2**9
    assert {f.mode for f in play(Case([t], ONSET)) if f.severity != "info"} == {"expert-outlier"}


@pytest.mark.parametrize("operand", ["weight", "input"])
def test_healthy_experts_are_not_told(operand: str) -> None:
    t, *_ = trace(operand)
    assert [f for f in play(Case([t], ONSET)) if f.mode in ("expert-outlier", "dead-layer")] == []


def test_an_expert_without_tokens_is_told_and_one_that_rests_is_not() -> None:
    t, _, vectors = trace("input")
    vectors["num_tokens"][20:30, 2] = 0  # rests
    vectors["num_tokens"][60:, 6] = 0
    vectors["amax"][60:, 6] = 0
    found = [f for f in play(Case([t], 60)) if f.mode == "dead-layer"]
    assert {(f.severity, f.extra["which"], f.extra["expert"]) for f in found} == {("info", "starved", 6)}
    assert found[0].onset in (60, 61, 62)
    words = explain(found[0], t.facts)
    assert words.title == "Expert 6 of layers.1.mlp.down_proj gets no tokens"
    assert words.place["expert"] == 6
    assert "router" in words.fix[0]["text"]


def test_another_rank_may_have_the_tokens() -> None:
    both = []
    for rank in range(2):
        t, _, vectors = trace("input")
        t.rank, t.session = rank, f"{rank}" * 32
        vectors["num_tokens"][60:, 6 - rank] = 0
        both.append(t)
    assert [f for f in play(Case(both, 60)) if f.mode == "dead-layer"] == []


def test_a_state_that_is_saved_goes_on() -> None:
    t, _, vectors = trace()
    vectors["amax"][:, 1:] /= 2**14
    vectors["amax"][ONSET:, 3] *= 2**14
    whole = [f.mode for f in play(Case([t], ONSET))]
    engine, found = DetectionEngine(t.facts), []
    for i, batch in enumerate(t.batches()):
        found += engine.observe(batch)
        if i == 10:
            engine = DetectionEngine.load(engine.dump(), t.facts)
    assert [f.mode for f in found] == whole
    assert np.isfinite(vectors["amax"]).all()
