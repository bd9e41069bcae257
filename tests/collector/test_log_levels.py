"""What libraries say at the level of warnings and below, and which of it a collector logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8watch_server.http import logs
from fp8watch_server.settings import Settings


@pytest.fixture
def configured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Logging as a collector sets it up, and afterwards as it was."""
    root, names = logging.getLogger(), (*logs.OWN, "psycopg")
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in names]
    logs.set_up(Settings(database_url=f"sqlite:///{tmp_path / 'x.db'}", log_level="debug"))
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    for name, level in zip(names, before[2], strict=True):
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(
    ("name", "level", "text", "logged"),
    [
        ("psycopg", logging.WARNING, "error ignored terminating %r: %s", False),  # the error itself was raised
        ("psycopg", logging.WARNING, "error ignored in rollback: %r, %s", True),
        ("some.library", logging.INFO, "%s, %s", False),
        ("some.library", logging.WARNING, "%s, %s", True),
        ("fp8watch.collector", logging.DEBUG, "%s, %s", True),
    ],
)
def test_libraries_log_what_is_wrong_and_nothing_else(
    configured: None, capsys: pytest.CaptureFixture[str], name: str, level: int, text: str, logged: bool
) -> None:
    logging.getLogger(name).log(level, text, "pipeline", "said")
    assert ("said" in capsys.readouterr().err) is logged
