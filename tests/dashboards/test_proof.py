"""Every query of every dashboard, asked of a real PostgreSQL and a real Prometheus that a real broken run has filled."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from dashboards.columns import COLUMNS, EMPTY
from dashboards.real_run import FAULT_MODULE, FAULT_STEP, STEPS, RealRun, ask, binary, real_run, until

from dashboards import boards
from dashboards.boards import Query

BOARDS = boards.load()
SQL = boards.queries(BOARDS, boards.POSTGRES)
PROMQL = [q for q in boards.queries(BOARDS, boards.PROMETHEUS) if q.panel is not None]
VARIABLES = [q for q in boards.queries(BOARDS, boards.PROMETHEUS) if q.panel is None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    with real_run(tmp_path_factory.mktemp("proof")) as made:
        yield made


@pytest.fixture(scope="module")
def chosen(run: RealRun) -> dict[str, str | list[str]]:
    """What a person would have chosen: the run, and the site that its incident names."""
    every = {"severity": ["critical", "warning", "info"], "status": ["open", "acknowledged", "resolved"]}
    with run.engine.connect() as conn:
        site = conn.execute(
            sa.text("SELECT site FROM grafana.incident_detail WHERE run_id = :run"), {"run": run.run_id}
        )
        return {"run": run.run_id, "until": "", "steps": "2000", "operand": "all", "site": str(site.scalar()), **every}


def answer(run: RealRun, query: Query, chosen: dict[str, str | list[str]]) -> list[dict[str, Any]]:
    """Rows, the columns in their order."""
    with run.engine.connect() as conn:
        text = boards.sql(query.text, chosen, "2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z")
        return [dict(row) for row in conn.exec_driver_sql(text.replace("%", "%%")).mappings()]


def named(name: str) -> Query:
    """One query by its dashboard and panel."""
    (found,) = [q for q in SQL if str(q) == name]
    return found


def test_the_columns_of_every_query_are_written_down() -> None:
    assert {str(q) for q in SQL} == set(COLUMNS)
    assert len({str(q) for q in SQL}) == len(SQL)


@pytest.mark.parametrize("query", SQL, ids=str)
def test_an_sql_query_has_its_columns_and_something_in_them(
    run: RealRun, chosen: dict[str, str | list[str]], query: Query
) -> None:
    rows = answer(run, query, chosen)
    assert rows
    assert list(rows[0]) == COLUMNS[str(query)]
    for name in COLUMNS[str(query)]:
        assert (str(query), name) in EMPTY or any(row[name] is not None for row in rows), f"{name} is empty"
    if query.over_time:
        times = [row["time"] for row in rows]
        assert times == sorted(times)
        epoch = all(isinstance(t, datetime.datetime) or float(t) > 1e9 for t in times)
        assert epoch, "a time, or seconds since 1970"
        assert sum(not isinstance(v, str) for v in list(rows[0].values())[1:]) == 1, "one number"
    if query.panel is not None and query.panel["type"] in ("trend", "heatmap"):
        steps = [row["step"] for row in rows]
        assert next(iter(rows[0])) == "step", "x comes first"
        assert steps == sorted(set(steps)), "x ascends"
        assert all(isinstance(v, int | float | None) for row in rows for v in row.values()), "one wide frame of numbers"
        if query.panel["type"] == "heatmap":
            assert len({b - a for a, b in itertools.pairwise(steps)}) == 1, "a uniform stride"
            assert None not in {v for row in rows for v in row.values()}, "zeros are filled in"


def test_the_dashboards_show_the_injected_failure(run: RealRun, chosen: dict[str, str | list[str]]) -> None:
    (incident,) = answer(run, named("run: Incidents A"), chosen)
    assert (incident["mode"], incident["module"], incident["first_step"]) == (
        "inf-laundering",
        FAULT_MODULE,
        FAULT_STEP,
    )
    assert "filter_fn" in incident["fix"]
    (listed,) = answer(run, named("incidents: Incidents A"), chosen)
    assert listed["time"] == answer(run, named("run: annotation Incidents"), chosen)[0]["time"]
    sick = answer(run, named("layers: Health of all sites A"), chosen)
    assert [r["label"].split()[0] for r in sick[:2]] == [FAULT_MODULE] * 2
    assert [r["first_bad_step"] for r in sick[:3]] == [FAULT_STEP, FAULT_STEP, None]
    assert sick[0]["amax_max"] == math.inf
    now = answer(run, named("run: Worst sites now A"), chosen)
    assert now[0]["label"].split()[0] == FAULT_MODULE
    counts = answer(run, named("layers: Counts of the site A"), chosen)
    assert [r["step"] for r in counts if r["num_nonfinite"]] == [FAULT_STEP]
    worst = answer(run, named("layers: Non-finite elements of the worst sites over time A"), chosen)
    assert {r["metric"].split()[0] for r in worst if r["value"]} == {FAULT_MODULE}
    octaves = answer(run, named("layers: Largest amax of the sites over steps A"), chosen)
    assert [r["step"] for r in octaves if r["2^24"]] == [FAULT_STEP]
    only = answer(run, named("layers: Health of all sites A"), {**chosen, "operand": "weight"})
    assert 0 < len(only) < len(sick)
    assert answer(run, named("fleet: Runs A"), chosen)[0]["run_id"] == run.run_id


def test_the_dashboards_say_what_the_api_says(run: RealRun, chosen: dict[str, str | list[str]]) -> None:
    path = f"/api/v1/runs/{run.run_id}"
    loss = run.client.get(f"{path}/scalars?name=loss&from=0&to={STEPS}&points=1000").json()
    rows = answer(run, named("run: Loss over steps A"), chosen)
    assert [r["step"] for r in rows] == loss["steps"]
    assert [r["loss"] for r in rows] == pytest.approx(loss["values"])
    for field, panel in (("tile_sqnr_db", "Tile SQNR"), ("gain_error", "Gain error")):
        series = run.client.get(
            f"{path}/series?site={chosen['site']}&field={field}&from=0&to={STEPS}&points=1000"
        ).json()
        rows = answer(run, named(f"layers: {panel} of the site A"), chosen)
        assert [r[field] for r in rows] == pytest.approx(series["values"], nan_ok=True)
    told = run.client.get(path).json()
    (status,) = answer(run, named("run: Status A"), chosen)
    assert status["status"] == told["status"] == "ended"
    assert answer(run, named("run: variable collector"), chosen)[0]["public_url"] == run.url


def test_a_span_that_is_chosen_is_the_span_that_is_shown(run: RealRun, chosen: dict[str, str | list[str]]) -> None:
    part = {**chosen, "until": "20", "steps": "10"}
    for name in (
        "run: Loss over steps A",
        "layers: Clip depth of the site A",
        "layers: Largest amax of the sites over steps A",
    ):
        assert [row["step"] for row in answer(run, named(name), part)] == list(range(11, 21)), name
    for strange in ({"run": "o'; DROP TABLE run; --"}, {"until": "999999"}, {"site": ""}, {"site": "-1"}):
        for q in SQL:
            answer(run, q, {**chosen, **strange})  # an empty panel, not an error


def _finite(run: RealRun, expr: str) -> list[Any]:
    assert run.prometheus is not None
    found = ask(run.prometheus, "query", query=expr)["result"]
    return [r for r in found if math.isfinite(float(r["value"][1]))]


@pytest.mark.parametrize("query", PROMQL, ids=str)
def test_a_promql_query_has_series_with_values(run: RealRun, query: Query) -> None:
    binary("prometheus")
    expr = boards.promql(query.text)

    def asked() -> list[Any]:
        found = _finite(run, expr)
        if not found:  # a rate of the last minute needs that something happens in it
            run.go_on()
        return found

    found = until(asked, f"a value of {expr}")
    legend = next(t for t in (query.panel or {})["targets"] if t["expr"] == query.text)["legendFormat"]
    for label in re.findall(r"\{\{(\w+)\}\}", legend):
        assert all(label in r["metric"] for r in found), f"the legend names {label}"
    assert len({tuple(sorted(r["metric"].items())) for r in found}) == len(found)


def test_a_wrong_column_and_a_wrong_metric_would_be_seen(run: RealRun, chosen: dict[str, str | list[str]]) -> None:
    loss = named("run: Loss over steps A")
    with pytest.raises(sa.exc.ProgrammingError, match="does not exist"):
        answer(run, replace(loss, text=loss.text.replace("loss", "lost")), chosen)
    binary("prometheus")
    for query in PROMQL:
        assert _finite(run, boards.promql(query.text).replace("fp8watch_", "fp8watch_no_")) == [], str(query)


def test_the_variables_of_prometheus_have_values(run: RealRun) -> None:
    binary("prometheus")
    assert run.prometheus is not None
    for query in VARIABLES:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", query.text)
        assert found, query.text
        values = ask(run.prometheus, f"label/{found[2]}/values", **{"match[]": found[1]})
        assert values, query.text


def test_prometheus_takes_the_configuration_and_the_rules_that_are_shipped(run: RealRun) -> None:
    binary("prometheus")
    assert run.prometheus is not None
    (target,) = ask(run.prometheus, "targets", state="active")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    rules = [r for g in until(lambda: ask(run.prometheus or "", "rules")["groups"], "rules") for r in g["rules"]]
    assert len(rules) > 5
    assert {r["health"] for r in rules} <= {"ok", "unknown"}


def test_promtool_is_content_with_the_metrics(run: RealRun) -> None:
    text = run.client.get("/metrics").text
    command = [binary("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
