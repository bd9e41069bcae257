"""A real collector for the tests of the pages: real app, real SQLite, detectors that find nothing.

Incidents are put in by hand, so that what the pages must show does not depend on what the detectors think.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from fp8watch_server.app import create_app
from fp8watch_server.cli import listen
from fp8watch_server.detect.thresholds import DEFAULTS
from fp8watch_server.http.server import Server
from fp8watch_server.pipeline.detect_worker import Detection
from fp8watch_server.settings import Settings

LIMITS = httpx.Limits(keepalive_expiry=1.0)
"""A connection that the server is about to close, after five idle seconds, is not used."""


class _Quiet:
    """Detectors that find nothing."""

    delivered_step = None
    stride = 1
    settling = False
    thresholds = DEFAULTS

    def observe(self, batch: Any, at: float | None = None) -> list[Any]:
        return []

    def add_sites(self, sites: Any) -> None:
        pass

    def add_sessions(self, sessions: Any) -> None:
        pass

    def take_notices(self) -> list[Any]:
        return []

    def tick(self, now: float) -> list[Any]:
        return []


def make_app(folder: Path, database_url: str | None = None) -> FastAPI:
    """A collector with a database of its own: SQLite in the folder, unless another is named."""
    nothing = {f.name: lambda *args, **kwargs: [] for f in dataclasses.fields(Detection)}
    quiet = Detection(**{**nothing, "make_facts": lambda sites: {}, "make_engine": lambda *args: _Quiet()})
    settings = Settings(database_url=database_url or f"sqlite:///{folder / 'fp8watch.db'}")
    return create_app(settings, detection=quiet, dispatcher=lambda engine, settings: None)


@contextlib.contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[httpx.Client]:
    """The collector on a port, a free one where none is named, and a client of it."""
    ready = threading.Event()
    server = Server(app, on_started=ready.set)
    with listen("127.0.0.1", port) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="collector", daemon=True)
        thread.start()
        assert ready.wait(20), "the collector did not start"
        port = sock.getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, limits=LIMITS) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(10)
