"""Bombs are refused with memory flat, TLS is served from files, and logs hold no secret and no forged line."""

from __future__ import annotations

import gzip
import json
import logging
import ssl
import subprocess
import threading
import zlib
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zstandard
from collector.kit import ZSTD, Agent, Serving, make_site

from fp8watch_agent.wire import (
    BATCH_CONTENT_TYPE,
    MAX_HEADER_BYTES,
    MAX_INFLATED_BYTES,
    MAX_RECORDS,
    MAX_TILE_MAPS,
    MAX_WIRE_BYTES,
    TILE_MAPS_CONTENT_TYPE,
)
from fp8watch_server.http.logs import JsonLines, TextLines

SITE = make_site()
FLAT_BYTES = 32 << 20
"""What is past a limit costs no more than the pieces in which it is counted, give or take an allocator's habits."""
WITHIN = MAX_INFLATED_BYTES + FLAT_BYTES
"""What is within the limit may be inflated once before it is refused for what is in it."""
INFLATED = ("five million records", "a nest of arrays", "gzip in gzip")


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


def rss_peak_bytes(pid: int) -> int:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def frame(raw: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(raw)


def lying_frame() -> bytes:
    """32 KiB of zstd that hold 1 GiB of zeros and say so: one-shot decompression believes it."""
    made = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    out = b"".join(made.compress(b"\0" * (1 << 24)) for _ in range(64))
    return out + made.flush()


def wide_frame(window_log: int) -> bytes:
    """Written as a stream: of what is compressed at once zstd knows the size, and narrows the window to it."""
    params = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    made = zstandard.ZstdCompressor(compression_params=params).compressobj()
    out = made.compress(bytes(1 << 20)) + made.flush()
    assert zstandard.get_frame_parameters(out).window_size == 1 << window_log
    return out


def batch_of(header: dict[str, Any], columns: bytes = b"\x80", steps: bytes = b"\x80") -> bytes:
    """A body whose maps are given as bytes."""
    head = {"run": "run-1", "session": "a" * 32, "rank": 0, "seq": 1, "step0": 0, "num_steps": 0, "num_records": 0}
    packed = msgspec.msgpack.encode({**head, **header})
    return b"\x83\xa6header" + packed + b"\xa5steps" + steps + b"\xa7columns" + columns


def many_columns() -> bytes:
    """A map of a million names: 7 MiB that would unfold to twenty times that."""
    names = b"".join(b"\xa4" + i.to_bytes(4, "big").translate(ASCII) + b"\xc4\x00" for i in range(1 << 20))
    return b"\xdf" + (1 << 20).to_bytes(4, "big") + names


ASCII = bytes(i & 0x7F for i in range(256))


def many_records() -> bytes:
    n = 5_000_000
    columns = {"step": bytes(4 * n), "site": bytes(8 * n)}
    steps = {"step": bytes(8), "status": b"\0", "present": b"\0"}
    steps |= dict.fromkeys(("time", "loss", "grad_norm", "lr", "loss_scale"), bytes(8))
    head = {"num_steps": 1, "num_records": n}
    return batch_of(head, msgspec.msgpack.encode(columns), msgspec.msgpack.encode(steps))


def many_maps() -> bytes:
    n = 1 << 20
    head = {"run": "run-1", "session": "a" * 32, "rank": 0, "seq": 1, "num_maps": n}
    columns = {
        "site": bytes(8 * n),
        "step": bytes(8 * n),
        "num_tile_rows": bytes(4 * n),
        "num_tile_columns": bytes(4 * n),
    }
    return msgspec.msgpack.encode({"header": head, "columns": columns})


def map_of(rows: int, columns: int, seq: int = 1) -> bytes:
    """One map of which every column is left out: all are 0."""
    head = {"run": "run-1", "session": "a" * 32, "rank": 0, "seq": seq, "num_maps": 1}
    keys = {"site": SITE.id.to_bytes(8, "little"), "step": bytes(8)}
    keys |= {"num_tile_rows": rows.to_bytes(4, "little"), "num_tile_columns": columns.to_bytes(4, "little")}
    return frame(msgspec.msgpack.encode({"header": head, "columns": keys}))


def deep(levels: int) -> bytes:
    return b"\x91" * levels


BOMBS: dict[str, Any] = {
    "a frame that declares a gigabyte": (lying_frame, BATCH_CONTENT_TYPE, "zstd", 413),
    "a frame that declares nothing": (
        lambda: zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(512 << 20)),
        BATCH_CONTENT_TYPE,
        "zstd",
        413,
    ),
    "a window of half a gigabyte": (
        lambda: wide_frame(29),
        BATCH_CONTENT_TYPE,
        "zstd",
        400,
    ),
    "gzip": (lambda: gzip.compress(bytes(160 << 20), 1), BATCH_CONTENT_TYPE, "gzip", 413),
    "gzip in gzip": (lambda: gzip.compress(gzip.compress(bytes(64 << 20))), BATCH_CONTENT_TYPE, "gzip", 400),
    "a million columns": (lambda: frame(batch_of({}, many_columns()), 1), BATCH_CONTENT_TYPE, "zstd", 422),
    "five million records": (lambda: frame(many_records()), BATCH_CONTENT_TYPE, "zstd", 413),
    "a million tile maps": (lambda: frame(many_maps()), TILE_MAPS_CONTENT_TYPE, "zstd", 413),
    "a map of 64 million tiles that are not there": (
        lambda: map_of(8192, 8192),
        TILE_MAPS_CONTENT_TYPE,
        "zstd",
        413,
    ),
    "a header of a megabyte": (
        lambda: frame(batch_of({"batch_ids": ["x" * 100] * 10_000})),
        BATCH_CONTENT_TYPE,
        "zstd",
        422,
    ),
    "a nest of arrays": (lambda: frame(deep(60 << 20)), BATCH_CONTENT_TYPE, "zstd", 400),
    "nine megabytes": (lambda: bytes(MAX_WIRE_BYTES + 1), BATCH_CONTENT_TYPE, "zstd", 413),
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Serving(tmp_path_factory.mktemp("bombs"), "--port", "0") as made:
        with httpx.Client(base_url=made.url) as client:
            Agent(client).register([SITE]).send([SITE], [1])
        yield made


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_memory_stays_flat(serving: Any, name: str) -> None:
    make, kind, encoding, status = BOMBS[name]
    body = make()
    assert len(body) <= MAX_WIRE_BYTES or name == "nine megabytes"
    pid = serving.process.pid
    forget_peak(pid)
    before = rss_peak_bytes(pid)
    headers = {"Content-Type": kind, "Content-Encoding": encoding}
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        answer = client.post(
            "/v1/batches" if kind == BATCH_CONTENT_TYPE else "/v1/tile-maps", content=body, headers=headers
        )
        assert answer.status_code == status, answer.text
        assert answer.json()["remedy"]
        assert "not a zstd frame" in answer.text or not name.startswith("a window"), "it was read"
        assert client.get("/api/v1/runs/run-1").json()["last_step"] == 1
    grown = rss_peak_bytes(pid) - before
    print(f"{len(body)} bytes on the wire, {grown >> 20} MiB more at the peak")
    assert grown < (WITHIN if name in INFLATED else FLAT_BYTES)


def test_a_large_map_of_a_few_bytes_costs_little_and_is_shown_in_part(serving: Any) -> None:
    body = map_of(4096, 4096, seq=2)
    assert len(body) < 500
    pid = serving.process.pid
    forget_peak(pid)
    before = rss_peak_bytes(pid)
    headers = {"Content-Type": TILE_MAPS_CONTENT_TYPE, "Content-Encoding": "zstd"}
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        answer = client.post("/v1/tile-maps", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert rss_peak_bytes(pid) - before < FLAT_BYTES
        got = client.get(f"/api/v1/runs/run-1/sites/{SITE.id}/tile-map").json()
    assert got["shape"] == [128, 4096]
    assert len(got["amax"]) == len(got["flags"]) == 128 * 4096
    assert got["cut"] == {"shape": [4096, 4096], "num_broken": 0}
    grown = rss_peak_bytes(pid) - before
    print(f"{len(body)} bytes on the wire, {grown >> 20} MiB more at the peak of looking at it")
    assert grown < 512 << 20


def test_limits_are_those_that_are_promised() -> None:
    assert (MAX_WIRE_BYTES, MAX_INFLATED_BYTES, MAX_HEADER_BYTES) == (8 << 20, 64 << 20, 64 << 10)
    assert MAX_RECORDS >= 64 * 4096
    assert MAX_TILE_MAPS >= 16 * 1024


def test_gzip_is_read_as_well_and_kept_as_it_came(client: Any, app: Any) -> None:
    agent = Agent(client).register([SITE])
    raw = zstandard.ZstdDecompressor().decompress(agent.body([SITE], [7]))
    body = gzip.compress(raw)
    assert agent.post(body, Content_Encoding="gzip").status_code == 200
    app.state.worker.drain()
    got = client.get(f"/api/v1/runs/run-1/series?site={SITE.id}&field=amax_max").json()
    assert (got["steps"], got["values"]) == ([7], [2.0])
    for cut in (body[:-1], body[:40], body + b"x", zlib.compress(raw), body[:-8] + bytes(8)):
        assert agent.post(cut, Content_Encoding="gzip").status_code == 400


def test_tls_is_served_from_two_files(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    with Serving(tmp_path, "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)) as serving:
        assert serving.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=serving.url, verify=context) as client:
            Agent(client).register([SITE]).send([SITE], [1])
        with pytest.raises(httpx.HTTPError):
            httpx.get(serving.url.replace("https", "http"))


SECRETS = ("hunter22-the-password", "https://hooks.slack.com/services/T/B/xyz")


@pytest.mark.parametrize("kind", [TextLines, JsonLines])
def test_a_line_of_the_log_holds_no_secret_and_is_one_line(kind: Any) -> None:
    formatter = kind(SECRETS)
    try:
        raise RuntimeError(f"cannot reach {SECRETS[1]} with fp8w_{'a' * 43}")
    except RuntimeError:
        import sys

        trace = sys.exc_info()
    text = f"run 'x\n2026 CRITICAL forged\u2028 {SECRETS[0]} fp8w_{'b' * 43}"
    record = logging.LogRecord("fp8watch.collector", logging.ERROR, "f.py", 1, "%s", (text,), trace)
    line = formatter.format(record)
    for secret in (*SECRETS, "aaaaaaaa", "bbbbbbbb"):
        assert secret not in line
    if kind is JsonLines:
        (whole,) = line.splitlines()
        got = json.loads(whole)
        assert (got["level"], got["logger"]) == ("error", "fp8watch.collector")
        assert "RuntimeError" in got["traceback"]
        assert "forged" in got["message"]
    else:
        assert not any(part.startswith("2026 CRITICAL") for part in line.splitlines())


def test_json_lines_name_every_request_without_its_query(tmp_path: Path) -> None:
    token = "fp8w_" + "t" * 43
    env = {"FP8WATCH_TOKEN": token, "FP8WATCH_LOG_FORMAT": "json", "FP8WATCH_LOG_LEVEL": "info"}
    with Serving(tmp_path, "--port", "0", **env) as serving:
        headers = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{serving.url}/api/v1/runs?token={token}", headers=headers).status_code == 200
        assert httpx.get(f"{serving.url}/api/v1/runs").status_code == 401
        _, err = serving.kill(15)
    lines = [json.loads(line) for line in err.splitlines()]
    asked = [(x["method"], x["path"], x["status"]) for x in lines if x["logger"] == "fp8watch.request"]
    assert asked == [("GET", "/api/v1/runs", 200), ("GET", "/api/v1/runs", 401)]
    assert "tttttttt" not in err


def test_many_bombs_at_once_leave_the_others_alone(serving: Any) -> None:
    bomb = lying_frame()
    headers = {"Content-Type": BATCH_CONTENT_TYPE, **ZSTD}
    statuses: list[int] = []

    def throw() -> None:
        with httpx.Client(base_url=serving.url, timeout=60, verify=False, trust_env=False) as client:
            for _ in range(3):
                statuses.append(client.post("/v1/batches", content=bomb, headers=headers).status_code)

    forget_peak(serving.process.pid)
    before = rss_peak_bytes(serving.process.pid)
    threads = [threading.Thread(target=throw) for _ in range(8)]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=serving.url, timeout=60) as client:
        agent = Agent(client, session="c" * 32).register([SITE])
        for step in range(10, 15):
            agent.send([SITE], [step])
    for thread in threads:
        thread.join(60)
    assert set(statuses) <= {413, 503}
    assert np.mean(np.array(statuses) == 413) > 0.5
    assert rss_peak_bytes(serving.process.pid) - before < 2 * FLAT_BYTES
