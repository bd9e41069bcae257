"""The attempt of a session where the launcher does not count its restarts: the ranks of one start are one attempt."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.kit import Agent

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing


@pytest.fixture
def attempts(client: httpx.Client) -> Any:
    numbers = iter(range(1, 100))

    def of(*ranks: int, at: float) -> list[int]:
        """Attempts that new sessions of these ranks get, which have begun one after another at this time."""
        out = []
        for i, rank in enumerate(ranks):
            agent = Agent(client, session=f"{next(numbers):032x}", rank=rank, started_at=at + i)
            agent.register_run()
            out.append(int(agent.register_session().json()["attempt"]))
        return out

    return of


def test_a_rank_that_never_came_in_the_first_start_is_with_the_others_in_the_second(attempts: Any) -> None:
    now = time.time()
    assert attempts(0, 1, 2, at=now - 120) == [1, 1, 1]
    assert attempts(0, 1, 3, 2, at=now) == [2] * 4


def test_ranks_that_were_not_in_a_smaller_start_are_with_the_others_in_the_next(attempts: Any) -> None:
    now = time.time()
    assert attempts(0, 1, 2, 3, at=now - 240) == [1] * 4
    assert attempts(1, 0, at=now - 120) == [2] * 2
    assert attempts(0, 1, 2, 3, at=now) == [3] * 4


def test_sessions_that_are_told_of_later_are_in_the_attempt_that_they_began_with(attempts: Any) -> None:
    """As `fp8watch sync` sends what a rank without a collector has kept."""
    now = time.time()
    assert [attempts(0, at=now - ago) for ago in (7000, 4000, 1000)] == [[1], [2], [3]]
    assert [attempts(1, at=now - ago) for ago in (7000, 1000)] == [[1], [3]]
    assert attempts(2, at=now - 4000) == [2]


def test_a_rank_that_comes_first_after_a_long_silence_begins_an_attempt(attempts: Any, app: Any) -> None:
    now, s = time.time(), t.session.c
    assert attempts(0, 1, at=now - 3600) == [1, 1]
    with writing(app.state.engine) as conn:
        conn.execute(sa.update(t.session).values(last_seen_at=s.last_seen_at - 3600))
    assert attempts(2, 0, 1, at=now) == [2] * 3


def test_clocks_that_are_hours_ahead_of_the_collectors_tear_no_start_apart(attempts: Any) -> None:
    now = time.time()
    assert attempts(0, 1, 2, at=now + 7200) == [1] * 3
    assert attempts(2, 1, 0, at=now + 7300) == [2] * 3


def test_who_does_not_say_when_it_began_is_in_the_newest(client: httpx.Client) -> None:
    def attempt(session: str, rank: int) -> int:
        agent = Agent(client, session=session * 32, rank=rank, started_at=None)
        agent.register_run()
        return int(agent.register_session().json()["attempt"])

    assert [attempt("a", 0), attempt("b", 0), attempt("c", 1), attempt("d", 1)] == [1, 2, 2, 3]
