"""A database of either kind, written to without a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from store.kit import Feed

from fp8watch_server.db.dialect import make_engine


@pytest.fixture
def feed(database_url: str) -> Iterator[Feed]:
    engine = make_engine(database_url)
    yield Feed(engine)
    engine.dispose()
