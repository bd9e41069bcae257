"""What is promised of alerts: at least once, not twice, one message of a storm, soon."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from collector.kit import Agent, Serving, make_site
from detect import healthy_run
from detect.healthy_run import Run
from incidents.nonfinite_findings import nan_from
from incidents.store import RUN, TENANT, Store
from notify.receiver import Answer, Outbox, Receiver
from notify.senders import SENDER, webhook
from support.counts import part_of

from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.fold import close_quiet, fold
from fp8watch_server.notify.outbox import Dispatcher

Receivers = Callable[..., Receiver]
FLAPS: list[Answer] = [(500, {}, b""), (0, {}, b""), (503, {}, b""), (408, {}, b"")]


@pytest.mark.parametrize("num_kills", [3, pytest.param(part_of(15), id="15", marks=pytest.mark.long)])
def test_senders_that_are_killed_and_a_receiver_that_flaps_lose_nothing(
    outbox: Outbox, receiver_of: Receivers, num_kills: int
) -> None:
    chance = random.Random(num_kills)
    receiver = receiver_of(
        *(chance.choice(FLAPS) if chance.random() < 0.3 else (200, {}, b"") for _ in range(2 * num_kills))
    )
    receiver.delay_s = 0.05
    keys: set[str] = set()
    num_bites = 0
    command = [sys.executable, "-c", SENDER, outbox.url, receiver.url]
    for _ in range(num_kills):
        keys |= {outbox.put() for _ in range(3)}
        before = len(receiver.got)
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            receiver.wait_for(before + 1 + chance.randrange(2), 30.0)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        num_bites += any(row["state"] == "leased" for row in outbox.rows)
    assert num_bites >= num_kills / 5, f"{num_bites} of {num_kills} kills hit a message in flight"
    recovered = time.monotonic()
    dispatcher = Dispatcher(outbox.db, [webhook(receiver)], poll_s=0.05)
    dispatcher.start()
    outbox.wait_for(["sent"] * len(keys), 50.0)  # promised: 10 s
    took_s = time.monotonic() - recovered
    dispatcher.stop()
    delivered = Counter(g.headers["Idempotency-Key"] for g in receiver.got if g.status == 200)
    assert set(delivered) == keys
    extra = sum(delivered.values()) - len(keys)
    print(f"{num_kills} kills, {num_bites} in flight, {len(keys)} messages, {extra} twice, recovered in {took_s:.1f} s")
    assert extra <= num_bites
    assert max(delivered.values()) <= 1 + num_bites


def storm(
    tmp_path: Path, receiver: Receiver, ranks: int, steps: int, through: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all of 60 modules; the first `through` ranks go through the detectors, the others find what rank 0 found."""
    names = ("attn.qkv_proj", "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    monkeypatch.setattr(healthy_run, "MODULES", [f"layers.{i}.{name}" for i in range(12) for name in names])
    run = Run()
    store = Store(tmp_path, run)
    dispatcher = Dispatcher(store.db, [webhook(receiver)], clock=lambda: store.now + 1)
    findings = store.engine.observe(run.batch(range(steps), nan_from(3, 0)))
    assert len(findings) == steps - 3
    first = min(findings, key=lambda f: f.rank_in_flow)
    for rank in range(ranks):
        if 0 < rank < through:
            store.engine.observe(Run(rank=rank).batch(range(steps), nan_from(4)))
        theirs = [replace(f, rank=rank) for f in findings if rank == 0 or f is not first]
        store.now += 0.5
        with writing(store.db) as conn:
            fold(conn, RUN, TENANT, 1, theirs, run.facts, store.now)
        if rank % 64 == 0:
            dispatcher.deliver_one(dispatcher._channels[0])
    with writing(store.db) as conn:
        for step in range(steps, steps + 30):
            close_quiet(conn, RUN, TENANT, 1, step, store.now)
    while dispatcher.deliver_one(dispatcher._channels[0]):
        pass
    [incident] = store.incidents
    assert incident["place"]["ranks"] == list(range(ranks))
    assert incident["num_events"] >= ranks * (steps - 4)
    assert [g.body["status"] for g in receiver.got] == ["firing", "resolved"]
    assert {len(g.body["alerts"]) for g in receiver.got} == {1}
    store.db.dispose()


def test_a_storm_is_one_firing_and_one_resolve(
    tmp_path: Path, receiver_of: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm(tmp_path, receiver_of(), 32, 50, 2, monkeypatch)


@pytest.mark.heavy(30, "server/fp8watch_server/notify", "server/fp8watch_server/incidents")
def test_a_storm_of_a_thousand_ranks_is_one_firing_and_one_resolve(
    tmp_path: Path, receiver_of: Receivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm(tmp_path, receiver_of(), 1024, 500, 8, monkeypatch)


SERVE = "import sys; from fp8watch_server.cli import main; sys.exit(main(sys.argv[1:]))"
FLEET = Path(__file__).with_name("fleet.py")
BATCHES_PER_S, NUM_RUNS, NUM_RANKS, NUM_SITES, NUM_BROKEN = 200, 8, 200, 20, 32


@pytest.mark.heavy(
    35, "server/fp8watch_server/notify", "server/fp8watch_server/incidents", "server/fp8watch_server/pipeline"
)
def test_a_non_finite_batch_is_told_soon_while_two_hundred_batches_a_second_come_in(
    tmp_path: Path, database_url: str, receiver_of: Receivers
) -> None:
    """Each fourth breaks in one of the fleet's own runs, the others in runs that have just begun."""
    receiver, sites = receiver_of(), [make_site("up", order=0), make_site("down", order=1)]
    command = [sys.executable, "-c", SERVE, "--port", "0"]
    told_apart = [f"busy-{i // 4}" if i % 4 == 0 else f"broken-{i}" for i in range(NUM_BROKEN)]
    posted: dict[str, float] = {}
    answered: list[float] = []
    settings = {"FP8WATCH_DATABASE_URL": database_url, "FP8WATCH_WEBHOOK_URL": receiver.url}
    with Serving(tmp_path, command=command, **settings) as collector:
        load = [collector.url, str(BATCHES_PER_S), str(NUM_RUNS), str(NUM_RANKS), str(NUM_SITES)]
        fleet = subprocess.Popen(
            [sys.executable, str(FLEET), *load], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert fleet.stdout is not None
            assert fleet.stdout.readline() == "ready\n"
            time.sleep(3.0)  # until the collector is as busy as it stays
            with httpx.Client(base_url=collector.url, timeout=20, trust_env=False) as client:
                for i, run in enumerate(told_apart):
                    agent = Agent(client, run=run, session=f"{1000 + i:032x}", rank=NUM_RANKS).register(sites)
                    infinite = [0] * 8 + [1, 0]
                    posted[run] = time.monotonic()
                    agent.send(sites, list(range(5)), fields={"num_inf": infinite, "num_sentinel_tiles": infinite})
                    answered.append(time.monotonic() - posted[run])
                    time.sleep(0.2)
            got = receiver.wait_for(NUM_BROKEN, 60.0)
        finally:
            acked, seconds, cpu_s, num_refused = map(float, fleet.communicate(timeout=60)[0].split())
        collector.kill(signal.SIGTERM)
    told = {g.body["alerts"][0]["labels"]["run"]: g.at for g in got}
    assert len(got) == len(told) == NUM_BROKEN
    waits = [told[run] - at for run, at in posted.items()]
    rate, p99 = acked / seconds, statistics.quantiles(waits, n=100)[98]
    print(
        f"at {rate:.0f} batches/s ({cpu_s / seconds:.0%} of a core made them; {num_refused:.0f} refused for a while): "
        f"told after {statistics.median(waits):.2f} s, p99 {p99:.2f} s; answered after {statistics.median(answered):.3f} s"
    )
    assert rate > BATCHES_PER_S / 4, "the machine is too slow to show anything"
    assert p99 < 8.0  # promised: 2 s; measured: 0.8 s, and a loaded machine may take ten times as long
