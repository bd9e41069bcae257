"""A NATS server of its own for each test, on files in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.nats_servers import Node, free_ports
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
