"""/metrics: the names of the contract, valid exposition, bounded, cached."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from collector.filled_run import an_incident
from collector.kit import Agent, make_site, on_sqlite
from prometheus_client.parser import text_string_to_metric_families

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.db.shards import Shards
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.observability import metrics, run_metrics, site_metrics
from fp8watch_server.observability.series_budget import SeriesBudget

pytestmark = on_sqlite
UP_ROW, UP_COLUMN = make_site("up", order=0), make_site("up", direction="columnwise", order=1)

NAMES = {
    "fp8watch_run_info",
    "fp8watch_run_step",
    "fp8watch_run_last_seen_timestamp_seconds",
    "fp8watch_loss",
    "fp8watch_grad_norm",
    "fp8watch_incidents_open",
    "fp8watch_incidents_total",
    "fp8watch_nonfinite_elements_total",
    "fp8watch_saturated_elements_total",
    "fp8watch_sentinel_tiles_total",
    "fp8watch_underflow_ratio",
    "fp8watch_amax_max",
    "fp8watch_scale_inv_max",
    "fp8watch_scale_inv_min",
    "fp8watch_tile_sqnr_db",
    "fp8watch_agent_dropped_records_total",
    "fp8watch_agent_dropped_tile_maps_total",
    "fp8watch_agent_overhead_ratio",
    "fp8watch_collector_ingest_batches_total",
    "fp8watch_collector_ingest_bytes_total",
    "fp8watch_collector_inflight_bytes",
    "fp8watch_notifications_total",
    "fp8watch_otlp_exports_total",
    "fp8watch_series_dropped_total",
}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for s in family.samples:
            key = (s.name, tuple(sorted(s.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = s.value
    return found


@pytest.fixture
def filled(client: Any, app: Any) -> Agent:
    agent = Agent(client).register([UP_ROW, UP_COLUMN])
    health = {"dropped_ring_full": 3.0, "dropped_maps_queue_full": 1.0, "overhead_ratio": 0.004}
    fields = {"num_saturated": [1, 5, 2, 6], "num_underflow": 90, "amax_max": [1.0, 1.0, 2.0, 3.0]}
    fields["tile_noise_ratio_sum"] = 2.0**-7  # of ten tiles
    scalars = {"loss": [2.5, 2.25], "grad_norm": [1.0, 0.5]}
    agent.send([UP_ROW, UP_COLUMN], [1, 2], health=health, fields=fields, scalars=scalars)
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident(), an_incident(id="i2", status="resolved")])
        message = {"run_id": "run-1", "id": "m", "incident_id": "i1", "kind": "firing", "idempotency_key": "k"}
        row = {**message, "channel": "slack", "payload": {}, "created_at": 1.0, "state": "sent"}
        waiting = {**row, "id": "n", "idempotency_key": "l", "state": "pending"}
        conn.execute(sa.insert(t.outbox), [row, waiting])
    app.state.worker.drain()
    return agent


def test_every_name_of_the_contract_is_there(filled: Agent) -> None:
    answer = filled.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    got = samples(answer.text)
    assert {name for name, _ in got} >= NAMES
    run, site = ("run", "run-1"), (("layer", "up"), ("operand", "input"), ("run", "run-1"))
    assert got["fp8watch_run_info", (("backend", "cpu"), ("format", "E4M3"), ("recipe", "blockwise"), run)] == 1
    assert got["fp8watch_run_step", (run,)] == 2
    assert got["fp8watch_loss", (run,)] == 2.25
    assert got["fp8watch_saturated_elements_total", site] == 11  # the direction that clips more
    assert got["fp8watch_amax_max", site] == 3.0
    of_format = (("format", "E4M3"), *site)
    assert got["fp8watch_underflow_ratio", of_format] == pytest.approx(0.1)
    assert got["fp8watch_tile_sqnr_db", of_format] == pytest.approx(10 * math.log10(1280))
    incident = (("mode", "inf-laundering"), run, ("severity", "critical"))
    assert (got["fp8watch_incidents_open", incident], got["fp8watch_incidents_total", incident]) == (1, 2)
    lost = {(name, labels): value for (name, labels), value in got.items() if "_agent_dropped_" in name}
    assert lost == {
        ("fp8watch_agent_dropped_records_total", (("reason", "ring_full"), run)): 3,
        ("fp8watch_agent_dropped_tile_maps_total", (("reason", "queue_full"), run)): 1,
    }
    assert got["fp8watch_agent_overhead_ratio", (run,)] == 0.004
    assert got["fp8watch_collector_ingest_batches_total", (("outcome", "accepted"),)] == 1
    notified = {labels: value for (name, labels), value in got.items() if name == "fp8watch_notifications_total"}
    assert notified == {(("channel", "slack"), ("outcome", "sent")): 1}  # what still waits has no outcome yet
    assert got["fp8watch_collector_commit_seconds_count", ()] == 1


def test_no_label_names_a_tile_a_step_or_a_rank(filled: Agent) -> None:
    labels = {name for _, pairs in samples(filled.client.get("/metrics").text) for name, _ in pairs}
    assert labels <= {"run", "recipe", "format", "backend", "layer", "operand", "mode", "severity", "reason"} | {
        "outcome",
        "channel",
        "signal",
        "refused",
        "le",
    }


def test_totals_add_up_over_batches_and_ranks(filled: Agent, app: Any) -> None:
    other = Agent(filled.client, session="b" * 32, rank=1).register([UP_ROW])
    other.send([UP_ROW], [2], fields={"num_saturated": 100, "amax_max": np.nan})
    app.state.worker.drain()
    got = samples(filled.client.get("/metrics").text)
    site = (("layer", "up"), ("operand", "input"), ("run", "run-1"))
    assert got["fp8watch_saturated_elements_total", site] == 103
    assert np.isnan(got["fp8watch_amax_max", site])  # of the same step on two ranks the worse


def test_what_agents_cost_is_that_of_sessions_that_go_on(
    filled: Agent, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was started again with less to look at; the agent that it had before says nothing any more."""
    monkeypatch.setattr(metrics, "CACHE_S", 0.0)

    def overhead() -> float | None:
        return samples(filled.client.get("/metrics").text).get(("fp8watch_agent_overhead_ratio", (("run", "run-1"),)))

    filled.send([UP_ROW], [3], health={"overhead_ratio": 0.03})
    assert overhead() == 0.03
    again = Agent(filled.client, session="b" * 32, facts={"restart_count": 1}).register([UP_ROW])
    again.send([UP_ROW], [4], health={"overhead_ratio": 0.005})
    assert overhead() == 0.005
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.session).values(ended=True))
    assert overhead() is None


def test_series_are_bounded_and_what_was_left_out_is_counted(filled: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_SERIES", 106)
    got = samples(filled.client.get("/metrics").text)
    assert got["fp8watch_series_dropped_total", ()] >= 8
    assert not any(name == "fp8watch_amax_max" for name, _ in got)
    assert 0 < len([labels for _, labels in got if "run" in dict(labels)]) <= 6  # a hundred are the collector's own
    monkeypatch.setattr(metrics, "CACHE_S", 0.0)
    again = samples(filled.client.get("/metrics").text)
    assert again["fp8watch_series_dropped_total", ()] == 2 * got["fp8watch_series_dropped_total", ()]


def test_what_does_not_fit_any_more_is_not_read(filled: Agent, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run takes what there is; of the others the sites are counted, and their values are not read."""
    for i in range(3):
        Agent(filled.client, run=f"later-{i}", session=f"{i}" * 32).register([UP_ROW, UP_COLUMN]).send([UP_ROW], [1])
    app.state.worker.drain()
    with app.state.engine.connect() as conn:
        read: list[str] = []
        sa.event.listen(conn, "before_cursor_execute", lambda *args: read.append(args[2]))
        budget = SeriesBudget(9)
        families = list(site_metrics.sites(conn, ["later-0", "later-1", "later-2", "run-1"], budget))
    assert {s.labels["run"] for family in families for s in family.samples} == {"later-0"}
    assert len([sql for sql in read if "newest" in sql]) == 1
    assert budget.dropped == 3 * (len(site_metrics.COUNTERS) + len(site_metrics.GAUGES))


def test_the_newest_loss_is_looked_for_near_the_last_step_alone(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CACHE_S", 0.0)
    monkeypatch.setattr(run_metrics, "NEWEST_STEPS", 4)

    def loss() -> float | None:
        return samples(client.get("/metrics").text).get(("fp8watch_loss", (("run", "run-1"),)))

    agent = Agent(client).register([UP_ROW])
    assert loss() is None
    agent.send([UP_ROW], [1], scalars={"loss": [2.5]})
    agent.send([UP_ROW], [2, 3, 4], scalars={"lr": [1.0] * 3})
    assert loss() == 2.5
    agent.send([UP_ROW], [5], scalars={"lr": [1.0]})
    assert loss() is None
    agent.send([UP_ROW], [6], scalars={"loss": [float("nan")]})
    assert math.isnan(loss() or 0.0)
    monkeypatch.setattr(run_metrics, "NEWEST_ROWS", 1)
    agent.send([UP_ROW], [7], scalars={"lr": [1.0]})
    started = metrics.FleetCollector(Shards(app.state.engine), IngestStats()).collect()
    assert [family.samples for family in started if family.name == "fp8watch_loss"] == [[]]
    again = Agent(client, session="b" * 32, facts={"restart_count": 1}).register([UP_ROW])
    again.send([UP_ROW], [6], scalars={"loss": [1.5]})
    assert loss() == 1.5


def test_of_a_run_that_goes_back_in_place_the_newest_values_are_those_of_where_it_is(
    client: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CACHE_S", 0.0)
    agent = Agent(client).register([UP_ROW])

    def told() -> tuple[float | None, ...]:
        app.state.worker.drain()
        got = samples(client.get("/metrics").text)
        run = (("run", "run-1"),)
        layer = (("layer", "up"), ("operand", "input"), *run)
        return got[("fp8watch_run_step", run)], got.get(("fp8watch_loss", run)), got[("fp8watch_amax_max", layer)]

    agent.send([UP_ROW], [*range(101)], scalars={"loss": [2.0] * 100 + [math.nan]}, fields={"amax_max": math.inf})
    assert str(told()) == "(100.0, nan, inf)"
    monkeypatch.setattr(run_metrics, "NEWEST_ROWS", 4)
    for steps, loss in ((range(50, 61), None), (range(61, 65), 1.25)):
        scalars = {"lr": [0.1] * len(steps)} if loss is None else {"loss": [loss] * len(steps)}
        agent.send([UP_ROW], [*steps], scalars=scalars, fields={"amax_max": 1.5})
        assert told() == (steps[-1], loss, 1.5)
    assert client.get("/api/v1/runs/run-1").json()["last_step"] == 64


def test_a_loss_that_many_ranks_log_now_and_then_stays(client: Any, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a row of each rank and step, and the newest of them are of less steps the more ranks there are."""
    monkeypatch.setattr(metrics, "CACHE_S", 0.0)
    monkeypatch.setattr(run_metrics, "NEWEST_ROWS", 4)
    monkeypatch.setattr(run_metrics, "LATE_STEPS", 8)

    def loss() -> float | None:
        return samples(client.get("/metrics").text).get(("fp8watch_loss", (("run", "run-1"),)))

    ranks = [Agent(client, session=f"{rank}" * 32, rank=rank).register([UP_ROW]) for rank in range(4)]
    for first, logged in ((1, 2.5), (9, None), (17, 1.5)):  # a loss at the first step of eight
        for rank, agent in enumerate(ranks):
            scalars = {"lr": [1.0] * 8}
            if rank == 3 and logged is not None:
                agent.send([UP_ROW], [first], scalars={"lr": [1.0], "loss": [logged]})
                agent.send([UP_ROW], list(range(first + 1, first + 8)), scalars={"lr": [1.0] * 7})
            else:
                agent.send([UP_ROW], list(range(first, first + 8)), scalars=scalars)
            if first == 1 and agent is ranks[0]:
                assert loss() is None
        for _ in range(2):
            assert loss() == (2.5 if first < 17 else 1.5)


def test_it_is_made_at_most_every_five_seconds(filled: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    first = filled.client.get("/metrics").text
    filled.send([UP_ROW], [3], scalars={"loss": [9.0]})
    assert filled.client.get("/metrics").text == first
    monkeypatch.setattr(metrics, "CACHE_S", 0.0)
    assert filled.client.get("/metrics").text != first


def test_a_hostile_name_is_one_label_and_no_line_of_its_own(client: Any, app: Any) -> None:
    module = 'up"} 1\n# TYPE fp8watch_loss counter\nfp8watch_loss{run="x\\\\"} 7 \\ \u2028<b>'
    site = make_site(module)
    run = 'jobs/"7"\\n{} \u2028é'
    agent = Agent(client, run=run)
    agent.register([site]).send([site], [1], scalars={"loss": [2.5]})
    app.state.worker.drain()
    got = samples(client.get("/metrics").text)
    assert {dict(pairs)["run"] for _, pairs in got if "run" in dict(pairs)} == {run}
    assert {dict(pairs)["layer"] for _, pairs in got if "layer" in dict(pairs)} == {module}
    assert got["fp8watch_loss", (("run", run),)] == 2.5
