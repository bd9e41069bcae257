"""What was sent can be read: series, scalars, top, heat maps, histograms, runs, incidents."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from collector.filled_run import DOWN, SITES, UP, an_incident
from collector.kit import ALL, Agent

from fp8watch_agent.record import Measured
from fp8watch_agent.update_names import GRADIENT_GIVEN, GRADIENT_GOT, GRADIENT_OF
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import queries
from fp8watch_server.store.fields import SERIES_FIELDS
from fp8watch_server.store.series import thin


@pytest.fixture
def agent(client: Any) -> Agent:
    return Agent(client).register(SITES)


def get(client: Any, path: str, **params: Any) -> Any:
    answer = client.get(f"/api/v1{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def series(client: Any, field: str, site: Any = UP, run: str = "run-1", **params: Any) -> Any:
    return get(client, f"/runs/{run}/series", site=site.id, field=field, **params)


def test_a_field_over_steps(agent: Agent) -> None:
    agent.send(SITES, [3, 4, 6], fields={"amax_max": [1.0, 9, 2.0, 9, 3.0, 9]})
    got = series(agent.client, "amax_max")
    assert got == {
        "site": UP.id,
        "field": "amax_max",
        "unit": "x",
        "steps": [3, 4, 6],  # step 5 is absent, not null
        "values": [1.0, 2.0, 3.0],
        "nonfinite": [],
        "stride": 1,
    }
    assert series(agent.client, "amax_max", DOWN, **{"from": 4, "to": 5})["steps"] == [4]


def test_every_field_can_be_charted(agent: Agent) -> None:
    agent.send(SITES, [1])
    for name in SERIES_FIELDS:
        assert series(agent.client, name)["steps"] == [1], name
    answer = agent.client.get("/api/v1/runs/run-1/series", params={"site": UP.id, "field": "nonsense"})
    assert answer.status_code == 422
    assert "tile_sqnr_db" in answer.json()["detail"]


def test_derived_fields_are_what_their_formulas_say(agent: Agent) -> None:
    octaves = 2.0**-7  # a number of few bits, which the wire leaves as it is
    fields = {"tile_noise_ratio_sum": octaves, "num_tiles": 10, "num_zero_tiles": 2, "num_underflow": 90, "num_nan": 2}
    agent.send([UP], [1], fields={**fields, "num_inf": 3, "signal_energy": 8.0, "noise_energy": octaves})
    decibels = 10 * math.log10(1024)
    want = {"tile_sqnr_db": decibels, "sqnr_db": decibels, "underflow_ratio": 0.1, "num_nonfinite": 5}
    for name, value in want.items():
        assert series(agent.client, name)["values"] == pytest.approx([value], abs=1e-3), (
            name
        )  # sums travel with 13 bits


def test_what_was_not_measured_is_null_and_never_zero(agent: Agent) -> None:
    agent.send([UP], [1], measured=int(Measured.COUNTS))
    agent.send([UP], [2], measured=ALL)
    for name in ("amax_max", "tile_sqnr_db", "scale_inv_max", "num_zero_tiles"):
        got = series(agent.client, name)
        assert got["steps"] == [1, 2]
        assert got["values"][0] is None, name
        assert got["values"][1] is not None, name
        assert got["nonfinite"] == []


def test_a_ratio_of_nothing_is_absent(agent: Agent) -> None:
    agent.send([UP], [1], fields={"num_nonzero": 0, "num_zero_tiles": 10, "amax_max": 0.0, "amax_min_nonzero": np.inf})
    for name in ("underflow_ratio", "tile_sqnr_db", "amax_min_nonzero"):
        got = series(agent.client, name)
        assert (got["values"], got["nonfinite"]) == ([None], []), name


def test_steps_repeated_after_a_restart_belong_to_the_newer_attempt(agent: Agent, client: Any) -> None:
    agent.send(SITES, [1, 2, 3], fields={"amax_max": 1.0}, scalars={"loss": [1.0, 1.0, 1.0]})
    again = Agent(client, session="b" * 32).register(SITES)
    again.send(SITES, [2, 3, 4], fields={"amax_max": 2.0}, scalars={"loss": [2.0, 2.0, 2.0]})
    agent.send(SITES, [5], fields={"amax_max": 1.0}, scalars={"loss": [1.0]})  # a late batch of the first attempt
    assert series(client, "amax_max")["values"] == [1.0, 2.0, 2.0, 2.0, 1.0]
    assert get(client, "/runs/run-1/scalars", name="loss")["values"] == [1.0, 2.0, 2.0, 2.0, 1.0]
    run = get(client, "/runs/run-1")
    assert (run["attempt"], run["last_step"]) == (2, 4)
    assert [s["attempt"] for s in run["sessions"]] == [2, 1]


def test_nothing_of_a_repeated_step_is_left_of_the_older_attempt(agent: Agent, client: Any) -> None:
    agent.send(SITES, [1, 2], fields={"amax_max": 1.0})
    again = Agent(client, session="b" * 32).register(SITES)
    again.send([UP], [2], fields={"amax_max": 2.0})  # says nothing of the other site
    assert series(client, "amax_max", UP)["values"] == [1.0, 2.0]
    assert series(client, "amax_max", DOWN)["steps"] == [1]


def test_of_a_step_that_one_session_sends_twice_the_later_batch_counts_in_any_order(agent: Agent) -> None:
    late = agent.body([UP], [1], fields={"amax_max": 2.0}, scalars={"loss": [2.0]}, seq=9)
    early = agent.body([UP], [1], fields={"amax_max": 1.0}, scalars={"loss": [1.0]}, seq=8)
    for body in (late, early):
        assert agent.post(body).status_code == 200
    assert series(agent.client, "amax_max")["values"] == [2.0]
    assert get(agent.client, "/runs/run-1/scalars", name="loss")["values"] == [2.0]


def test_a_step_split_over_two_batches_is_whole(agent: Agent) -> None:
    agent.send([UP], [1], fields={"amax_max": 1.0})
    agent.send([DOWN], [1], fields={"amax_max": 2.0})
    assert series(agent.client, "amax_max", UP)["values"] == [1.0]
    assert series(agent.client, "amax_max", DOWN)["values"] == [2.0]


def test_ranks_merge_as_their_field_merges(agent: Agent, client: Any) -> None:
    other = Agent(client, session="b" * 32, rank=1).register(SITES)
    agent.send([UP], [1], fields={"amax_max": 1.0, "scale_inv_min": 0.5}, scalars={"loss": [1.0]})
    other.send([UP], [1], fields={"amax_max": 4.0, "scale_inv_min": 0.125}, scalars={"loss": [3.0]})
    assert series(client, "amax_max")["values"] == [4.0]
    assert series(client, "scale_inv_min")["values"] == [0.125]
    assert series(client, "num_elements")["values"] == [2000]
    assert series(client, "amax_max", rank=0)["values"] == [1.0]
    assert get(client, "/runs/run-1/scalars", name="loss")["values"] == [2.0]
    assert get(client, "/runs/run-1/scalars", name="loss", rank=1)["values"] == [3.0]


def test_down_sampling_keeps_every_extreme_and_every_kind_of_non_finite(agent: Agent) -> None:
    values = np.sin(np.arange(900) / 7.0)
    values[[123, 456, 789]] = 50.0, -40.0, np.nan
    agent.send([UP], list(range(900)), fields={"amax_max": values})
    got = series(agent.client, "amax_max", points=60)
    assert len(got["steps"]) <= 60
    assert got["stride"] == 45
    assert got["steps"] == sorted(got["steps"])
    assert {123, 456, 789} <= set(got["steps"])
    assert got["nonfinite"] == [[got["steps"].index(789), "nan"]]


@pytest.mark.parametrize("points", [3, 10, 100])
def test_thinning_never_loses_the_largest_or_smallest(points: int) -> None:
    rng = np.random.default_rng(points)
    for n in (1, 2, 99, 1000):
        values, present = rng.normal(size=n), rng.random(n) < 0.8
        index, _ = thin(values, present, points)
        assert len(index) <= max(points, n if n <= points else points)
        if present.any():
            kept = values[index][present[index]]
            assert kept.max() == values[present].max()
            assert kept.min() == values[present].min()


def test_top_names_the_worst_site_first_and_nan_before_all(agent: Agent) -> None:
    agent.send(SITES, [1, 2], fields={"amax_max": [1.0, 7.0, 3.0, 5.0], "tile_noise_ratio_sum": [0.1, 0.2, 0.3, 0.01]})
    top = get(agent.client, "/runs/run-1/top", field="amax_max", n=5)
    assert [(i["module"], i["step"], i["value"]) for i in top["items"]] == [
        ("layers.0.mlp.down", 1, 7.0),
        ("layers.0.mlp.up", 2, 3.0),
    ]
    worst = get(agent.client, "/runs/run-1/top", field="tile_sqnr_db", n=1)["items"][0]
    assert (worst["site"], worst["step"]) == (UP.id, 2)  # small is bad
    agent.send(SITES, [3], fields={"amax_max": [np.nan, np.inf]})
    items = get(agent.client, "/runs/run-1/top", field="amax_max")["items"]
    assert {i["nonfinite"] for i in items} == {"nan", "inf"}
    assert all(i["value"] is None for i in items)


def test_a_heat_map_shows_the_worst_of_each_column_in_data_flow_order(agent: Agent) -> None:
    n = 30
    values = np.arange(2 * n, dtype=float).reshape(n, 2)
    values[7, 1] = np.nan
    agent.send(SITES, list(range(n)), fields={"amax_max": values.reshape(-1)})
    got = get(agent.client, "/runs/run-1/heatmap", field="amax_max", points=10)
    assert [s["id"] for s in got["sites"]] == [UP.id, DOWN.id]
    assert got["steps"] == list(range(0, n, 3))
    assert got["values"][0][0] == 4.0  # the largest of steps 0, 1, 2
    assert got["nonfinite"] == [[1, 2, "nan"]]
    whole = get(agent.client, "/runs/run-1/heatmap", field="amax_max", points=100)
    assert whole["stride"] == 1
    assert whole["values"][0] == [float(v) for v in values[:, 0]]


def test_a_histogram_over_steps_adds_up(agent: Agent) -> None:
    hist = np.zeros((6, 64), dtype=np.int32)
    hist[:, 0], hist[:, 49] = 1, 100
    agent.send([UP], [1, 2, 3, 4, 5, 6], fields={"amax_hist": hist})
    got = get(agent.client, f"/runs/run-1/sites/{UP.id}/histogram")
    assert got["buckets"][:2] == ["0", "2^-47"]
    assert got["buckets"][49] == "2^1"
    assert got["steps"] == [1, 2, 3, 4, 5, 6]
    assert got["counts"][0][0] == 1
    assert got["counts"][0][49] == pytest.approx(100, rel=0.045)
    summed = get(agent.client, f"/runs/run-1/sites/{UP.id}/histogram", points=3)
    assert summed["steps"] == [1, 3, 5]
    assert summed["counts"][0][49] == pytest.approx(200, rel=0.045)


def test_logged_names_are_scalars_too(agent: Agent) -> None:
    agent.send([UP], [1, 2, 3], logs={"aux_loss": [1.0, None, math.inf]})
    got = get(agent.client, "/runs/run-1/scalars", name="aux_loss")
    assert got["values"] == [1.0, None, None]
    assert got["nonfinite"] == [[2, "inf"]]
    answer = agent.client.get("/api/v1/runs/run-1/scalars", params={"name": "other"})
    assert answer.status_code == 422
    assert "aux_loss" in answer.json()["detail"]


def test_sketches_of_gradients_are_not_kept(agent: Agent) -> None:
    told = {f"{GRADIENT_OF}w": [2.0], **{f"{name}0": [0.5] for name in (GRADIENT_GIVEN, GRADIENT_GOT)}}
    agent.send([UP], [1], logs=told | {"aux_loss": [1.0]})
    answer = agent.client.get("/api/v1/runs/run-1/scalars", params={"name": "other"})
    assert "aux_loss" in answer.json()["detail"]
    assert "gradient" not in answer.json()["detail"]


def test_sites_and_runs_are_listed(agent: Agent) -> None:
    sites = get(agent.client, "/runs/run-1/sites")
    assert [s["module"] for s in sites["items"]] == ["layers.0.mlp.up", "layers.0.mlp.down"]
    assert sites["items"][0]["tile"] == [1, 128]
    (run,) = get(agent.client, "/runs")["items"]
    assert run["id"] == "run-1"
    assert (run["num_sites"], run["num_open_incidents"], run["status"], run["world_size"]) == (2, 0, "running", 2)
    assert run["last_step"] is None


def test_lists_continue_at_their_cursor(client: Any) -> None:
    for i in range(7):
        assert Agent(client, run=f"run-{i}").register_run().status_code == 200
    seen: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(4):
        page = get(client, "/runs", limit=2, **cursor)
        seen += [run["id"] for run in page["items"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == [f"run-{i}" for i in reversed(range(7))]
    assert client.get("/api/v1/runs", params={"cursor": "bm9uc2Vuc2U"}).status_code == 422


def test_a_run_is_running_then_stalled_or_ended(agent: Agent, client: Any, app: Any) -> None:
    agent.send([UP], [1])

    def status(now: float) -> str:
        with app.state.engine.connect() as conn:
            found = queries.run(conn, "run-1", now=now)
        assert found is not None
        return str(found["status"])

    assert status(time.time()) == "running"
    assert status(time.time() + 91) == "stalled"
    agent.send([UP], [2], health={"ended": 1.0})
    assert status(time.time() + 91) == "ended"
    Agent(client, session="b" * 32).register_session()
    assert status(time.time()) == "running"  # it was started again


def test_incidents_are_filtered_read_and_looked_after(agent: Agent, client: Any, app: Any, recorder: Any) -> None:
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident(), an_incident(id="i2", severity="info", opened_at=11.0)])
    assert [i["id"] for i in get(client, "/runs/run-1/incidents")["items"]] == ["i2", "i1"]
    assert [i["id"] for i in get(client, "/runs/run-1/incidents", severity="info")["items"]] == ["i2"]
    assert get(client, "/incidents", mode="nothing")["items"] == []
    got = get(client, "/incidents/i1")
    assert got["evidence"][0]["value"] == "inf"
    assert got["evidence"][0]["baseline"] == "nan"
    assert got["url"] == "/incidents/i1"
    assert got["runbook_url"] == "/runbooks/inf-laundering"
    assert get(client, "/runs/run-1")["num_open_incidents"] == 2
    assert agent.send([UP], [6])["captures"] == [{"site": UP.id, "steps": [5, 21]}]

    for _ in range(2):  # idempotent
        assert client.post("/api/v1/incidents/i1/ack").json()["status"] == "acknowledged"
    for _ in range(2):
        assert client.post("/api/v1/incidents/i1/resolve").json()["status"] == "resolved"
    assert client.post("/api/v1/incidents/i1/ack").json()["status"] == "resolved"
    assert [e["kind"] for e in get(client, "/incidents/i1")["events"]] == ["acknowledged", "resolved"]
    assert recorder.resolved == ["i1"]
    assert client.post("/api/v1/incidents/none/ack").status_code == 404


def test_silences_run_out_and_can_be_ended(client: Any) -> None:
    made = client.post("/api/v1/silences", json={"duration_s": 60, "mode": "dead-layer", "comment": "known"})
    assert made.status_code == 201
    (listed,) = get(client, "/silences")["items"]
    assert listed["mode"] == "dead-layer"
    assert client.delete(f"/api/v1/silences/{listed['id']}").status_code == 204
    assert get(client, "/silences")["items"] == []
    assert client.post("/api/v1/silences", json={"duration_s": -1}).status_code == 422


@pytest.mark.parametrize(
    "path",
    [
        "/runs/none",
        "/runs/none/series?field=loss",
        "/runs/none/heatmap?field=amax_max",
        "/runs/run-1/series?field=amax_max&site=5",
        f"/runs/run-1/sites/{UP.id}/tile-map",
        "/runs/run-1/sites/99/histogram",
        "/incidents/none",
    ],
)
def test_what_is_not_there_is_a_404_problem(agent: Agent, path: str) -> None:
    answer = agent.client.get(f"/api/v1{path}")
    assert answer.status_code == 404
    assert answer.json()["remedy"]


@pytest.mark.parametrize(
    "query",
    ["site=x&field=amax_max", "field=amax_max&from=-1", "field=loss&points=0", "site=1", f"field=loss&to={1 << 64}"],
)
def test_a_question_that_makes_no_sense_is_a_422_problem(agent: Agent, query: str) -> None:
    answer = agent.client.get(f"/api/v1/runs/run-1/series?{query}")
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["rule"]


def test_a_filter_that_is_misspelt_is_refused_and_an_empty_one_filters_nothing(client: Any, app: Any) -> None:
    Agent(client).register([UP])
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident()])
    for path in ("/api/v1/incidents", "/api/v1/runs/run-1/incidents"):
        everything = client.get(path).json()["items"]
        assert len(everything) == 1
        assert client.get(f"{path}?status=&severity=&mode=").json()["items"] == everything
        for wrong in ("status=opne", "severity=critcal"):
            answer = client.get(f"{path}?{wrong}")
            assert answer.status_code == 422
            assert wrong.partition("=")[2] in answer.json()["detail"]
            assert "'open'" in answer.json()["rule"] or "'critical'" in answer.json()["rule"]
