"""Quotas of tenants: what is too much is refused before it is read, and said so that agents keep it; others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from collector.kit import Agent, Recorder, make_site, on_sqlite, served

from fp8watch_agent.joined import JOINED_CONTENT_TYPE, JOINED_PATH, join_bodies
from fp8watch_agent.transport import Answer, ResponseMeaning, judge
from fp8watch_server.app import create_app
from fp8watch_server.auth.command import create
from fp8watch_server.auth.grant import Grant
from fp8watch_server.auth.quota import Quotas
from fp8watch_server.http.errors import Problem
from fp8watch_server.settings import SettingError, Settings
from fp8watch_server.settings.quotas import Quota, parse_quotas

SITES = [make_site("up", order=0), make_site("down", order=1)]
NOISY, QUIET = Grant(frozenset({"ingest"}), tenant="noisy"), Grant(frozenset({"ingest"}), tenant="quiet")


def test_a_tenant_in_debt_waits_until_it_is_paid_and_nobody_else_does() -> None:
    now = [0.0]
    quotas = Quotas({"noisy": Quota(records_s=100.0), "quiet": Quota(records_s=100.0)}, clock=lambda: now[0])
    for _ in range(2):
        quotas.admit(NOISY)
        quotas.charge(NOISY, 150)  # a burst of two seconds, and what came with it
    with pytest.raises(Problem) as e:
        quotas.admit(NOISY)
    assert (e.value.status, e.value.headers) == (429, {"Retry-After": "2"})
    quotas.charge(QUIET, 10)
    quotas.admit(QUIET)
    now[0] = 0.9
    with pytest.raises(Problem):
        quotas.admit(NOISY)
    now[0] = 1.1
    quotas.admit(NOISY)
    quotas.charge(NOISY, 10)
    now[0] = 1000.0  # what was not sent is not saved up for long
    quotas.charge(NOISY, 201)
    with pytest.raises(Problem):
        quotas.admit(NOISY)
    assert quotas.refused == {("noisy", "records"): 3}


@pytest.fixture
def app(database_url: str) -> Iterator[Any]:
    quotas = "noisy=records:100,runs:2,bytes:1000000 other=bytes:1"
    settings = Settings(database_url=database_url, quotas=quotas)
    made = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)
    yield made
    made.state.ingest.stop()
    made.state.engine.dispose()


@pytest.fixture
def clients(app: Any) -> Iterator[dict[str, httpx.Client]]:
    """A client with a token of each tenant, for its own runs."""
    made = {}
    with served(app) as url:
        for tenant in ("noisy", "other", "quiet"):
            token = create(app.state.engine, tenant, "ingest", tenant, f"{tenant}-*")
            given = {"Authorization": f"Bearer {token}"}
            made[tenant] = httpx.Client(base_url=url, timeout=20, trust_env=False, headers=given)
        yield made
        for client in made.values():
            client.close()


@on_sqlite
def test_what_is_too_much_is_refused_and_agents_keep_it(app: Any, clients: dict[str, httpx.Client]) -> None:
    noisy, quiet = (Agent(clients[name], run=f"{name}-1").register(SITES) for name in ("noisy", "quiet"))
    for number in range(8):
        body = noisy.body(SITES, list(range(50 * number, 50 * number + 50)))  # 100 records
        answer = noisy.post(body)
        if answer.status_code != 200:
            break
    assert (answer.status_code, answer.json()["error"]) == (429, "quota-records")
    assert number >= 2
    assert int(answer.headers["retry-after"]) >= 1
    assert judge(Answer(429)) is judge(Answer(507)) is ResponseMeaning.RETRY
    together = clients["noisy"].post(
        JOINED_PATH, content=join_bodies([("", body)]), headers={"Content-Type": JOINED_CONTENT_TYPE}
    )
    assert together.status_code == 429
    for step in range(20):
        quiet.send(SITES, [step])
    until = time.monotonic() + 20
    while (answer := noisy.post(body)).status_code == 429 and time.monotonic() < until:
        time.sleep(0.1)
    assert answer.status_code == 200  # the same body, once the debt is paid


@on_sqlite
def test_runs_and_bytes_are_those_that_the_tokens_name(app: Any, clients: dict[str, httpx.Client]) -> None:
    first, second, third = (Agent(clients["noisy"], run=f"noisy-{i}") for i in range(3))
    other, quiet = (Agent(clients[name], run=f"{name}-1").register(SITES) for name in ("other", "quiet"))
    for agent in (first, second, other, quiet):
        agent.register(SITES).send(SITES, [1])
    app.state.usage.count()
    answer = third.register_run()
    assert (answer.status_code, answer.json()["error"]) == (507, "quota-runs")
    assert first.register_run().status_code == 200  # it is there
    answer = other.post(other.body(SITES, [2]))
    assert (answer.status_code, answer.json()["error"]) == (507, "quota-bytes")
    first.send(SITES, [2])
    quiet.send(SITES, [2])
    usage = app.state.quotas.usage
    assert usage["noisy"].runs == {"noisy-0", "noisy-1"}
    assert 0 < usage["other"].num_bytes < usage["noisy"].num_bytes
    with app.state.engine.begin() as conn:
        conn.exec_driver_sql("DELETE FROM run WHERE run_id = 'noisy-1'")
    app.state.usage.count()
    assert third.register_run().status_code == 200


def test_settings_that_cannot_be_read_are_refused() -> None:
    read = parse_quotas("a=records:5,runs:2  *=bytes:7")
    assert read == {"a": Quota(5.0, 2, 0), "*": Quota(0.0, 0, 7)}
    for wrong in (
        "a",
        "a=",
        "a=records",
        "a=records:x",
        "a=records:0",
        "a=records:1,records:2",
        "=runs:1",
        "a=runs:1 a=runs:2",
    ):
        with pytest.raises(SettingError, match="tenant=records:N"):
            Settings.from_environ({"FP8WATCH_QUOTAS": wrong})
    assert Quotas(read).of("b") == read["*"]
    assert Quotas({}).of("b") is None
