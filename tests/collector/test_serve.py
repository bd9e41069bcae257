"""`fp8watch serve` as a process: what it prints, and why it refuses."""

from __future__ import annotations

import signal
import socket
import sqlite3
import sys
from pathlib import Path

import httpx
import pytest
from collector.kit import Agent, Serving, make_site

from fp8watch_server.cli import main

SITE = make_site("up")


def test_it_serves_on_the_port_that_it_prints_and_drains_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "serve.py")]
    with Serving(tmp_path, "--port", "0", command=command) as serving:
        assert serving.line.startswith("fp8watch collector: http://127.0.0.1:")
        assert "served.db" in serving.line
        assert httpx.get(f"{serving.url}/readyz").json() == {"status": "ready"}
        with httpx.Client(base_url=serving.url) as client:
            Agent(client).register([SITE]).send([SITE], [1])
            assert "fp8watch_run_step" in client.get("/metrics").text
        status, err = serving.kill(signal.SIGTERM)
    assert status in (0, -signal.SIGTERM), err
    assert err == ""


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", f"sqlite:///{tmp_path / 'x.db'}")
    monkeypatch.delenv("FP8WATCH_TOKEN", raising=False)
    return monkeypatch


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    return err


@pytest.mark.usefixtures("environ")
def test_a_port_in_use_is_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = refusal(capsys, "--port", str(port))
    assert f"port {port}" in err
    assert "--port 0" in err


def test_a_database_that_cannot_be_opened_is_said(
    environ: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "not-a-database").write_bytes(b"hello" * 1000)
    cases = {
        f"sqlite:///{tmp_path / 'not-a-database'}": "not a database",
        f"sqlite:///{tmp_path}": "unable to open",
        f"sqlite:///{tmp_path / 'not-a-database' / 'x' / 'y.db'}": "folder",
        "sqlite://": "memory",
        "mysql://h/db": "mysql",
        "nonsense": "not a URL",
    }
    for url, word in cases.items():
        environ.setenv("FP8WATCH_DATABASE_URL", url)
        assert word in refusal(capsys, "--port", "0"), url


def test_a_database_of_a_newer_collector_is_left_alone(
    environ: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with sqlite3.connect(tmp_path / "x.db") as db:
        db.execute("CREATE TABLE alembic_version (version_num TEXT)")
        db.execute("INSERT INTO alembic_version VALUES ('9999')")
    db.close()
    assert "upgrade the collector" in refusal(capsys, "--port", "0")


@pytest.mark.usefixtures("environ")
def test_listening_for_others_without_a_token_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "--host", "0.0.0.0", "--port", "0")
    assert "FP8WATCH_TOKEN" in err
    assert "--insecure" in err


@pytest.mark.usefixtures("environ")
def test_bad_settings_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--port='99999'" in refusal(capsys, "--port", "99999")
    assert "--public-url" in refusal(capsys, "--public-url", "collector.example")
