"""A run whose loss, gradient norm and amax are NaN, Inf and −Inf in turn is readable everywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site
from prometheus_client.parser import text_string_to_metric_families

from fp8watch_server.db import schema as t
from fp8watch_server.store.fields import badness

NAN, INF = float("nan"), float("inf")
STEPS = [0, 1, 2, 3]
VALUES = [NAN, INF, -INF, 1.5]
MARKS = [[0, "nan"], [1, "inf"], [2, "-inf"]]
SITE = make_site("<script>alert(1)</script>")
RUN = '<script>alert("run")</script>/../%41 ü'


@pytest.fixture
def agent(client: Any) -> Agent:
    agent = Agent(client, run=RUN).register([SITE], name=RUN)
    scalars = {"loss": VALUES, "grad_norm": VALUES[1:] + VALUES[:1], "lr": [0.0] * 4}
    agent.send([SITE], STEPS, scalars=scalars, fields={"amax_max": VALUES, "scale_inv_max": VALUES})
    return agent


def get(agent: Agent, path: str, **params: Any) -> Any:
    answer = agent.client.get(f"/api{agent.path}{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sql_tells_them_apart(agent: Agent, app: Any) -> None:
    with app.state.engine.connect() as conn:
        rows = conn.execute(sa.select(t.scalar.c.loss, t.scalar.c.loss_class, t.scalar.c.loss_scale_class)).all()
    assert [tuple(r) for r in rows] == [(None, 1, None), (None, 2, None), (None, 3, None), (1.5, 0, None)]


def test_series_and_scalars_hold_them_as_data(agent: Agent) -> None:
    for got in (
        get(agent, "/series", site=SITE.id, field="amax_max"),
        get(agent, "/scalars", name="loss"),
        get(agent, "/series", field="loss"),
    ):
        assert got["steps"] == STEPS
        assert got["values"] == [None, None, None, 1.5]
        assert got["nonfinite"] == MARKS
    assert get(agent, "/scalars", name="grad_norm")["nonfinite"] == [[0, "inf"], [1, "-inf"], [3, "nan"]]


def test_heat_map_top_and_histogram_hold_them(agent: Agent) -> None:
    heat = get(agent, "/heatmap", field="amax_max")
    assert heat["values"] == [[None, None, None, 1.5]]
    assert heat["nonfinite"] == [[0, j, name] for j, name in MARKS]
    (worst,) = get(agent, "/top", field="amax_max")["items"]
    assert (worst["value"], worst["nonfinite"]) == (None, "nan")
    assert len(get(agent, f"/sites/{SITE.id}/histogram")["counts"]) == 4


def test_a_nan_on_one_rank_is_not_averaged_away(agent: Agent) -> None:
    other = Agent(agent.client, run=RUN, session="b" * 32, rank=1).register([SITE], name=RUN)
    other.send([SITE], [3, 4], scalars={"loss": [NAN, 1.0]}, fields={"amax_max": [NAN, 1.0]})
    assert get(agent, "/scalars", name="loss")["nonfinite"] == [*MARKS, [3, "nan"]]
    assert get(agent, "/series", site=SITE.id, field="amax_max")["nonfinite"] == [*MARKS, [3, "nan"]]


def test_hostile_names_are_data(agent: Agent) -> None:
    run = get(agent, "")
    assert run["id"] == run["name"] == RUN
    assert get(agent, "/sites")["items"][0]["module"] == SITE.module
    (listed,) = agent.client.get("/api/v1/runs").json()["items"]
    assert listed["id"] == RUN


@pytest.mark.parametrize(("last", "shown"), [(NAN, "NaN"), (INF, "+Inf"), (-INF, "-Inf")])
def test_metrics_show_them(client: Any, app: Any, last: float, shown: str) -> None:
    agent = Agent(client, run=RUN).register([SITE], name=RUN)
    fields = {"amax_max": [1.0, last], "num_inf": [2, 3], "num_nan": [0, 1], "num_sentinel_tiles": [0, 1]}
    agent.send([SITE], [1, 2], scalars={"loss": [1.0, last], "grad_norm": [1.0, last]}, fields=fields)
    app.state.worker.drain()
    text = client.get("/metrics").text
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    of_run, of_site = (("run", RUN),), (("layer", SITE.module), ("operand", "input"), ("run", RUN))
    for name in ("fp8watch_loss", "fp8watch_grad_norm"):
        np.testing.assert_equal(samples[name, of_run], last)
    np.testing.assert_equal(samples["fp8watch_amax_max", of_site], last)
    assert samples["fp8watch_nonfinite_elements_total", of_site] == 6
    assert samples["fp8watch_sentinel_tiles_total", of_site] == 1
    line = next(line for line in text.splitlines() if line.startswith("fp8watch_loss{"))
    assert line.endswith(f"}} {shown}")
    assert not math.isnan(samples["fp8watch_run_step", of_run])


def test_a_signalling_nan_is_worst_of_all_without_a_warning() -> None:
    values = np.array([0x7F800001, 0x3F800000], dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="raise"):
        order = badness(values, np.array([True, True]), "max")
    assert order[0] > order[1]
