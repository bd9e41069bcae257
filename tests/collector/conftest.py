"""A collector on a real SQLite file, without its threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector.kit import Recorder, served
from fp8watch_server.app import create_app
from fp8watch_server.settings import Settings


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(database_url=f"sqlite:///{tmp_path / 'collector.db'}")


@pytest.fixture
def app(settings: Settings, recorder: Recorder) -> Any:
    return create_app(settings, detection=recorder.detection(), dispatcher=lambda e, s: None, pages=False)


@pytest.fixture
def client(app: Any) -> Iterator[httpx.Client]:
    """A real server without the lifespan, so without threads: `app.state.worker.drain()` is the worker."""
    with served(app) as url, httpx.Client(base_url=url) as client:
        yield client
    app.state.engine.dispose()
