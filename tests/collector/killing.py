"""Senders that never give up, collectors that are killed under them, and the account of what became of every body."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from collector.kit import Agent, Serving, make_site

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine

SITES = [make_site("up", order=0), make_site("down", order=1)]
Key = tuple[str, int, int]  # run, rank, seq


@dataclass
class Sender:
    """One agent: sends its bodies in order, each until it is acknowledged, and remembers what it knows."""

    number: int
    runs: int = 1
    acked: dict[int, bytes] = field(default_factory=dict)
    unsure: dict[int, bytes] = field(default_factory=dict)  # sent, no answer
    num_sent: int = 0
    num_refused: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    is_registered: bool = False

    @property
    def run(self) -> str:
        """Several senders share a run: they are its ranks."""
        return f"run-{self.number % self.runs}"

    def work(self, url_of: Callable[[], str], acks: threading.Semaphore, stop: threading.Event) -> None:
        """Send until told to stop, at whatever collector there is."""
        with httpx.Client(timeout=10, verify=False, trust_env=False) as client:  # to make one takes a turn's time
            while not stop.is_set():
                client.base_url = url_of()
                try:
                    self._send(client, acks, stop)
                except httpx.HTTPError:
                    stop.wait(0.01)

    def _send(self, client: httpx.Client, acks: threading.Semaphore, stop: threading.Event) -> None:
        agent = Agent(client, run=self.run, session=f"{self.number:032x}", rank=self.number)
        agent.patient = False
        for register in (agent.register_run, agent.register_session, lambda: agent.register_sites(SITES)):
            if self.is_registered:  # once, as an agent does: what was answered with 200 outlives a kill, too
                break
            answer = register()
            self._count(answer)
            if answer.status_code != 200:
                return
        self.is_registered = True
        while not stop.is_set():
            seq = len(self.acked) + 1
            body = self.unsure.get(seq) or agent.body(SITES, [seq], seq=seq, fields={"num_saturated": self.number + 1})
            self.unsure[seq] = body
            self.num_sent += 1
            answer = agent.post(body)
            self._count(answer)
            if answer.status_code == 200:
                assert answer.json()["acked"] == seq
                self.acked[seq] = hashlib.sha256(self.unsure.pop(seq)).digest()
                acks.release()
            else:
                assert answer.status_code in (429, 503), answer.text
                stop.wait(0.05)

    def _count(self, answer: Any) -> None:
        self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1


@dataclass
class Tally:
    """What the kills did."""

    num_kills: int = 0
    num_replay_kills: int = 0  # after which something that a sender was unsure of was there already
    num_unsure: int = 0
    num_replays: int = 0

    def share(self) -> float:
        """Of the kills, those that hit between commit and answer."""
        return self.num_replay_kills / max(self.num_kills, 1)


class Crew:
    """Senders at work, in threads."""

    def __init__(self, num_senders: int, runs: int, url_of: Callable[[int], str]) -> None:
        self.senders = [Sender(i, runs) for i in range(num_senders)]
        self._url_of = url_of
        self.acks = threading.Semaphore(0)
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        def url_of(number: int) -> str:
            while not (url := self._url_of(number)) and not self._stop.is_set():
                self._stop.wait(0.01)
            return url

        def work(sender: Sender) -> None:
            try:
                sender.work(lambda: url_of(sender.number), self.acks, self._stop)
            except BaseException as e:
                self._failed.append(e)

        self._threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in self.senders]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failed:
            raise self._failed[0]

    def unsure(self) -> set[Key]:
        """What was sent and has no answer."""
        return {(s.run, s.number, seq) for s in self.senders for seq in dict(s.unsure)}

    def wait_for_acks(self, count: int, timeout_s: float = 30.0) -> None:
        """Until so many more have been acknowledged."""
        until = time.monotonic() + timeout_s
        for _ in range(count):
            assert self.acks.acquire(timeout=max(0.0, until - time.monotonic())), self._failed or "nothing is taken"


def kill_under_load(
    crew_of: Callable[[Callable[[int], str]], Crew],
    start: Callable[[], Serving],
    stored: Callable[[], set[Key]],
    *,
    num_kills: int,
    acks_between: int,
    rng: random.Random,
) -> tuple[Crew, Tally]:
    """Kill -9 again and again, mostly at any time. Where fewer than a fifth of the kills came between commit and answer
    (a busy machine, whose rounds are long) the next waits for such a moment; goes on to three times `num_kills` for them.
    """
    serving = start()
    there = [serving.url]
    tally = Tally()
    with crew_of(lambda number: there[0]) as crew:
        while tally.num_kills < num_kills or (tally.share() < 0.2 and tally.num_kills < 3 * num_kills):
            crew.wait_for_acks(acks_between)
            if tally.share() >= 0.2 or tally.num_kills < 2:
                time.sleep(rng.uniform(0, 0.06))
            else:
                until = time.monotonic() + 2.0
                while time.monotonic() < until and not crew.unsure() & stored():
                    time.sleep(0.002)
            serving.kill()
            there[0] = ""
            tally.num_kills += 1
            time.sleep(0.03)  # what was on its way is broken by now
            unsure = crew.unsure()
            replays = unsure & stored()
            tally.num_unsure += len(unsure)
            tally.num_replays += len(replays)
            tally.num_replay_kills += bool(replays)
            serving = start()
            there[0] = serving.url
        crew.wait_for_acks(acks_between)
    serving.kill()
    return crew, tally


class Store:
    """The database, looked at from beside the collector."""

    def __init__(self, database_url: str) -> None:
        self.engine = make_engine(database_url)

    def keys(self) -> set[Key]:
        """Of every stored body; quick enough for each of many kills."""
        b = t.hot_batch.c
        with self.engine.connect() as conn:
            return {(run, rank, seq) for run, rank, seq in conn.execute(sa.select(b.run_id, b.rank, b.seq))}

    def stored(self) -> dict[Key, bytes]:
        """Hash of every stored body by (run, rank, seq); a body that is not what its hash says is torn."""
        b = t.hot_batch.c
        with self.engine.connect() as conn:
            rows = conn.execute(sa.select(b.run_id, b.rank, b.seq, b.body, b.body_sha256)).all()
        for _, _, _, body, digest in rows:
            assert hashlib.sha256(bytes(body)).digest() == bytes(digest), "torn"
        return {(run, rank, seq): bytes(digest) for run, rank, seq, _, digest in rows}

    def check(self, senders: Sequence[Sender]) -> None:
        """Nothing lost, torn, invented or counted twice."""
        stored = self.stored()
        acked = {(s.run, s.number, seq): digest for s in senders for seq, digest in s.acked.items()}
        unsure = {
            (s.run, s.number, seq): hashlib.sha256(body).digest() for s in senders for seq, body in s.unsure.items()
        }
        lost = {key for key in acked if stored.get(key) != acked[key]}
        assert lost == set()
        invented = {key for key, digest in stored.items() if acked.get(key, unsure.get(key)) != digest}
        assert invented == set()
        with self.engine.connect() as conn:
            assert conn.execute(sa.select(sa.func.count()).select_from(t.scalar)).scalar_one() == len(stored)
            for run_id, num_batches in conn.execute(sa.select(t.run.c.run_id, t.run.c.num_batches)).all():
                b = t.hot_batch.c
                arrivals = conn.execute(sa.select(b.arrival).where(b.run_id == run_id).order_by(b.arrival)).scalars()
                assert list(arrivals) == list(range(1, num_batches + 1))
            if conn.dialect.name == "sqlite":
                assert conn.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"

    def check_totals(self) -> None:
        """Every batch was counted by the worker once: call it when nothing is pending."""
        b, total = t.hot_batch.c, t.site_total.c
        with self.engine.connect() as conn:
            assert conn.execute(sa.select(sa.func.count()).where(b.detected == t.BATCH_PENDING)).scalar_one() == 0
            by_rank = conn.execute(sa.select(b.run_id, b.rank, sa.func.count()).group_by(b.run_id, b.rank)).all()
            wanted: dict[str, int] = {}
            for run_id, rank, count in by_rank:
                wanted[run_id] = wanted.get(run_id, 0) + (rank + 1) * count
            for run_id, site, num in conn.execute(sa.select(total.run_id, total.site, total.num_saturated)).all():
                assert num == wanted[run_id], (run_id, site)

    def close(self) -> None:
        """Let go of it."""
        self.engine.dispose()


def serve(tmp_path: Path, database_url: str, *args: str, **env: str) -> Serving:
    """A collector as a process, with its answers a little late after the commit, so that a kill can fall between.

    Its fake detectors need no past, whose replay would take most of the time between two kills.
    """
    given = {"FP8WATCH_DATABASE_URL": database_url, "FP8WATCH_TEST_ANSWER_LATE_S": "0.08"}
    given |= {"FP8WATCH_TEST_REPLAY_SAMPLES": "1", "FP8WATCH_TEST_KEEPS_BATCHES": "1", **env}
    return Serving(tmp_path, "--port", "0", *args, **given).start()


def num_kills_of_part(num_parts: int) -> int:
    """Of 500 kills, or as many as FP8WATCH_KILLS says."""
    return max(1, int(os.environ.get("FP8WATCH_KILLS", "500")) // num_parts)
