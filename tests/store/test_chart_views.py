"""What the dashboards' functions make of a run: the worst of a bucket, nothing lost, the newest attempt, no row too many."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from collector.filled_run import an_incident
from store.filled_store import fill
from store.kit import SITES, UP, Feed, made_up
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.collector_info import PUBLIC_URL, publish
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.db.sql_chart_views import OCTAVES, SMALLEST_IS_WORST, create_chart_views, drop_chart_views
from fp8watch_server.db.sql_views import FIELDS, grant_reader
from fp8watch_server.store import queries


@pytest.fixture
def feed() -> Iterator[Feed]:
    with fresh_database("postgresql") as url:
        made = Feed(make_engine(url))
        yield made
        made.engine.dispose()


def ask(feed: Feed, text: str, **given: Any) -> list[Any]:
    with feed.engine.connect() as conn:
        return list(conn.execute(sa.text(text), given).all())


def worst(name: str, values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    if name in t.BLOCK_COUNTS:
        return math.fsum(known) if known else None
    if any(math.isnan(v) for v in known):
        return math.nan
    return None if not known else min(known) if name in SMALLEST_IS_WORST else max(known)


def series(feed: Feed, field: str, low: int, high: int) -> dict[int, float | None]:
    """What the API says, NaN and Inf put back."""
    with feed.engine.connect() as conn:
        got = queries.series(conn, "run-1", UP.id, field, low, high, points=100_000)
    marks = {i: float(name) for i, name in got["nonfinite"]}
    return {step: marks.get(i, v) for i, (step, v) in enumerate(zip(got["steps"], got["values"], strict=True))}


@pytest.mark.parametrize(
    ("until", "num_steps", "points"), [(None, 1000, 500), (None, 1000, 7), (250, 100, 9), (250, 100, 1)]
)
def test_a_bucket_of_a_site_is_the_worst_of_its_steps(
    feed: Feed, until: int | None, num_steps: int, points: int
) -> None:
    fields = made_up(np.random.default_rng(5), 300, len(SITES))
    fields["tile_noise_ratio_sum"][:: 3 * 41] = np.nan  # of the first site: for min, NaN is the largest number of SQL
    feed.send(feed.agent(), list(range(300)), fields=fields)
    feed.compact(everything=True)
    assert any(v is not None and math.isnan(v) for v in series(feed, "tile_sqnr_db", 0, 299).values())
    high = 299 if until is None else until
    low = max(0, high - num_steps + 1)
    width = max(1, math.ceil((high - low + 1) / points))
    rows = ask(
        feed,
        "SELECT * FROM grafana.site_series('run-1', :site, :until, :num, :points)",
        site=UP.id,
        until=until,
        num=num_steps,
        points=points,
    )
    assert len(rows) <= points + 1
    for field in FIELDS:
        exact = series(feed, field, low, high)
        want: dict[int, list[float | None]] = {}
        for step, value in exact.items():
            want.setdefault(step // width * width, []).append(value)
        got = {row.step: getattr(row, field) for row in rows}
        assert list(got) == sorted(want)
        for step, values in want.items():
            assert got[step] == pytest.approx(worst(field, values), nan_ok=True), (field, step)


def test_the_health_of_a_site_is_the_worst_of_the_span(feed: Feed) -> None:
    fill(feed, 300, ranks=2)
    feed.compact(everything=True)
    rows = ask(feed, "SELECT * FROM grafana.site_health('run-1', 280, 200)")
    assert {row.site for row in rows} == {s.id for s in SITES}
    (mine,) = [row for row in rows if row.site == UP.id]
    for field in FIELDS:
        want = worst(field, list(series(feed, field, 81, 280).values()))
        assert getattr(mine, field) == pytest.approx(want, nan_ok=True), field
    bad = [step for step, n in series(feed, "num_nonfinite", 81, 280).items() if n]
    bad += [step for step, n in series(feed, "num_sentinel_tiles", 81, 280).items() if n]
    assert mine.first_bad_step == min(bad)


def test_octaves_count_every_record_once_and_fill_zeros_in(feed: Feed) -> None:
    rng = np.random.default_rng(3)
    agent = feed.agent()
    steps = [*range(40), *range(60, 100)]  # nothing in between
    exact = [0.0, 2.0**-40, 2.0**-39, 2.0, 3.999, 4.0, 2.0**24, 2.0**26, np.inf, np.nan]
    amax = np.resize(np.array(exact, dtype=np.float32), len(steps) * len(SITES))
    feed.send(agent, steps, fields={**made_up(rng, len(steps), len(SITES)), "amax_max": amax})
    feed.compact(everything=True)
    rows = ask(feed, "SELECT * FROM grafana.octaves('run-1', NULL, 1000, 'all', 10)")
    assert [row.step for row in rows] == list(range(0, 100, 10))
    totals = np.array([list(row)[1:] for row in rows]).sum(axis=0)
    assert totals.sum() == len(amax), "every record once"
    assert [sum(list(row)[1:]) for row in rows][4:6] == [0, 0]
    want = dict.fromkeys(OCTAVES, 0)
    for value in amax.tolist():
        top = math.isnan(value) or value >= 2.0 ** OCTAVES[-1]
        want[OCTAVES[-1] if top else max(k for k in OCTAVES if k == OCTAVES[0] or value >= 2.0**k)] += 1
    assert dict(zip(OCTAVES, totals.tolist(), strict=True)) == want
    assert ask(feed, "SELECT * FROM grafana.octaves('run-1', NULL, 1000, 'weight', 10)")[0][1:] == (0,) * len(OCTAVES)


def test_scalars_are_of_the_newest_attempt_and_say_what_they_leave_out(feed: Feed) -> None:
    first, second = feed.agent(), feed.agent(attempt=2)
    other = feed.agent(rank=1, attempt=1)
    feed.send(first, list(range(10)), scalars={"loss": [5.0] * 10, "grad_norm": [1.0] * 9 + [math.inf]})
    feed.send(other, list(range(6)), scalars={"loss": [7.0] * 6})
    feed.send(second, [6, 7], scalars={"loss": [1.0, math.nan]})
    rows = ask(feed, "SELECT * FROM grafana.scalars('run-1', 9, 1000, 1000)")
    assert [row.loss for row in rows] == [6.0] * 6 + [1.0, None, 5.0, 5.0]
    assert [row.nonfinite_steps for row in rows] == [0] * 7 + [1, 0, 1]
    (all_of_it,) = ask(feed, "SELECT * FROM grafana.scalars('run-1', 9, 1000, 1)")
    assert (all_of_it.step, all_of_it.nonfinite_steps, all_of_it.grad_norm) == (0, 2, 1.0)
    assert ask(feed, "SELECT * FROM grafana.scalars('run-1', NULL, 3, 10)")[-1].step == 7, (
        "the newest attempt ends there"
    )
    assert ask(feed, "SELECT * FROM grafana.scalars('nobody', NULL, 3, 10)") == []


def test_views_bear_what_is_half_there(feed: Feed) -> None:
    """A session that has sent nothing, an incident of a whole run, a run without steps."""
    feed.agent()
    whole = an_incident(place={"ranks": [], "module": None, "tile": None}, sites=[], fix=None)
    with writing(feed.engine) as conn:
        conn.execute(sa.insert(t.incident), [whole])
        conn.execute(sa.update(t.session).values(health=None))  # JSON's null, which is not SQL's
    (rank,) = ask(feed, "SELECT * FROM grafana.rank")
    assert (rank.rank, rank.dropped, rank.produced) == (0, 0, None)
    (found,) = ask(feed, "SELECT * FROM grafana.incident_detail")
    assert (found.site, found.module, found.fix, found.tile_row, found.rank) == (None, None, None, None, None)
    assert found.time == found.opened_at
    (run,) = ask(feed, "SELECT * FROM grafana.run_now")
    assert (run.last_step, run.num_incidents, run.num_sites) == (None, 1, len(SITES))
    assert ask(feed, "SELECT * FROM grafana.scalars('run-1', NULL, 100)") == []
    for name in ("site_health('run-1', NULL, 9)", "octaves('run-1', NULL, 9, 'all')"):
        assert ask(feed, f"SELECT * FROM grafana.{name}") == []


def test_the_status_of_a_run_is_that_of_the_api(feed: Feed) -> None:
    import time

    now = time.time()
    for run, age, ended in (("alive", 5, False), ("silent", 500, False), ("gone", 500, True), ("restarted", 5, True)):
        feed.now = now - age
        feed.agent(run)
        with writing(feed.engine) as conn:
            conn.execute(sa.update(t.session).where(t.session.c.run_id == run).values(ended=ended))
        if run == "restarted":
            feed.agent(run, attempt=2)
    with feed.engine.connect() as conn:
        want = {run["id"]: run["status"] for run in queries.runs(conn)}
    assert want == {"alive": "running", "silent": "stalled", "gone": "ended", "restarted": "running"}
    assert dict(tuple(row) for row in ask(feed, "SELECT run_id, status FROM grafana.run_now")) == want


def test_the_collector_says_where_it_is(feed: Feed) -> None:
    publish(feed.engine, PUBLIC_URL, "")
    assert ask(feed, "SELECT * FROM grafana.collector") == [("http://127.0.0.1:8420",)]
    for url in ("https://a.example.org", "https://b.example.org/x'y", "https://b.example.org/x'y"):
        publish(feed.engine, PUBLIC_URL, url)
        assert ask(feed, "SELECT * FROM grafana.collector") == [(url,)]


def test_a_role_of_before_reads_what_came_since(feed: Feed) -> None:
    role = f"reader_{feed.engine.url.database}"
    try:
        with writing(feed.engine) as conn:
            drop_chart_views(conn)
            grant_reader(conn, role)
            create_chart_views(conn)
        with feed.engine.connect() as conn:
            conn.exec_driver_sql(f'SET ROLE "{role}"')
            for name in ("run_now", "site_now", "rank", "incident_detail", "collector", "site_health('x', NULL, 1)"):
                conn.exec_driver_sql(f"SELECT * FROM grafana.{name}").all()
            with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
                conn.exec_driver_sql("SELECT * FROM fact")
    finally:
        with writing(feed.engine) as conn:
            conn.exec_driver_sql(f'DROP OWNED BY "{role}"')
            conn.exec_driver_sql(f'DROP ROLE "{role}"')
