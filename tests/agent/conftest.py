"""Fixtures of the agent's tests: a scripted collector, unreachable ones, small and quick settings."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import Collector, make_session, serve

from fp8watch_agent.session import Session
from fp8watch_agent.settings import AgentSettings


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


@pytest.fixture
def blackhole_url() -> Iterator[str]:
    """Takes connections, reads nothing, says nothing."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen(64)
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return AgentSettings(
        spool_dir=tmp_path / "spool",
        ring_bytes=1 << 20,
        poll_interval_s=0.01,
        batch_interval_s=0.02,
        request_timeout_s=10.0,
    )


@pytest.fixture
def session() -> Session:
    return make_session()
