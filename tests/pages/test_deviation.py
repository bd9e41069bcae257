"""Layers by deviation from their own past: one lit cell, wherever its level lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_server.pages import health
from fp8watch_server.pages.health_maps import opens_on
from fp8watch_server.store import deviation

MODULE = "layers.0.attention.wk"
JUMP = 60


def test_a_value_outside_of_its_band_neither_feeds_it_nor_is_usual_before_its_time() -> None:
    rng = np.random.default_rng(0)
    level = np.array([[5.0], [-20.0]]) + 0.02 * rng.standard_normal((2, 140))
    level[1, JUMP:] += 3.0  # for good
    level[0, 30] = np.nan
    far = deviation.deviations(level, np.array([0.12, 0.12]))
    assert np.isnan(far[:, : deviation.LEAST]).all()
    assert np.isnan(far[0, 30])
    assert np.nanmax(far[0]) < 0.5
    assert np.nanmax(far[1, :JUMP]) < 0.5
    assert far[1, JUMP : JUMP + deviation.WINDOW] == pytest.approx(3 / 0.48, rel=0.05)
    assert np.isnan(far[1, JUMP + deviation.WINDOW + 2 : JUMP + deviation.WINDOW + 2 + 5]).all()  # it begins again
    assert np.nanmax(far[1, JUMP + deviation.WINDOW + 20 :]) < 0.5


def test_a_weight_that_walks_stays_calm_and_one_that_leaps_stands_out_until_it_is_usual() -> None:
    rng = np.random.default_rng(0)
    steps = 0.001 * rng.standard_normal((2, 140))
    steps[:, JUMP:] += 0.02  # it begins to grow, 1.4 % a step
    level = np.cumsum(steps, axis=1)
    level[1, JUMP:] += 1.0  # and one of them is doubled besides
    floor, walking = np.array([0.01, 0.01]), np.array([True, True])
    far = deviation.deviations(level, floor, walking)
    assert np.isnan(far[:, : deviation.LEAST]).all()
    assert np.nanmax(far[0]) < 1
    assert np.nanmax(deviation.deviations(level, floor)[0]) > 4  # around a median it would look broken
    assert (far[1, JUMP : JUMP + deviation.WINDOW] > 20).all()
    assert np.nanmax(far[1, JUMP + deviation.WINDOW + 1 :]) < 1
    sites = [{"operand": "weight"}, {"operand": "input"}]
    assert deviation.walks("amax_max", sites).tolist() == [True, False]
    assert not deviation.walks("tile_sqnr_db", sites).any()


def test_median_is_that_of_what_there_is() -> None:
    values = np.full((3, deviation.WINDOW), np.inf)
    values[0, :5], values[1, :4] = [9, 1, 5, 7, 3], [4, 1, 3, 2]
    assert deviation._median(values, np.array([5, 4, 0])).tolist() == [5, 2.5, 0]


def test_map_and_worst_sites_show_the_site_that_left_its_band(tmp_path: Any) -> None:
    def jump(steps: Any, rows: Any) -> None:
        by_step = rows.reshape(len(steps), -1)
        by_step["amax_max"][steps["step"] >= JUMP, hit] *= 200.0

    app = make_app(tmp_path)
    with serving(app) as client:
        run = synthetic.Run(client, "r", "r", sites=synthetic.make_sites(1)).register()
        site = run.site(MODULE)
        hit = run.sites.index(site)
        run.send(range(JUMP + 4), fault=False, change=jump)
        whole = client.get("/runs/r/health.json").json()  # the first map is the default
        zoomed = client.get(f"/runs/r/health.json?field=amax_deviation&from={JUMP - 2}&to={JUMP + 1}").json()
        worst = client.get("/runs/r").text.partition("Worst sites now")[2]
    for got in (whole, zoomed):
        lit = {
            (row["label"], got["steps"][j])
            for row in got["rows"]
            for j, v in enumerate(row["values"])
            if v is not None and v > 4
        }
        assert lit == {(MODULE, step) for step in got["steps"] if step >= JUMP}
    assert zoomed["steps"] == [JUMP - 2, JUMP - 1, JUMP, JUMP + 1]
    assert worst.index(MODULE) < worst.index("rowlink", worst.index("rowlink") + 1)
    assert 'class="unusual"' in worst


def test_a_map_opens_on_the_quantity_of_the_incident() -> None:
    cases = {"num_inf": "num_nonfinite", "tile_sqnr_db": "sqnr_deviation", "num_underflow": "underflow_ratio"}
    assert {f: opens_on([{"field": "loss"}, {"field": f}]) for f in cases} == cases
    assert opens_on([]) == opens_on([{"field": "amax_max"}]) == "amax_deviation"


def test_ten_thousand_sites_cost_no_more_than_a_second() -> None:
    import time

    level = np.random.default_rng(0).standard_normal((10_000, deviation.LEAST_COLUMNS))
    began = time.process_time()
    deviation.deviations(level, np.full(10_000, 0.12))
    assert time.process_time() - began < 4
    assert health.NOW_CELLS // 10_000 > deviation.LEAST
