"""Receivers and an outbox per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from notify.receiver import Answer, Outbox, Receiver

from fp8watch_server.notify.channels.base import Channel
from fp8watch_server.notify.outbox import Dispatcher


@pytest.fixture
def receiver_of() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(*script: Answer) -> Receiver:
        made.append(Receiver(list(script)))
        return made[-1]

    yield make
    for r in made:
        r.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    made = Outbox(tmp_path)
    yield made
    made.db.dispose()


@pytest.fixture
def dispatch(outbox: Outbox) -> Iterator[Callable[..., Dispatcher]]:
    made: list[Dispatcher] = []

    def start(*channels: Channel) -> Dispatcher:
        made.append(Dispatcher(outbox.db, channels, poll_s=0.05))
        made[-1].start()
        return made[-1]

    yield start
    for d in made:
        d.stop()
