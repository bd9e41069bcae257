"""A fleet that sends so many batches a second and hardly works for it: bodies made beforehand, plain sockets, a process of its own.

    python fleet.py URL BATCHES_PER_S RUNS RANKS SITES

Prints "ready" when everything is registered and made, sends from then on, and at the end of its standard input prints how
many batches were acknowledged, and in how many seconds.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from collector.kit import Agent

from fp8watch_agent.wire import BATCH_CONTENT_TYPE
from fp8watch_server.load.model import traits_of
from fp8watch_server.load.stream import LoadPlan, RankStream

SENDERS = 40
LASTS_S = 30
"""For how long bodies are made."""


class Sender:
    """One connection, and the bodies that go through it at their times."""

    def __init__(self, host: str, port: int, bodies: list[bytes], interval_s: float, phase_s: float) -> None:
        self._address, self._bodies = (host, port), bodies
        self._interval_s, self._phase_s = interval_s, phase_s
        head = f"POST /v1/batches HTTP/1.1\r\nHost: {host}\r\nContent-Type: {BATCH_CONTENT_TYPE}\r\n"
        self._head = f"{head}Content-Encoding: zstd\r\nContent-Length: "
        self.num_acked = 0
        self.num_refused = 0

    def work(self, began: float, stop: threading.Event) -> None:
        """Send until told to stop, never ahead of time; who is late sends at once."""
        with socket.create_connection(self._address, timeout=20) as conn:
            for i, body in enumerate(self._bodies):
                if stop.wait(max(0.0, began + self._phase_s + i * self._interval_s - time.monotonic())):
                    return
                while not self._acked(conn, body):
                    if stop.wait(1.0):
                        return

    def _acked(self, conn: socket.socket, body: bytes) -> bool:
        conn.sendall(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        answer = conn.recv(1 << 16)
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            answer += conn.recv(1 << 16)
        if answer.startswith(b"HTTP/1.1 200"):
            self.num_acked += 1
            return True
        self.num_refused += 1
        assert answer.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429")), answer
        return False


def senders(url: str, batches_per_s: int, num_runs: int, num_ranks: int, num_sites: int) -> list[Sender]:
    """Ranks of a few runs, each connection with its share of them in turn."""
    at = urlsplit(url)
    steps = LASTS_S * batches_per_s // num_ranks
    shares: list[list[list[bytes]]] = [[] for _ in range(SENDERS)]
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        for number in range(num_ranks):
            plan = LoadPlan(
                num_ranks // num_runs,
                num_sites,
                steps,
                run=f"busy-{number % num_runs}",
                step_s=num_ranks / batches_per_s,
            )
            if number < num_runs:
                traits = traits_of(plan.sites, plan.seed)
            stream = RankStream(plan, number // num_runs, traits=traits, session=f"{number:032x}")
            Agent(client, run=plan.run, session=stream.session, rank=stream.rank).register(plan.sites)
            shares[number % SENDERS].append([body.data for body in stream])
    interval_s = SENDERS / batches_per_s
    return [
        Sender(
            str(at.hostname),
            at.port or 80,
            [body for step in zip(*share, strict=True) for body in step],
            interval_s,
            i / batches_per_s,
        )
        for i, share in enumerate(shares)
    ]


def main(url: str, batches_per_s: str, num_runs: str, num_ranks: str, num_sites: str) -> None:
    """Until standard input ends."""
    made = senders(url, int(batches_per_s), int(num_runs), int(num_ranks), int(num_sites))
    print("ready", flush=True)
    stop, began, cpu_s = threading.Event(), time.monotonic(), time.process_time()
    threads = [threading.Thread(target=sender.work, args=(began, stop)) for sender in made]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    seconds = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join()
    acked, refused = sum(sender.num_acked for sender in made), sum(sender.num_refused for sender in made)
    print(acked, seconds, time.process_time() - cpu_s, refused, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
