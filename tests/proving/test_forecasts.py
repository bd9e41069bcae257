"""Slow trends go where they are meant to go, and what became of a forecast is told rightly."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from proving import forecasts, tiny
from proving.case import Case
from proving.forecast_score import held, interval, outcome, outcomes, part
from proving.training import Training
from proving.trends import TRENDS
from proving.trends.activations import LIMIT, UNDERFLOWS_AT, faded, fading
from proving.trends.attention import LogitsClimb

from fp8watch_server.pages.forecasts import OF_LOGITS, OF_SITES

UNDERFLOW = OF_SITES[0]


@cache
def probe(kind: str = "language") -> Training:
    torch.manual_seed(0)
    return tiny.KINDS[kind]()


def series(values: Any) -> dict[str, Any]:
    return {"steps": list(range(len(values))), "values": [float(v) for v in values]}


def line(
    severity: str = "arrives", crossed: int | None = None, change: str = "channels-fade", **changed: Any
) -> dict[str, Any]:
    """A line of results with one series."""
    seen = {
        "module": "a",
        "operand": "input",
        "direction": "rowwise",
        "field": "underflow_ratio",
        "crossed": crossed,
        "last": 480,
    }
    usual = {
        "id": f"{change}-{severity}-{crossed}",
        "family": "gpt",
        "change": change,
        "severity": severity,
        "steps": 480,
        "opened": [],
        "told": [],
    }
    return usual | {"drawn": {"module": "a"}, "series": [seen | {"said": [[200, 50, 100, 150]]}]} | changed


@pytest.mark.parametrize(
    ("severity", "crossed", "last", "expected"),
    [
        ("arrives", 250, 480, "held"), ("arrives", 350, 480, "held"), ("arrives", 249, 480, "early"), ("arrives", 351, 480, "late"),
        ("arrives", None, 480, "late"), ("arrives", None, 340, "open"), ("levels-off", None, 340, "never"), ("levels-off", 300, 480, "held"),
    ],
)  # fmt: skip
def test_a_forecast_held_where_the_limit_was_passed_within_its_interval(
    severity: str, crossed: int | None, last: int, expected: str
) -> None:
    run = line(severity, crossed)
    assert outcome(run, run["series"][0] | {"last": last}, [200, 50, 100, 150]) == expected


def test_what_is_open_counts_for_nothing_and_a_run_speaks_once() -> None:
    elsewhere = line("levels-off", None)
    elsewhere["series"][0] |= {"module": "b", "last": 300}
    assert outcomes(elsewhere) == ["open"]
    assert np.isnan(held(["open"]))
    assert held(["held", "early", "open", "late", "never"]) == 0.25
    low, high = interval([["held"] * 50, ["late"], ["late"], ["held"]])
    assert low < 0.5 < high


def test_a_series_is_read_as_the_pages_read_it_and_nothing_behind_the_look() -> None:
    rising = 0.001 * 2.0 ** (np.arange(480) / 50)  # 10 % at step 332
    found = forecasts.looks(series(rising), UNDERFLOW)
    assert found is not None
    assert found["crossed"] == pytest.approx(333, abs=1)
    assert [said[0] for said in found["said"]] == [128, 160, 192, 224, 256, 288, 320]
    assert all(at + soonest <= 333 <= at + latest for at, soonest, _, latest in found["said"])
    bent = np.where(np.arange(480) < 250, rising, rising[250])
    of_bent = forecasts.looks(series(bent), UNDERFLOW)
    assert of_bent is not None
    assert of_bent["crossed"] is None
    assert of_bent["said"][:3] == found["said"][:3]
    assert forecasts.looks(series(np.full(480, 0.01)), UNDERFLOW) is None
    assert forecasts.looks(series([]), OF_LOGITS) is None


def test_channels_fade_one_after_the_other_until_a_tenth_is_lost() -> None:
    at, lost = fading(1000, LIMIT, 1.25, np.random.default_rng(0))
    assert len(set(at.tolist())) == 125

    def share(done: float) -> float:
        return float((faded(lost, done) <= 2.0**-UNDERFLOWS_AT).sum()) / 1000

    assert share(0.1) == 0
    assert share(0.5) < share(0.9) < share(1.0)
    assert share(1.0) == pytest.approx(LIMIT, abs=0.02)
    assert float(faded(lost, 0.0).min()) == 1.0


def test_logits_follow_their_path_and_level_off_where_they_are_to() -> None:
    for severity in ("arrives", "levels-off"):
        trend = LogitsClimb.draw(np.random.default_rng(1), probe(), severity)
        assert trend is not None
        torch.manual_seed(0)
        t = tiny.KINDS["language"]()
        t.notes["logit"] = 5.0
        name = trend.modules[0]
        weight = t.model.get_submodule(name).weight.detach()
        before = weight.clone()
        for step in range(trend.step + trend.steps):
            trend.after_update(t, step)
        grown = float((weight / before).square().mean())  # of q times k
        assert 5.0 * grown == pytest.approx(trend.goal, rel=1e-3)
        for step in range(trend.step + trend.steps, trend.step + 2 * trend.steps):
            trend.after_update(t, step)
        after = 5.0 * float((weight / before).square().mean())
        assert after == pytest.approx(trend.goal, rel=1e-3) if severity == "levels-off" else after > 110


def test_trends_are_drawn_equally_in_every_process_and_the_plan_names_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("llama", "channels-fade", "trend", "arrives", 1)
    first, again = (case.draw(probe()) for _ in range(2))
    assert first is not None
    assert first.drawn == again.drawn  # type: ignore[attr-defined, union-attr]
    monkeypatch.setattr(
        forecasts, "probe", lambda family, seed: probe("delayed" if family == "delayed" else "language")
    )
    cases = forecasts.plan()
    assert len({c.id for c in cases}) == len(cases)
    assert {c.severity for c in cases} == {"arrives", "levels-off", ""}
    assert {c.change for c in cases} == set(TRENDS)


def test_the_page_says_how_many_were_told_and_how_many_held() -> None:
    text = part(
        [
            line("arrives", 300, opened=[180], told=[{"field": "underflow_ratio", "module": "a", "first_step": 180}]), line("arrives", 500, family="llama"), line("levels-off", None),
            line("", None, "steady", drawn={}, series=[]),
        ]
    )  # fmt: skip
    assert "| `limit-ahead` | runs | forecasts | interval held |" in text
    assert "| **all** | 4 | 3 | 0.33 (" in text
    assert "| channels-fade | 3 | 2 | 2 | 200 | 1 | 120 |" in text
    assert "Of 1 trainings whose trend levels off, 0 had an incident" in text
