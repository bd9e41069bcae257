"""A database that refuses at once, as one that hangs: a person gets a page that looks again, a program a problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from pages.collector import make_app, serving

from fp8watch_server.auth.tokens import Tokens
from fp8watch_server.db.shards import ShardAway
from fp8watch_server.store import run_list

PERSON = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PROGRAM = {"accept": "application/json"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """A collector without runs."""
    return make_app(tmp_path_factory.mktemp("refuses"))


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[httpx.Client]:
    with serving(app) as client:
        yield client


def raising(error: Exception) -> Any:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def assert_both_are_served(client: httpx.Client, reason: str) -> None:
    person = client.get("/", headers=PERSON)
    assert (person.status_code, person.headers["retry-after"]) == (503, "1")
    assert person.headers["content-type"].startswith("text/html")
    assert 'http-equiv="refresh"' in person.text
    assert reason in person.text
    program = client.get("/", headers=PROGRAM)
    assert (program.status_code, program.headers["content-type"]) == (503, "application/problem+json")


def test_a_refused_connection(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = sa.exc.OperationalError("SELECT 1", {}, Exception("connection refused"))
    monkeypatch.setattr(run_list, "wanted_of", raising(refused))
    assert_both_are_served(client, "The database cannot be used at the moment.")
    assert client.get("/api/v1/runs", headers=PERSON).headers["content-type"] == "application/json"


def test_a_shard_that_is_away_is_named(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "wanted_of", raising(ShardAway("b<i>")))
    assert_both_are_served(client, "Shard &#x27;b&lt;i&gt;&#x27; does not answer.")


def test_tokens_that_cannot_be_read(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokens, "known", raising(TimeoutError()))
    assert_both_are_served(client, "The database cannot be used at the moment.")
