"""`fp8watch token`: shown once, kept as a hash, good for its scopes, useless after it was revoked."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site

from fp8watch_server.auth import tokens as auth
from fp8watch_server.auth.command import main
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine


@pytest.fixture
def token(database_url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command: its exit status, what it printed, what it complained of."""

    def run(*argv: str) -> tuple[int, str, str]:
        status = main(["--database-url", database_url, *argv])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_a_token_is_256_random_bits_with_a_prefix_and_shown_once(token: Any, database_url: str) -> None:
    status, out, err = token("create", "node-1", "--scopes", "read,ingest")
    value = out.strip()
    assert (status, value[:5]) == (0, "fp8w_")
    assert len(base64.urlsafe_b64decode(value[5:] + "=")) == 32
    assert "not shown again" in err
    assert token("create", "node-1")[1] != out
    listed = token("list")[1]
    assert value not in listed
    assert "ingest,read" in listed
    engine = make_engine(database_url)
    with engine.connect() as conn:
        rows = conn.execute(sa.select(t.token)).all()
    engine.dispose()
    assert auth.token_sha256(value) in {row.token_sha256 for row in rows}
    assert all(value not in str(row) for row in rows)
    if database_url.startswith("sqlite"):
        folder = Path(database_url.removeprefix("sqlite:///")).parent
        assert all(value.encode() not in path.read_bytes() for path in folder.iterdir())


def test_it_opens_what_its_scopes_say_until_it_is_revoked(
    token: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_AFTER_S", 0.0)
    monkeypatch.setattr(auth, "READ_S", 5.0)  # a busy machine is waited for
    site = make_site()
    Agent(client).register([site])  # nobody has a token yet, and this is loopback
    agents, readers = token("create", "agents")[1].strip(), token("create", "people", "--scopes", "read")[1].strip()

    def status(method: str, path: str, value: str) -> int:
        return int(client.request(method, path, headers={"Authorization": f"Bearer {value}"}).status_code)

    assert client.get("/api/v1/runs").status_code == 401
    assert status("PUT", "/v1/runs/x", agents) == 400  # let in; the body is empty
    assert status("GET", "/api/v1/runs", agents) == 403
    assert status("GET", "/api/v1/runs", readers) == 200
    assert status("PUT", "/v1/runs/x", readers) == 403
    assert token("revoke", "people")[1].startswith("revoked 1")
    assert status("GET", "/api/v1/runs", readers) == 401
    assert token("revoke", auth.token_sha256(agents)[:12])[0] == 0
    assert status("PUT", "/v1/runs/x", agents) == 401
    assert client.get("/api/v1/runs").status_code == 401  # the last one went, and nothing opened


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("create", "x", "--scopes", "root"), "ingest, read, admin"),
        (("create", "x", "--scopes", ""), "ingest, read, admin"),
        (("create", "a\nb"), "printable"),
        (("create", "settings"), "FP8WATCH_TOKEN"),
        (("create", "x", "--tenant", ""), "tenant"),
        (("revoke", "nobody"), "list"),
        (("revoke", "%"), "list"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_remedy(token: Any, argv: tuple[str, ...], word: str) -> None:
    status, out, err = token(*argv)
    assert (status, out) == (2, "")
    assert word in err


def test_a_database_that_is_not_there_is_said_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+psycopg://me:hunter22@127.0.0.1:9/x"
    assert main(["--database-url", url, "list"]) == 2
    err = capsys.readouterr().err
    assert "cannot be used" in err
    assert "hunter22" not in err
