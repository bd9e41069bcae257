"""What the training chart is drawn over, and its further panels: only what is known, and an old address breaks nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_server.pages import training_axis

PATH = "/runs/r/training.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[synthetic.Run]:
    with serving(make_app(tmp_path_factory.mktemp("axis"))) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        for first in (0, 400):
            steps = range(first, first + 400)
            logs: dict[str, Any] = {"tokens": [512.0] * 400, "a": [float(i) for i in steps], "=b": [1.0] * 400}
            run.send(steps, fault=False, keep=lambda step, site: step == 0, logs=logs)
        yield run


def ask(run: synthetic.Run, **query: str) -> dict[str, Any]:
    client: httpx.Client = run.client
    answer = client.get(PATH, params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_times_are_those_of_training_and_few(run: synthetic.Run) -> None:
    knots = ask(run, x="time")["knots"]
    assert len(knots) <= training_axis.MAX_KNOTS + 1
    assert (knots[0][0], knots[-1][0]) == (0, 799)
    assert [t for _, t in knots] == pytest.approx([run.start + 0.25 * s for s, _ in knots], abs=1e-3)
    assert ask(run)["knots"] == []


def test_a_count_of_each_step_is_no_axis(run: synthetic.Run) -> None:
    assert ask(run, x="tokens")["knots"] == []  # 512 in each step: how many were seen is not logged
    assert 'data-value="tokens"' in run.client.get("/runs/r").text


def test_further_panels_are_those_that_there_are(run: synthetic.Run) -> None:
    got = ask(run, panels=json.dumps(["a", "gone", "=b", "loss", 7]), **{"from": "10", "to": "12"})
    assert list(got["further"]) == ["a", "=b"]
    assert got["further"]["a"]["values"] == [10.0, 11.0, 12.0]
    for wrong in ("", "{", '"a"', "null"):
        assert ask(run, panels=wrong)["further"] == {}
    many = json.dumps([f"n{i}" for i in range(50)])
    assert len(training_axis.asked_panels(many)) == training_axis.MAX_PANELS
