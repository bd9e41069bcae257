"""fp8watch export to S3: what is read back from a bucket is what a folder would hold, and nothing is there in part."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pip install 'fp8watch[export]'")
pytest.importorskip("moto", reason="pip install 'moto[s3]' flask-cors")
pytest.importorskip("flask_cors", reason="pip install flask-cors")

import pyarrow.parquet as pq
from collector.kit import on_sqlite
from pyarrow import fs
from store.filled_store import fill
from store.kit import Feed

from fp8watch_server.export import object_store
from fp8watch_server.export.command import NAMES, main

pytestmark = on_sqlite
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Host and port of an S3 on loopback, with an empty bucket."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **KEYS}
    )
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            break
        except OSError:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.1)
    store = fs.S3FileSystem(
        access_key="testing", secret_key="testing", endpoint_override=f"127.0.0.1:{port}", scheme="http",
        region="us-east-1", allow_bucket_creation=True,
    )  # fmt: skip
    store.create_dir("runs")
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def options(server: str, monkeypatch: pytest.MonkeyPatch, database_url: str) -> str:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", database_url)
    return f"?endpoint_override={server}&scheme=http&region=us-east-1"


def objects(options: str, prefix: str) -> list[str]:
    store, path = object_store.opened(f"s3://runs/{prefix}{options}")
    return sorted(f.base_name for f in store.get_file_info(fs.FileSelector(path, allow_not_found=True)) if f.is_file)


def test_what_is_read_from_the_bucket_is_what_a_folder_holds(
    feed: Feed, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 60)
    assert main(["run-1", "-o", str(tmp_path / "here")]) == 0
    capsys.readouterr()
    assert main(["run-1", "-o", f"s3://runs/there{options}"]) == 0
    said = capsys.readouterr().out
    assert "s3://runs/there/series.parquet: " in said
    assert "endpoint" not in said
    assert objects(options, "there") == sorted(f"{name}.parquet" for name in NAMES)
    store, path = object_store.opened(f"s3://runs/there{options}")
    for name in NAMES:
        local = pq.read_table(tmp_path / "here" / f"{name}.parquet")
        assert (
            pq.read_table(f"{path}/{name}.parquet", filesystem=store).to_pylist().__repr__()
            == local.to_pylist().__repr__()
        )


def test_duckdb_reads_the_bucket(feed: Feed, options: str) -> None:
    duckdb = pytest.importorskip("duckdb")
    fill(feed, 60)
    assert main(["run-1", "-o", f"s3://runs/one/steps.parquet{options}", "--table", "steps"]) == 0
    assert objects(options, "one") == ["steps.parquet"]
    store, path = object_store.opened(f"s3://runs/one{options}")
    steps = pq.ParquetDataset(
        path, filesystem=store
    ).read()  # DuckDB's own client of S3 is an extension that it downloads
    assert duckdb.sql("SELECT count(*), min(step), max(step) FROM steps").fetchall() == [(60, 0, 59)]
    assert steps.num_rows == 60


def test_nothing_is_written_over_and_nothing_is_left_of_an_export_that_fails(
    feed: Feed, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 20)
    target = f"s3://runs/again{options}"
    assert main(["run-1", "-o", target]) == 0
    assert main(["run-1", "-o", target]) == 2
    assert "never written over" in capsys.readouterr().err
    upload, sent = object_store._upload, []

    def fail_at_the_third(store: fs.FileSystem, file: Path, name: str) -> None:
        upload(store, file, name)
        sent.append(name)
        if len(sent) == 3:
            raise OSError("the connection is gone")

    monkeypatch.setattr(object_store, "_upload", fail_at_the_third)
    assert main(["run-1", "-o", f"s3://runs/part{options}"]) == 2
    assert len(sent) == 3
    assert objects(options, "part") == []
    assert "nothing was left there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://runs", "s3://BUCKET/PREFIX"),
        ("gs://runs/x", "s3://BUCKET/PREFIX"),
        ("s3://key:secret@runs/x", "credentials"),
        ("s3://nobody/x{options}", "bucket does not exist"),
    ],
)
def test_a_place_that_is_none_is_said(
    feed: Feed, options: str, url: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 5)
    assert main(["run-1", "-o", url.format(options=options)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "secret" not in said.replace("SECRET", "")
