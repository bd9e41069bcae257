"""Many ranks merge what says nothing new: pages say which steps a point stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_agent.record import Measured

SITES = synthetic.make_sites(1)
SITE = SITES[0].id


def as_windows(steps: np.ndarray, rows: np.ndarray) -> None:
    rows["window_steps_back"], rows["amax_steps_back"] = 15, 6
    rows["measured"] |= int(Measured.WINDOW)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A collector with a run of many ranks, of which one has sent, and one that merges nothing."""
    with serving(make_app(tmp_path_factory.mktemp("merging"))) as client:
        synthetic.Run(client, "many", "many", sites=SITES).register(world_size=256, said={"merge_steps": 16}).send(
            range(15, 200, 16), fault=False, change=as_windows
        )
        synthetic.Run(client, "one", "one", sites=SITES, session="1" * 32).register().send(range(12), fault=False)
        yield client


def said(html: str) -> str:
    found = re.search(r'id="merged">(.*?)</', html)
    return found[1] if found else ""


def test_pages_say_how_many_steps_a_point_may_stand_for(merging: httpx.Client) -> None:
    assert "a point stands for up to 16 steps, its own the last" in said(merging.get(f"/runs/many/sites/{SITE}").text)
    assert "may stand for up to 16 steps that end with it" in said(merging.get("/runs/many").text)


def test_where_nothing_is_merged_they_say_nothing(merging: httpx.Client) -> None:
    assert not said(merging.get(f"/runs/one/sites/{SITE}").text)
    assert not said(merging.get("/runs/one").text)


def test_a_point_says_its_steps_before_any_script_runs(merging: httpx.Client) -> None:
    html = merging.get(f"/runs/many/sites/{SITE}").text
    assert re.search(r"[\d.]+ at step 25, of steps 16 to 31<", html), "the largest amax"
    assert re.search(r"[\d.]+ of steps 16 to 31<", html), "the smallest amax, of which the step is not known"
    assert " at step 11<" in merging.get(f"/runs/one/sites/{SITE}").text


def test_the_api_and_the_charts_get_the_steps_of_each_point(merging: httpx.Client) -> None:
    got: dict[str, Any] = merging.get(f"/api/v1/runs/many/series?site={SITE}&field=amax_max").json()
    assert got["steps"][:2] == [15, 31]
    assert got["from_steps"][:2] == [0, 16]
    assert got["at_steps"][:2] == [9, 25]
    assert merging.get(f"/runs/many/sites/{SITE}/charts.json?points=50").json()["amax_max"]["from_steps"][:2] == [0, 16]
    assert "from_steps" not in merging.get(f"/api/v1/runs/one/series?site={SITE}&field=amax_max").json()
