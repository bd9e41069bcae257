"""A NATS server of its own for each test, on files in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster.kit import app_of, eventually
from cluster.nats_servers import Node, free_ports
from collector.kit import served
from support.database import fast_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, and in memory."""
    made = Path(tempfile.mkdtemp(prefix="fp8nats-", dir=fast_folder()))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    made = Node(folder, free_ports(1)[0]).start()
    yield made
    made.stop()


@pytest.fixture
def database_kind() -> str:
    """Workers and collectors share a PostgreSQL."""
    return "postgresql"


@pytest.fixture
def front(database_url: str, node: Node) -> Iterator[httpx.Client]:
    """A client of a collector with a queue."""
    app = app_of(database_url, node.url)
    with served(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        eventually(lambda: client.get("/readyz").status_code == 200)
        yield client
        app.state.ingest.stop()
        app.state.engine.dispose()
