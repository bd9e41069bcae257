"""What all rooms share: databases that a test opened are closed behind it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, Pool, event
from support import database, heavy_tests
from support.counts import pytest_report_header  # noqa: F401  a hook
from support.planted import copy_of_tree
from support.planted_selection import (  # noqa: F401  hooks
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from support.time_budget import pytest_addoption, pytest_runtest_call  # noqa: F401  hooks


def pytest_configure(config: pytest.Config) -> None:
    """One module has hooks that another one has, too."""
    config.pluginmanager.register(heavy_tests, heavy_tests.MARK)


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
def closed_databases() -> Iterator[None]:
    """A driver warns of every connection that is left to the garbage collector, at whatever test is running then.

    A collector that serves all tests of a file is at work between them: closed under its hands, the connection that it
    holds would be left over. Its fixture closes it.
    """
    _opened.clear()
    _of_a_test.set()
    yield
    _of_a_test.clear()
    for engine in list(_opened):
        engine.dispose()


_of_a_test = threading.Event()
_opened: set[Engine] = set()
_of_files: weakref.WeakSet[Pool] = weakref.WeakSet()
"""Their pools: an engine with other options is another object over the same connections."""


@event.listens_for(Engine, "engine_connect")
def _remember(connection: Connection) -> None:
    engine = connection.engine
    if not _of_a_test.is_set() and engine.dialect.name != "sqlite":
        _of_files.add(engine.pool)
    elif engine.pool not in _of_files:
        _opened.add(engine)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which bugs are planted, one at a time."""
    return copy_of_tree(tmp_path_factory.mktemp("planted"))
