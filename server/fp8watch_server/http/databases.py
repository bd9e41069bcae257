"""The database of a request: the one that its run or its incident lies in, else home.

Shapes:     a request -> Engine, Connection, or a connection to each database
Thread:     any but the event loop: the directory may be asked
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from fastapi import FastAPI, Request
from sqlalchemy.engine import Connection, Engine
from starlette.types import Scope

from fp8watch_server.db.shards import Everywhere, Shards

AWAY_HEADER = "fp8watch-away"
"""Names of the shards that an answer over all runs leaves out, separated by commas."""


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
    return _engine(shards_of(request.app), request.scope)


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
    return shards_of(request.app).of_run(run_id).connect()


def connect_everywhere(request: Request) -> AbstractContextManager[Everywhere]:
    """A connection to each database that answers."""
    return shards_of(request.app).connections()


def away_header(away: Sequence[str]) -> dict[str, str]:
    """Headers of an answer that leaves shards out."""
    return {AWAY_HEADER: ",".join(away)} if away else {}
