"""Several collectors on one PostgreSQL, restarts under load, and more than one collector can hold."""

from __future__ import annotations

import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.killing import SITES, Crew, Store, serve
from collector.kit import ZSTD, Agent
from support import database

from fp8watch_agent.wire import BATCH_CONTENT_TYPE
from fp8watch_server.db import schema as t

on_postgresql = pytest.mark.parametrize("database_kind", ["postgresql"])


@pytest.fixture
def store(database_url: str) -> Any:
    made = Store(database_url)
    yield made
    made.close()


def wait_until_detected(store: Store, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    pending = sa.select(sa.func.count()).where(t.hot_batch.c.detected == t.BATCH_PENDING)
    while True:
        with store.engine.connect() as conn:
            if conn.execute(pending).scalar_one() == 0:
                return
        assert time.monotonic() < until, "the worker does not go on"
        time.sleep(0.05)


@on_postgresql
def test_two_collectors_on_one_postgresql_take_turns_and_count_once(
    tmp_path: Path, database_url: str, store: Store
) -> None:
    """Eight senders change the collector with every connection; one collector is killed, and comes back."""
    both = [serve(tmp_path, database_url), serve(tmp_path, database_url)]
    urls = [serving.url for serving in both]
    turn = [0]

    def any_url(number: int) -> str:
        turn[0] += 1
        return urls[(number + turn[0]) % len(urls)]

    with Crew(8, 2, any_url) as crew:
        crew.wait_for_acks(40)
        both[0].kill()  # the leader of the detectors, most likely: it was there first
        urls[:] = [both[1].url]
        crew.wait_for_acks(40)
        both[0] = serve(tmp_path, database_url)
        urls[:] = [serving.url for serving in both]
        crew.wait_for_acks(40)
    store.check(crew.senders)
    wait_until_detected(store)
    store.check_totals()
    for serving in both:
        assert serving.kill(signal.SIGTERM)[1] == ""


@on_postgresql
def test_one_body_sent_to_two_collectors_at_once_is_stored_once(
    tmp_path: Path, database_url: str, store: Store
) -> None:
    both = [serve(tmp_path, database_url), serve(tmp_path, database_url)]
    clients = [httpx.Client(base_url=serving.url, verify=False, trust_env=False, timeout=20) for serving in both]
    agent = Agent(clients[0]).register(SITES)
    num, statuses = 30, []
    for step in range(num):
        body = agent.body(SITES, [step])
        barrier = threading.Barrier(2)

        def send(client: httpx.Client, body: bytes = body, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            headers, until = {"Content-Type": BATCH_CONTENT_TYPE, **ZSTD}, time.monotonic() + 20
            while True:  # a database that is slow is no answer
                status = client.post("/v1/batches", content=body, headers=headers).status_code
                if status != 503 or time.monotonic() > until:
                    break
            statuses.append(status)

        threads = [threading.Thread(target=send, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        if statuses != [200] * (2 * step + 2):
            break
    for client, serving in zip(clients, both, strict=True):
        client.close()
        serving.kill()
    assert statuses == [200] * (2 * num)
    with store.engine.connect() as conn:
        arrivals = list(conn.execute(sa.select(t.hot_batch.c.arrival).order_by(t.hot_batch.c.arrival)).scalars())
    assert arrivals == list(range(1, num + 1))


def test_rolling_restarts_under_load_lose_nothing_and_drain(tmp_path: Path, database_url: str, store: Store) -> None:
    serving = serve(tmp_path, database_url)
    there = [serving.url]
    with Crew(8, 2, lambda number: there[0]) as crew:
        for _ in range(3):
            crew.wait_for_acks(25)
            there[0] = ""
            began = time.perf_counter()
            status, err = serving.kill(signal.SIGTERM)
            assert (status in (0, -signal.SIGTERM), err) == (True, "")
            assert time.perf_counter() - began < 45
            time.sleep(0.05)
            stored = store.stored()
            unsure = {(s.run, s.number, seq) for s in crew.senders for seq in dict(s.unsure)}
            assert not unsure & set(stored), "what was committed was not answered"
            serving = serve(tmp_path, database_url)
            there[0] = serving.url
        crew.wait_for_acks(25)
    serving.kill(signal.SIGTERM)
    store.check(crew.senders)


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("database_kind", database.KINDS[:1])
def test_more_than_it_can_hold_is_refused_and_memory_stays(tmp_path: Path, database_url: str) -> None:
    """Sixty senders push 8 MiB each and never finish: past 128 MiB they are sent away, and health is answered."""
    import socket

    serving = serve(tmp_path, database_url)
    assert serving.process is not None
    host, port = serving.url.removeprefix("http://").split(":")
    before = rss_bytes(serving.process.pid)
    head = (
        f"POST /v1/batches HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {BATCH_CONTENT_TYPE}\r\n"
        f"Content-Encoding: zstd\r\nContent-Length: {8 << 20}\r\n\r\n"
    ).encode()
    chunk = b"\0" * (1 << 20)
    answers: list[bytes] = []
    socks = []
    for _ in range(40):
        sock = socket.create_connection((host, int(port)), timeout=10)
        sock.sendall(head)
        try:
            for _ in range(7):
                sock.sendall(chunk)
        except TimeoutError:  # nobody reads any more: neither will health be answered
            break
        except OSError:  # it was sent away in the middle
            pass
        socks.append(sock)
    until, silent = time.monotonic() + 20, set(socks)
    while silent and time.monotonic() < until and sum(b" 429 " in line for line in answers) < 20:
        for sock in select.select(list(silent), [], [], 1.0)[0]:
            silent.discard(sock)
            try:
                answers.append(sock.recv(200).split(b"\r\n")[0])
            except OSError:  # it was sent away in the middle
                answers.append(b"")
    grown = rss_bytes(serving.process.pid) - before
    assert httpx.get(f"{serving.url}/healthz").json() == {"status": "ok"}
    for sock in socks:
        sock.close()
    serving.kill()
    refused = sum(b" 429 " in line for line in answers)
    print(f"{refused} of {len(socks)} refused, RSS grew by {grown >> 20} MiB")
    assert refused >= 20
    assert not any(b" 200 " in line for line in answers)
    assert grown < 400 << 20
