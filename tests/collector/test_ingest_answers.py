"""Every answer of the ingest, and that 200 means what it says."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site
from fp8watch_server.store import schema as t

SITES = [make_site(order=0), make_site(direction="columnwise", order=1)]


def rows(app: Any, table: Any) -> list[Any]:
    with app.state.engine.connect() as conn:
        return list(conn.execute(sa.select(table)).all())


def everything(app: Any) -> dict[str, list[Any]]:
    return {name: rows(app, table) for name, table in t.metadata.tables.items()}


def assert_problem(answer: Any, status: int, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["rule"]
    assert problem["remedy"]
    for word in words:
        assert word in problem["detail"], problem
    return problem


@pytest.fixture
def agent(client: Any) -> Agent:
    return Agent(client).register(SITES)


def test_a_batch_is_acknowledged_after_commit_and_stored_as_it_came(agent: Agent, app: Any) -> None:
    body = agent.body(SITES, [10, 11])
    answer = agent.post(body)
    assert answer.status_code == 200
    assert answer.json() == {"acked": 1, "captures": []}
    (stored,) = rows(app, t.hot_batch)
    assert bytes(stored.body) == body
    assert (stored.step_min, stored.step_max, stored.num_records) == (10, 11, 4)
    assert [r.step for r in rows(app, t.scalar)] == [10, 11]
    (run,) = rows(app, t.run)
    assert (run.last_step, run.num_batches, run.name) == (11, 1, "a run")


def test_the_same_batch_twice_changes_nothing(agent: Agent, app: Any) -> None:
    body = agent.body(SITES, [1, 2])
    agent.post(body)
    before = everything(app)
    again = agent.post(body)
    assert again.status_code == 200
    assert again.json()["acked"] == 1
    assert everything(app) == before


def test_another_body_under_a_key_that_is_taken_is_refused(agent: Agent, app: Any) -> None:
    agent.send(SITES, [1])
    before = everything(app)
    answer = agent.post(agent.body(SITES, [1], seq=1, scalars={"loss": [3.0]}))
    assert assert_problem(answer, 409)["error"] == "key-reused"
    assert everything(app) == before


def test_the_same_seq_of_another_session_is_new_data(agent: Agent, app: Any) -> None:
    agent.send(SITES, [1])
    other = Agent(agent.client, session="b" * 32).register(SITES)
    other.send(SITES, [1])
    assert sorted(r.attempt for r in rows(app, t.hot_batch)) == [1, 2]


def test_an_unknown_run_session_or_site_asks_for_registration(client: Any, app: Any) -> None:
    agent = Agent(client)
    body = agent.body(SITES, [1])
    assert assert_problem(agent.post(body), 424)["error"] == "unknown-run"
    assert assert_problem(agent.register_session(), 424)["error"] == "unknown-run"
    agent.register_run()
    assert assert_problem(agent.post(body), 424)["error"] == "unknown-session"
    assert assert_problem(agent.register_sites(SITES), 424)["error"] == "unknown-session"
    agent.register_session()
    agent.register_sites(SITES[:1])
    problem = assert_problem(agent.post(body), 424)
    assert (problem["error"], problem["ids"]) == ("unknown-sites", [SITES[1].id])
    assert not rows(app, t.hot_batch)
    agent.register_sites(SITES)
    assert agent.post(body).status_code == 200
