"""A receiver, and a collector with its threads that exports to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector.kit import served
from otlp.receiver import OtlpReceiver

from fp8watch_server.app import create_app
from fp8watch_server.otlp import client
from fp8watch_server.settings import Settings


@pytest.fixture(autouse=True)
def _no_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setattr(client.EXPORTS, "_counts", dict.fromkeys(client.EXPORTS.snapshot(), 0))


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    made = OtlpReceiver()
    yield made
    made.close()


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    """Starts a collector, threads and all."""
    with ExitStack() as stack:

        def start(**settings: Any) -> httpx.Client:
            path = f"sqlite:///{tmp_path / 'fp8watch.db'}"
            app = create_app(Settings(path, public_url="https://watch.example", insecure=True, **settings), pages=False)
            url = stack.enter_context(served(app, lifespan="on"))
            return stack.enter_context(httpx.Client(base_url=url, timeout=20))

        yield start
