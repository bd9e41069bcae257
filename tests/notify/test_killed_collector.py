"""Whatever a collector that is killed had in hand, every failure that it acknowledged is told."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from collector.kit import Agent, Serving, make_site
from notify.receiver import Answer, Receiver
from support.counts import part_of

SITES = [make_site("up", order=0), make_site("down", order=1)]
INFINITE = [0] * 8 + [1, 0]
FLAPS: list[Answer] = [(500, {}, b""), (0, {}, b""), (408, {}, b"")]
RUNS_A_TURN = 3
TOLD_WITHIN_S = 30.0  # promised: 10 s after recovery


def break_runs(url: str, names: list[str]) -> None:
    """Each run sends one batch with an Inf, until it is acknowledged."""
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        for name in names:
            agent = Agent(client, run=name, session=f"{int(name.partition('-')[2]):032x}").register(SITES)
            agent.send(SITES, list(range(5)), fields={"num_inf": INFINITE, "num_sentinel_tiles": INFINITE})


@pytest.mark.parametrize("num_kills", [3, pytest.param(part_of(30), id="30", marks=pytest.mark.long)])
def test_what_was_acknowledged_is_told_whenever_the_collector_is_killed(
    tmp_path: Path, database_url: str, receiver_of: Callable[..., Receiver], num_kills: int
) -> None:
    chance = random.Random(num_kills)
    answers = [chance.choice(FLAPS) if chance.random() < 0.2 else (200, {}, b"") for _ in range(3 * num_kills)]
    receiver = receiver_of(*answers)
    receiver.delay_s = 0.05
    env = {"FP8WATCH_DATABASE_URL": database_url, "FP8WATCH_WEBHOOK_URL": receiver.url, "FP8WATCH_TEST_WHOLE": "1"}
    acked: list[str] = []
    num_bites = 0

    def told() -> Counter[tuple[str, str]]:
        """(run, idempotency key) of what was taken."""
        taken = [g for g in list(receiver.got) if g.status == 200]
        return Counter((g.body["alerts"][0]["labels"]["run"], g.headers["Idempotency-Key"]) for g in taken)

    for _ in range(num_kills):
        with Serving(tmp_path, "--port", "0", **env) as collector:
            names = [f"run-{len(acked) + i}" for i in range(RUNS_A_TURN)]
            break_runs(collector.url, names)
            acked += names
            time.sleep(chance.uniform(0.0, 0.5))  # before the detectors, before the incident, before the message, after
            collector.kill()
        num_bites += bool(set(acked) - {run for run, _ in told()})
    assert num_bites >= num_kills / 5, f"{num_bites} of {num_kills} kills left something untold"
    with Serving(tmp_path, "--port", "0", **env) as collector:
        began = time.monotonic()
        while missing := set(acked) - {run for run, _ in told()}:
            assert time.monotonic() - began < TOLD_WITHIN_S, missing
            time.sleep(0.05)
        took_s = time.monotonic() - began
        collector.kill()
    got = told()
    extra = sum(got.values()) - len(acked)
    print(f"{num_kills} kills, {num_bites} left something untold, {extra} told twice, the last after {took_s:.1f} s")
    assert len(got) == len(acked), "a failure has one key, however often it is told"
    assert extra <= num_kills
