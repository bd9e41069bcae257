"""What all rooms share: databases that a test opened are closed behind it."""

from __future__ import annotations

import weakref

import pytest
from sqlalchemy import Engine, event


@pytest.fixture(autouse=True)
def closed_databases():
    """Python 3.13 warns of every SQLite connection that is left to the garbage collector."""
    engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    def remember(connection):
        engines.add(connection.engine)

    event.listen(Engine, "engine_connect", remember)
    yield
    event.remove(Engine, "engine_connect", remember)
    for engine in list(engines):
        engine.dispose()
