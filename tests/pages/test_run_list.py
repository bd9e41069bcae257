"""The list of runs: what needs somebody first, searched, filtered and paged by the database, ten thousand as well as ten."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from pages import synthetic
from pages.collector import make_app, serving
from pages.many_runs import fill, work_of
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.pages import page_queries
from fp8watch_server.pages.what_helped import what_helped
from fp8watch_server.store import cause_list, run_list
from fp8watch_server.store.run_list import Wanted

NUM_RUNS, NUM_INCIDENTS = 10_000, 5_000
NOW = 1_000_000.0
MOST_STEPS = {"sqlite": 20_000, "postgresql": 2_000}
"""In thousands: four times what is needed, and a small part of what runs times incidents would be."""


@pytest.fixture
def client(tmp_path: Any) -> Iterator[httpx.Client]:
    with serving(make_app(tmp_path)) as client:
        yield client


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def many(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """Two hundred runs in a database of each kind."""
    with fresh_database(request.param) as url:
        engine = make_engine(url)
        fill(engine, 200, 150, NOW)
        yield engine
        engine.dispose()


def find(engine: sa.Engine, **wanted: Any) -> run_list.Found:
    with engine.connect() as conn:
        return run_list.find(conn, Wanted(**wanted), now=NOW)


def ids(engine: sa.Engine, **wanted: Any) -> list[str]:
    return [run["id"] for run in find(engine, **wanted).runs]


def test_what_needs_somebody_comes_first_whether_it_runs_or_has_ended(many: sa.Engine) -> None:
    found = find(many)
    needs = [run["need"] for run in found.runs]
    assert needs == sorted(needs, reverse=True)
    assert run_list.CRITICAL_UNSEEN in needs
    assert {run["status"] for run in found.runs if run["need"] >= run_list.CRITICAL_UNSEEN} == {"ended"}
    (stuck,) = (run for run in found.runs if run["need"] == run_list.NOT_WATCHING)
    assert (stuck["id"], stuck["not_watching"]) == ("run-00030", "no step has ended")
    assert {run["status"] for run in found.runs if run["need"] == run_list.SILENT} == {"stalled"}
    assert found.num_need == sum(len([r for r in find(many, page=p).runs if r["need"]]) for p in (1, 2, 3, 4))


def test_pages_hold_every_run_once_and_a_page_after_the_last_is_the_last(many: sa.Engine) -> None:
    pages = [ids(many, page=p, sort="name") for p in (1, 2, 3, 4)]
    assert [len(page) for page in pages] == [50] * 4
    assert len({i for page in pages for i in page}) == find(many).num_runs == 200
    assert ids(many, page=99, sort="name") == pages[-1]


def test_search_and_filters(many: sa.Engine) -> None:
    with many.connect() as conn:
        said = run_list.choices(conn)
    assert said["tag"][:2] == ["sweep-0", "sweep-1"]
    assert (said["owner"], said["recipe"]) == (["ann"], ["blockwise", "mxfp8"])
    assert ids(many, q="SEED-00017") == ["run-00017"]
    assert ids(many, q="node-17 llama-1b") == ["run-00057"]
    assert ids(many, q="100%") == []
    assert set(ids(many, tag="sweep-3")) == {f"run-{i:05d}" for i in range(3, 200, 12)}
    assert set(ids(many, host="node-39", recipe="mxfp8")) == {f"run-{i:05d}" for i in range(39, 200, 40)}
    assert set(ids(many, owner="ann")) == {"run-00014"} | {f"run-{2 * k % 200:05d}" for k in range(107, 150, 100)}
    assert find(many, mode="mode-1").num_runs == len({2 * k % 200 for k in range(1, 150, 24)})
    assert {run["status"] for run in find(many, status="running").runs} == {"running"}
    assert find(many, severity="critical", mode="mode-1").num_runs == 0  # of one incident, not of two
    assert find(many, status="nonsense").num_runs == 200


def test_a_run_is_held_against_the_newest_before_it_of_its_name_else_the_newest(many: sa.Engine) -> None:
    with many.connect() as conn:
        run: Any = {"created_at": NOW - 50, "name": "llama-6b-seed-00090"}
        assert run_list.run_before(conn, run) == ("run-00090", "llama-6b-seed-00090")
        assert run_list.run_before(conn, {**run, "name": "new"}) == ("run-00051", "llama-2b-seed-00051")
        assert run_list.run_before(conn, {**run, "created_at": NOW - 199}) is None


def test_any_run_can_be_found_for_a_comparison_beyond_the_newest_that_are_offered(many: sa.Engine) -> None:
    with many.connect() as conn:
        newest, num = run_list.newest(conn, "", 5)
        assert ([run_id for run_id, _ in newest], num) == ([f"run-{i:05d}" for i in range(5)], 200)
        assert run_list.newest(conn, "SEED-00199 node-39", 5) == ([("run-00199", "llama-3b-seed-00199")], 1)
        assert run_list.newest(conn, "sweep-3", 5)[1] == len(range(3, 200, 12))
        assert run_list.newest(conn, "100%", 5) == ([], 0)


def test_columns_sort_both_ways(many: sa.Engine) -> None:
    assert ids(many, sort="step")[0] == "run-00199"
    assert ids(many, sort="step", reverse=True)[0] == "run-00000"
    assert ids(many, sort="name")[0] == "run-00000"
    assert ids(many, sort="status")[0] in {f"run-{i:05d}" for i in range(200) if i % 10}
    owned = {run["id"] for run in find(many, owner="ann").runs}
    for reverse in (False, True):  # what has none stands last
        assert set(ids(many, sort="owner", reverse=reverse)[: len(owned)]) == owned
    assert [find(many, sort="owner").runs[i]["owners"] for i in (0, -1)] == [["ann"], []]
    assert find(many, sort="tags").runs[0]["tags"] == ["sweep-0"]
    assert find(many, sort="tags", reverse=True).runs[0]["tags"] == ["sweep-9"]


def test_owners_of_two_databases_are_sorted_as_one(many: sa.Engine) -> None:
    with fresh_database(many.dialect.name) as url:
        other = make_engine(url)
        row = {"tenant": "default", "created_at": NOW, "last_seen_at": NOW}
        with writing(other) as conn:
            conn.execute(sa.insert(t.run), [{**row, "run_id": i, "name": i} for i in ("zed's", "nobody's")])
        synthetic.add_incident(other, "zed's", "f" * 32, owner="Zed")
        with many.connect() as one, other.connect() as two:
            for reverse in (False, True):
                runs = run_list.find_over([one, two], Wanted(sort="owner", reverse=reverse), now=NOW)[0].runs
                owners = [owner for run in runs for owner in run["owners"]]
                assert owners == sorted(owners, reverse=reverse, key=str.lower)
                assert {*owners} == {"ann", "Zed"}
                assert [bool(run["owners"]) for run in runs] == [True] * len(owners) + [False] * (50 - len(owners))
        other.dispose()


def test_tags_note_archive_and_delete(client: httpx.Client) -> None:
    run = synthetic.Run(client, "a/b", "a run", sites=synthetic.make_sites(1)).register()
    facts = {"name": "a run", "world_size": 1}
    assert client.put("/v1/runs/a%2Fb", json={**facts, "tags": ["from attach"]}).status_code == 200
    run.send(range(3))
    assert client.get("/api/v1/runs/a%2Fb").json()["tags"] == ["from attach"]
    changed = client.patch("/api/v1/runs/a%2Fb", json={"tags": ["x", " x ", "y"], "note": "after the crash"}).json()
    assert (changed["tags"], changed["note"], changed["archived_at"]) == (["x", "y"], "after the crash", None)
    page = client.get("/runs/a%2Fb").text
    assert "after the crash" in page
    assert 'href="/?tag=x"' in page
    assert "a run" in client.get("/?tag=y&q=crash").text

    assert client.patch("/api/v1/runs/a%2Fb", json={"archived": True}).json()["tags"] == ["x", "y"]
    assert 'class="rowlink"' not in client.get("/").text
    assert 'class="rowlink"' in client.get("/?archived=1").text
    run.register()  # it goes on
    assert 'class="rowlink"' in client.get("/").text

    for wrong in ({"tags": ["x" * 101]}, {"tags": "x"}, {"note": "a\0b"}, {"archived": "yes"}):
        assert client.patch("/api/v1/runs/a%2Fb", json=wrong).status_code == 422, wrong
    assert client.patch("/api/v1/runs/nobody", json={}).status_code == 404
    assert [client.delete("/api/v1/runs/a%2Fb").status_code for _ in range(2)] == [204, 404]
    assert client.get("/api/v1/runs/a%2Fb").status_code == 404


def test_every_condition_of_the_list_is_a_link_and_nonsense_is_none(client: httpx.Client) -> None:
    synthetic.Run(client, "r", "<b>&amp;", sites=[]).register()
    html = client.get("/?q=%3Cb%3E&sort=step&status=running&page=7&tag=").text
    assert 'class="rowlink"' in html
    assert re.search(
        r'<th class="n" aria-sort="descending"><a href="/\?q=%3Cb%3E&amp;status=running&amp;sort=step&amp;reverse=1"',
        html,
    )
    assert 'href="/?status=running&amp;sort=step"' in html  # the search taken off
    for odd in (
        "?page=-1&sort=x&status=&severity=mild",
        "?page=99999999999",
        "?q=%01&tag=%7F&archived=2",
        "?q=%25%5F%5C",
    ):
        assert client.get(f"/{odd}").status_code == 200, odd


def test_what_helped_against_a_cause_is_found_without_reading_every_run() -> None:
    with fresh_database("sqlite") as url:
        engine = make_engine(url)
        fill(engine, 20, 15, NOW)
        asked: list[tuple[str, Any]] = []
        with engine.connect() as conn:
            causes = cause_list.find(conn, cause_list.Wanted()).causes
            sa.event.listen(
                conn, "before_cursor_execute", lambda c, cursor, sql, values, *_: asked.append((sql, values))
            )
            for cause in causes:
                what_helped(conn, cause["incident"])
            cursor = conn.connection.cursor()
            assert len(asked) > 2
            for sql, values in list(asked):
                cursor.execute(f"EXPLAIN QUERY PLAN {sql}", values)
                assert not [line for *_, line in cursor.fetchall() if line.split()[:2] == ["SCAN", "run"]], sql
        engine.dispose()


LARGE = pytest.mark.heavy(
    6, "server/fp8watch_server/store/run_list.py", "server/fp8watch_server/store/cause_list.py", first=True
)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LARGE) for kind in ("sqlite", "postgresql")])
def test_ten_thousand_runs_and_five_thousand_incidents_are_quick(kind: str, tmp_path: Any) -> None:
    """What the database does for a page grows with runs and incidents, and not with both together."""
    with fresh_database(kind) as url:
        app = make_app(tmp_path, url)
        fill(app.state.engine, NUM_RUNS, NUM_INCIDENTS, time.time())
        pages = (
            "/",
            "/?q=seed-00017+node",
            "/?mode=mode-3&severity=info",
            "/?sort=name&page=150",
            "/?sort=owner",
            "/?sort=tags&page=9",
        )
        pages += ("/incidents", "/incidents?state=unseen&q=mode-1", "/incidents?page=4")
        pages += ("/compare", "/compare?q=seed-00017")
        work = work_of(app, pages)
        print(f"{kind}: {work}")
        for path, of in work.items():
            assert of.statements < 400, path
            assert of.rows < NUM_INCIDENTS, path
            assert of.steps < MOST_STEPS[kind], path
        app.state.ingest.stop()
        app.state.engine.dispose()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_many_incidents_of_one_run_hide_those_of_no_other(kind: str) -> None:
    with fresh_database(kind) as url:
        engine = make_engine(url)
        fill(engine, 2, 1201, NOW)  # all of them of run-00000
        c = t.incident.c
        with writing(engine, turn_s=10) as conn:
            old = {"status": "open", "severity": "critical", "opened_at": NOW - 5000}
            conn.execute(sa.update(t.incident).where(c.id == f"{1200:032x}").values(run_id="run-00001", **old))
            conn.execute(sa.update(t.incident).where(c.id == f"{1199:032x}").values(**old))
        with engine.connect() as conn:
            rows = {row["id"]: row for row in page_queries.runs([conn], Wanted())["rows"]}
            first, *_ = page_queries.incidents(conn, "run-00000")
        engine.dispose()
    few, all_ = rows["run-00001"], rows["run-00000"]
    assert ([i["id"] for i in few["incidents"]], few["num_incidents"], few["num_over"]) == ([f"{1200:032x}"], 1, 0)
    assert len(all_["incidents"]) == 3
    assert all_["num_incidents"] + all_["num_over"] == 1200
    assert {i["severity"] for i in all_["incidents"]} == {"critical"}
    assert first["state"] == "open"
    assert first["severity"] == "critical"


def test_the_loss_of_a_long_run_is_its_newest(client: httpx.Client) -> None:
    """Of the line only the smallest and the largest of each stretch are kept."""

    def noisy(steps: Any, rows: Any) -> None:
        steps["loss"] = 3.0 + 0.5 * (-1.0) ** steps["step"]
        steps["loss"][steps["step"] == 199] = 3.0625

    run = synthetic.Run(client, "long", "long", sites=synthetic.make_sites(1)[:1]).register()
    run.send(range(200), fault=False, change=noisy)
    row = re.search(r"<tr[^>]*>(?:(?!</tr>).)*href=\"/runs/long\".*?</tr>", client.get("/").text, re.S)
    assert row is not None
    assert "3.062" in row[0]
    assert 'title="step 199"' in row[0]
