"""What all rooms share: databases that a test opened are closed behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import database
import pytest
from planted import copy_of_tree
from sqlalchemy import Engine, event


@pytest.fixture(params=database.KINDS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """Each database in turn: a test that takes this, or `database_url`, runs on both."""
    kind: str = request.param
    return kind


@pytest.fixture
def database_url(database_kind: str) -> Iterator[str]:
    """A migrated database of the test's own, on SQLite and on PostgreSQL in turn."""
    with database.fresh_database(database_kind) as url:
        yield url


@pytest.fixture(autouse=True)
def closed_databases():
    """A driver warns of every connection that is left to the garbage collector, at whatever test is running then."""
    engines: set[Engine] = set()

    def remember(connection):
        engines.add(connection.engine)

    event.listen(Engine, "engine_connect", remember)
    yield
    event.remove(Engine, "engine_connect", remember)
    for engine in engines:
        engine.dispose()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which bugs are planted, one at a time."""
    return copy_of_tree(tmp_path_factory.mktemp("planted"))
