"""`fp8watch serve` as a process: what it prints, and why it refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from collector.kit import Agent, Serving, make_site

from fp8watch_server.cli import main, tell_of_links
from fp8watch_server.http import probe
from fp8watch_server.settings import SETTINGS, Settings

SITE = make_site("up")
SERVER = Path(probe.__file__).parents[2]


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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def probed(path: str = "/readyz", **environ: str) -> int:
    """A health check, as the container runs it."""
    command = [sys.executable, "-S", "-m", "fp8watch_server.http.probe", path]  # -S: none of the packages is needed
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SERVER), **environ}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.returncode


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate and its key."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=somewhere.example", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return cert, key


@pytest.mark.usefixtures("environ")
def test_tls_files_that_do_not_serve_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path / "a")
    _, other = certificate(tmp_path / "b")
    err = refusal(capsys, "--port", "0", "--tls-cert", str(cert), "--tls-key", str(other))
    assert "FP8WATCH_TLS_KEY" in err
    assert "its own key" in err
    (tmp_path / "text").write_text("no certificate")
    assert "PEM" in refusal(capsys, "--port", "0", "--tls-cert", str(tmp_path / "text"), "--tls-key", str(other))


@pytest.mark.usefixtures("environ")
def test_a_file_that_may_not_be_read_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, opened = tmp_path / "rules.json", Path.open
    rules.write_text("{}")

    def refusing(self: Path, *args: str) -> object:
        if self == rules:
            raise PermissionError(13, "Permission denied")
        return opened(self, *args)

    monkeypatch.setattr(Path, "open", refusing)  # root may read everything
    assert "may be read" in refusal(capsys, "--port", "0", "--rules", str(rules))


def test_a_health_check_asks_the_port_that_is_set_and_speaks_tls_where_it_is_on(tmp_path: Path) -> None:
    (cert, key), port = certificate(tmp_path), str(free_port())
    with Serving(tmp_path, FP8WATCH_PORT=port):
        assert probed(FP8WATCH_PORT=port) == 0
        assert probed("/nothing", FP8WATCH_PORT=port) == 1
        assert probed(FP8WATCH_PORT=port, FP8WATCH_TLS_CERT=str(cert)) == 1
    tls = {"FP8WATCH_PORT": port, "FP8WATCH_TLS_CERT": str(cert)}
    assert probed(**tls) == 1, "nobody is there"
    with Serving(tmp_path, FP8WATCH_TLS_KEY=str(key), FP8WATCH_HOST="127.0.0.1", **tls):
        assert probed(**tls, FP8WATCH_HOST="0.0.0.0") == 0
        assert probed(FP8WATCH_PORT=port) == 1
        assert probed(FP8WATCH_PORT="x") == 1


def test_a_health_check_reads_the_variables_of_the_collector() -> None:
    known = {s.variable: s for s in SETTINGS}
    source = Path(probe.__file__).read_text()
    assert set(re.findall(r'"(FP8WATCH_\w+)"', source)) <= set(known)
    assert str(known["FP8WATCH_PORT"].default) == probe.DEFAULT_PORT


@pytest.mark.long
def test_it_starts_a_postgresql_of_its_own(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(dir="/tmp")  # a socket has a short path
    os.chmod(folder, 0o755)  # under root the server is a user of its own
    command = [sys.executable, "-c", "import sys; from fp8watch_server.cli import main; sys.exit(main(sys.argv[1:]))"]
    env = {"FP8WATCH_DATABASE_URL": "", "XDG_DATA_HOME": folder}
    try:
        for last_step in (1, 2):  # the second time it goes on with what is there
            with Serving(tmp_path, "--pg", "--port", "0", command=command, **env) as serving:
                assert "postgresql+psycopg://" in serving.line
                with httpx.Client(base_url=serving.url, timeout=20) as client:
                    Agent(client, session="ab"[last_step - 1] * 32).register([SITE]).send([SITE], [last_step])
                    assert client.get("/api/v1/runs/run-1").json()["attempt"] == last_step
                postmaster = Path(folder, "fp8watch", "pg", "postmaster.pid")
                assert postmaster.exists()
                if last_step == 1:
                    serving.kill()
                    assert postmaster.exists(), "nobody has stopped it"
                else:
                    assert serving.kill(signal.SIGTERM)[0] == 0
                    assert not postmaster.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.usefixtures("environ")
def test_a_postgresql_of_its_own_and_another_database_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert "keep one of them" in refusal(capsys, "--pg")


@pytest.mark.parametrize(
    ("host", "given", "told"),
    [("0.0.0.0", "", True), ("0.0.0.0", "https://watch.example", False), ("127.0.0.1", "", False)],
)
def test_where_links_lead_is_said_where_it_is_the_name_of_a_machine(
    host: str, given: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tell_of_links(Settings(database_url="sqlite://", host=host, public_url=given), "http://pod-7:8420")
    assert ["FP8WATCH_PUBLIC_URL" in r.getMessage() for r in caplog.records] == [True] * told
