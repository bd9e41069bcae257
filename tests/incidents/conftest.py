"""One store per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from detect.healthy_run import Run
from incidents.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path, Run())
    yield made
    made.db.dispose()
