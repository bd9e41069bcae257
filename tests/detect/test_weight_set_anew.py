"""A weight that leaps where something wrote weights between two steps of the optimizer is no page, and no flipped bit in the first place."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy
from detect.written_weights import AT, FC2, STEPS, Q, leaping, written

from fp8watch_agent.training_names import CHANGED, WRITTEN
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.incidents.explain import explain


def told(t: Trace) -> list[Folded]:
    """Of leaps."""
    return [i for i in fold(play(Case([t], AT)), t.facts) if "octaves" in i.named.extra]


@pytest.mark.parametrize("octaves", [4.0, 1.0])
@pytest.mark.parametrize("at", [AT, AT - 1], ids=["before the forward", "behind the backward"])
def test_a_weight_that_was_set_anew_is_a_warning_that_says_so(octaves: float, at: int) -> None:
    t = written(leaping(octaves), at)
    [incident] = told(t)
    assert (incident.severity, incident.named.onset) == ("warning", AT)
    words = explain(incident.named, t.facts)
    assert words.title.endswith("octaves: something wrote it while no optimizer ran")
    assert "some elements of each of 40 weights" in words.cause
    assert "no optimizer does that" not in words.cause
    assert words.cause.index("drawn anew") < words.cause.index("bit")
    assert words.fix[0]["kind"] == "code"
    assert "between two optimizer steps" in words.fix[0]["text"]
    assert any(fix["kind"] == "hardware" for fix in words.fix)


def test_of_several_that_were_written_the_one_that_leaped_may_be_one() -> None:
    t = written(leaping(), AT, weights=3, name=f"{CHANGED}exp_avg of {Q}.weight", moments=6)
    [incident] = told(t)
    assert incident.severity == "warning"
    words = explain(incident.named, t.facts)
    assert words.title.endswith("octaves, where weights were written while no optimizer ran")
    assert "those of 3 were others" in words.cause


def test_where_most_weights_were_written_a_model_was_loaded() -> None:
    t = written(leaping(), AT, weights=38)
    [incident] = told(t)
    assert incident.severity == "info"
    cause = explain(incident.named, t.facts).cause
    assert "those of 38, its own among them, were others. A model that is loaded again" in cause
    assert "alone" not in cause
    t.steps["loss"][AT:] = np.nan
    t.columns["num_nan"][AT:, t.mask("layers.2", "input")] = 5
    assert [i.named.severity for i in told(t)] == ["critical"]


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ((), f"{WRITTEN}{FC2}.weight"),
        ((AT - 3,), f"{WRITTEN}{FC2}.weight"),
        ((AT,), f"{WRITTEN}{Q}.weight"),
        ((AT,), f"{CHANGED}exp_avg of {Q}.weight"),
        (range(AT % 5, STEPS, 5), f"{WRITTEN}{FC2}.weight"),
    ],
    ids=["nothing", "earlier", "another", "another's moment", "ever again"],
)
def test_a_weight_that_leaps_where_that_explains_nothing_stays_a_page(steps: tuple[int, ...], name: str) -> None:
    t = written(leaping(), *steps, name=name)
    assert [i.severity for i in told(t)] == ["critical"]
    assert "no optimizer does that" in explain(told(t)[0].named, t.facts).cause


def test_where_values_break_behind_it_it_is_a_page_all_the_same() -> None:
    t = written(leaping(100.0), AT)
    t.steps["loss"][AT:] = np.nan
    t.columns["num_nan"][AT:, t.mask("layers.2", "input")] = 5
    [incident] = told(t)
    assert incident.named.severity == "critical"
    assert "something wrote it" in explain(incident.named, t.facts).title


def test_a_collector_that_restarts_behind_what_was_written_says_the_same() -> None:
    t = written(leaping(), AT)
    batches = list(t.batches(1))
    one = DetectionEngine(t.facts)
    for batch in batches[: AT + 1]:
        one.observe(batch)
    two = DetectionEngine.load(one.dump(), t.facts)
    for batch in batches[AT + 1 :]:
        assert repr(two.observe(batch)) == repr(one.observe(batch))
    assert two.dump() == one.dump()


@pytest.mark.parametrize(("octaves", "says"), [(1.75, set()), (6.0, {"optimizer-divergence"})])
def test_weights_of_earlier_that_grow_again_diverge_when_they_are_larger_than_they_were(
    octaves: float, says: set[str]
) -> None:
    """A model that is loaded again learns again."""
    t = written(healthy(3, STEPS), AT, weights=38)
    since = np.arange(STEPS) - AT
    grown = np.where(since >= 0, -2.0 + np.minimum(0.25 * since, octaves), 0.0)
    t.grow(t.mask(operand="weight"), grown)
    found = [f for f in play(Case([t], AT)) if f.mode == "optimizer-divergence"]
    assert {f.mode for f in found} == says
    if says:
        assert found[0].step > AT + 8  # they are as large as before
