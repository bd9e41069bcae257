"""`fp8watch serve` as a process: what it prints, why it refuses, and that kill -9 loses nothing."""

from __future__ import annotations

import hashlib
import signal
import socket
import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from collector.kit import Agent, Serving, make_site

from fp8watch_server.command import main

SITE = make_site("up")
NUM_SENDERS = 4
NUM_KILLS = 2
ACKS_BEFORE_KILL = 25


def test_it_serves_on_the_port_that_it_prints_and_drains_on_sigterm(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0") as serving:
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


class Sender:
    """One agent that keeps sending until told to stop, and remembers what was acknowledged."""

    def __init__(self, number: int) -> None:
        self.run, self.session = f"run-{number}", f"{number}" * 32
        self.acked: dict[int, bytes] = {}
        self.unsure: list[tuple[int, bytes]] = []  # sent, no answer
        self.num_acks = 0

    def send_until_it_breaks(self, url: str, progress: threading.Semaphore) -> None:
        with httpx.Client(base_url=url, timeout=10) as client:
            agent = Agent(client, run=self.run, session=self.session)
            try:
                agent.register([SITE])
                for seq, body in self.unsure:
                    assert agent.post(body).status_code == 200
                    self.acked[seq] = hashlib.sha256(body).digest()
                self.unsure.clear()
                while True:
                    seq = len(self.acked)
                    body = agent.body([SITE], [seq], seq=seq)
                    self.unsure = [(seq, body)]
                    assert agent.post(body).status_code == 200
                    self.acked[seq] = hashlib.sha256(body).digest()
                    self.unsure.clear()
                    progress.release()
            except httpx.HTTPError:
                return


def test_kill_9_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    senders = [Sender(i) for i in range(NUM_SENDERS)]
    num_unsure = num_replayed = 0
    for _ in range(NUM_KILLS):
        with Serving(tmp_path, "--port", "0") as serving:
            stored_before = rows_of(tmp_path) if num_unsure else {}
            num_replayed += sum((s.run, seq) in stored_before for s in senders for seq, _ in s.unsure)
            progress = threading.Semaphore(0)
            threads = [threading.Thread(target=s.send_until_it_breaks, args=(serving.url, progress)) for s in senders]
            for thread in threads:
                thread.start()
            for _ in range(ACKS_BEFORE_KILL):
                assert progress.acquire(timeout=20)
            serving.kill()
            for thread in threads:
                thread.join(20)
        num_unsure += sum(len(s.unsure) for s in senders)
    stored = rows_of(tmp_path)
    acked = {(s.run, seq): digest for s in senders for seq, digest in s.acked.items()}
    unsure = {(s.run, seq): hashlib.sha256(body).digest() for s in senders for seq, body in s.unsure}
    assert num_unsure > 0, "the kill hit nobody"
    assert len(acked) >= NUM_KILLS * ACKS_BEFORE_KILL
    assert {key: stored.get(key) for key in acked} == acked  # lost: 0, torn: 0
    assert {k: v for k, v in stored.items() if k not in acked}.items() <= unsure.items()  # invented: 0
    with sqlite3.connect(tmp_path / "served.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (num_scalars,) = db.execute("SELECT count(*) FROM scalar").fetchone()
    db.close()
    assert num_scalars == len(stored)
    print(f"kills {NUM_KILLS}, acknowledged {len(acked)}, unsure {num_unsure}, of these stored {num_replayed}")


def rows_of(tmp_path: Path) -> dict[tuple[str, int], bytes]:
    db = sqlite3.connect(tmp_path / "served.db")
    try:
        rows = db.execute("SELECT run_id, seq, body, body_sha256 FROM hot_batch").fetchall()
    finally:
        db.close()
    for _, _, body, digest in rows:
        assert hashlib.sha256(body).digest() == digest
    return {(run, seq): digest for run, seq, _, digest in rows}
