"""The database of a request: the one that its run or its incident lies in, else home.

Shapes:     a request -> Engine, Connection, or a connection to each database
Thread:     any but the event loop: the directory may be asked; the connections are those of requests (db.pools)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.concurrency import contextmanager_in_threadpool
from sqlalchemy.engine import Connection, Engine
from starlette.types import Scope

from fp8watch_server.db.dialect import NUM_CONNECTIONS
from fp8watch_server.db.pools import for_requests
from fp8watch_server.db.shards import Everywhere, Shards

AWAY_HEADER = "fp8watch-away"
"""Names of the shards that an answer over all runs leaves out, separated by commas."""
NUM_IN_TURN = NUM_CONNECTIONS // 2
"""Requests that may hold a connection while they wait for a thread."""


def shards_of(app: FastAPI) -> Shards:
    """The databases of an application."""
    found = getattr(app.state, "shards", None)
    if found is None:
        found = app.state.shards = Shards(app.state.engine)
    assert isinstance(found, Shards)
    return found


def engine_for(request: Request) -> Engine:
    """The database of what the path of a request names.

    Raises:
        ShardAway: it does not answer.
    """
    return for_requests(_engine(shards_of(request.app), request.scope))


def _engine(shards: Shards, scope: Scope) -> Engine:
    named: dict[str, Any] = scope.get("path_params") or {}
    if "run_id" in named:
        return shards.of_run(named["run_id"])
    return shards.of_incident(named["incident_id"]) if "incident_id" in named else shards.home


def connect_for(request: Request) -> Connection:
    """A connection to it, which the caller closes."""
    return engine_for(request).connect()


def connect_to_run(request: Request, run_id: str) -> Connection:
    """A connection to the database of a run that the path does not name."""
    return for_requests(shards_of(request.app).of_run(run_id)).connect()


def connect_everywhere(request: Request) -> AbstractContextManager[Everywhere]:
    """A connection to each database that answers."""
    return shards_of(request.app).connections()


async def connection_in_turn(request: Request) -> AsyncIterator[Connection]:
    """A connection for as long as a request takes, as a dependency.

    It is held while the request waits for threads, which wait for connections; so only as many have one as leave enough to those.
    """
    state = request.app.state
    if getattr(state, "turns", None) is None:
        state.turns = anyio.Semaphore(NUM_IN_TURN)
    async with state.turns, contextmanager_in_threadpool(_connected(request)) as conn:
        yield conn


@contextmanager
def _connected(request: Request) -> Iterator[Connection]:
    with connect_for(request) as conn:
        yield conn


def away_header(away: Sequence[str]) -> dict[str, str]:
    """Headers of an answer that leaves shards out."""
    return {AWAY_HEADER: ",".join(away)} if away else {}
