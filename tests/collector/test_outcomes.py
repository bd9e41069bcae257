"""Outcomes of bodies in /metrics say what agents do with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector.kit import Agent, make_site, on_sqlite
from starlette.requests import ClientDisconnect

from fp8watch_agent.transport import Answer, ResponseMeaning, judge
from fp8watch_server.http.errors import Problem
from fp8watch_server.ingest.ingest_stats import OUTCOMES, IngestStats, outcome_of

ROOT = Path(__file__).parents[2]
SITE = make_site("up")
MEANING = {
    "refused": ResponseMeaning.REFUSED,
    "conflict": ResponseMeaning.REFUSED,
    "forbidden": ResponseMeaning.HOLD,
    "too_large": ResponseMeaning.SPLIT,
    "unregistered": ResponseMeaning.REGISTER,
    "overload": ResponseMeaning.RETRY,
    "unavailable": ResponseMeaning.RETRY,
    "failed": ResponseMeaning.RETRY,
}


@pytest.mark.parametrize("status", [400, 403, 409, 413, 415, 422, 424, 429, 500, 503])
def test_each_is_named_by_what_agents_do(status: int) -> None:
    problem = Problem(status, "no", rule="so", remedy="")
    stats = IngestStats()
    with pytest.raises(Problem), stats.one_body():
        raise problem
    (outcome,) = (name for name, count in stats.outcomes.items() if count)
    assert MEANING[outcome] == judge(Answer(status, body=bytes(problem.response().body)))
    assert (outcome == "conflict") == (status == 409)


def test_what_a_tenant_may_not_send_is_neither_lost_nor_the_database_s_fault() -> None:
    for status in (429, 507):
        assert outcome_of(Problem(status, "no", rule="so", remedy="", error="quota-bytes")) == "quota"
        assert judge(Answer(status)) is ResponseMeaning.RETRY


def test_a_body_whose_sender_has_gone_is_none_that_was_refused() -> None:
    problem = Problem(400, "the body ended early", rule="a body is complete", remedy="send it again")
    problem.__cause__ = ClientDisconnect()
    assert outcome_of(problem) == "cut_short"


@on_sqlite
def test_a_body_of_another_s_session_is_forbidden_and_one_that_is_no_batch_refused(
    client: httpx.Client, app: Any
) -> None:
    agent = Agent(client).register([SITE])
    assert agent.post(agent.body([SITE], [1])).status_code == 200
    assert agent.post(b"no batch").status_code == 400
    assert {name: n for name, n in app.state.ingest.stats.outcomes.items() if n} == {"accepted": 1, "refused": 1}


def test_the_docs_name_all_of_them() -> None:
    text = (ROOT / "docs/alerts.md").read_text().partition("#### Fp8watchCollectorRefuses")[2].partition("####")[0]
    rule = re.search(r'outcome=~"([a-z_|]+)"', (ROOT / "dashboards/prometheus/fp8watch.rules.yml").read_text())
    assert rule is not None
    table, rest = text.split("What is kept")
    assert set(re.findall(r"`([a-z_]+)`", table)) == set(rule[1].split("|"))
    assert {"accepted", *rule[1].split("|"), *re.findall(r"`([a-z_]+)`", rest)} == set(OUTCOMES)
