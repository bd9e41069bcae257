"""A collector on a real database, without its threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from collector.kit import Recorder, served

from fp8watch_server.app import create_app
from fp8watch_server.db.pools import close
from fp8watch_server.settings import Settings


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def settings(database_url: str) -> Settings:
    """A database of its own, of each kind in turn; a module that has nothing to say of databases fixes `database_kind`."""
    return Settings(database_url=database_url)


@pytest.fixture
def app(settings: Settings, recorder: Recorder) -> Any:
    return create_app(settings, detection=recorder.detection(), dispatcher=lambda e, s: None, pages=False)


class Switch:
    """One server for all tests: the application behind it is the test's."""

    app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[Switch, str]]:
    switch = Switch()
    with served(switch) as url:
        yield switch, url


@pytest.fixture
def client(server: tuple[Switch, str], app: Any) -> Iterator[httpx.Client]:
    """A real server without the lifespan, so without threads: `app.state.worker.drain()` is the worker."""
    switch, url = server
    switch.app = app
    with httpx.Client(base_url=url) as client:
        yield client
    app.state.ingest.stop()
    close(app.state.engine)  # a route gives its connection back after its answer has left
