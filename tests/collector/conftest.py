"""A collector on a real SQLite file, without its threads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector.kit import Recorder, served

from fp8watch_server import migrations
from fp8watch_server.app import create_app
from fp8watch_server.settings import Settings
from fp8watch_server.store.dialect import make_engine


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, to be copied: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    engine = make_engine(f"sqlite:///{path}")
    migrations.upgrade(engine)
    with engine.connect() as conn:
        conn.exec_driver_sql("ROLLBACK")
        conn.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return path


@pytest.fixture
def settings(empty_database: Path) -> Iterator[Settings]:
    """A database of its own; in memory-backed files where there are such, because every commit is synced."""
    shared_memory = Path("/dev/shm")
    fast = shared_memory if os.access(shared_memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fp8watch-", dir=fast) as folder:
        shutil.copy(empty_database, Path(folder) / "collector.db")
        yield Settings(database_url=f"sqlite:///{folder}/collector.db")


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
    app.state.engine.dispose()
