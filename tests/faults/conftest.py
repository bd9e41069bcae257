"""Fixtures of the fault tests."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from faults import zygote as zygote_module
from faults.zygote import Zygote
from support.agents import Collector, serve


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serve() as state:
        yield state


@pytest.fixture
def refused_url() -> str:
    """A port on which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Runs the fault programs, each in a process of its own."""
    made = zygote_module.start()
    yield made
    made.process.stdin.close()
    assert made.process.wait(60) == 0
    made.process.stdout.close()
