"""Runs of one rank that break, one after the other, while others are killed: when each was acknowledged, opened and paged."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import sqlalchemy as sa
from cluster.account import Key
from cluster.fleet import quantile
from cluster.whole import Kill, until_taken
from collector.kit import Agent, make_site

from fp8watch_server.db import schema as t

SITES = [make_site("up", order=0), make_site("down", order=1)]
BROKEN = {"num_inf": [1, 0], "num_sentinel_tiles": [1, 0]}
NEAR_S = 10.0
"""A kill so long before a failure may still delay it."""


class Failures:
    """Breaks a run every so often, in a thread. The run is registered, and has a healthy step, before.

    Args:
        urls: of collectors and a relay, the last one, which take turns.
        every_s: between two failures.
    """

    def __init__(self, urls: Sequence[str], every_s: float) -> None:
        self._urls, self._every_s = list(urls), every_s
        self.at: dict[str, float] = {}  # run -> when its broken batch was acknowledged
        self.acked: dict[Key, bytes] = {}
        self.relayed: set[str] = set()
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Failures:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(240)
        if self._failed and exc[0] is None:
            raise self._failed[0]

    def _run(self) -> None:
        try:
            agent = self._prepared(0)
            number = 1
            while not self._stop.wait(self._every_s):
                self._send(agent, 2, BROKEN)
                if str(agent.client.base_url).rstrip("/") == self._urls[-1]:
                    self.relayed.add(agent.run)
                self.at[agent.run] = time.time()
                agent.client.close()
                agent = self._prepared(number)
                number += 1
        except BaseException as e:
            self._failed.append(e)

    def _prepared(self, number: int) -> Agent:
        client = httpx.Client(base_url=self._urls[number % len(self._urls)], timeout=10, trust_env=False)
        agent = Agent(client, run=f"broken-{number}", session=f"{number:032x}")
        agent.patient = False
        for register in (
            lambda: agent.register_run(agent.run),
            agent.register_session,
            lambda: agent.register_sites(SITES),
        ):
            until_taken(register)
        self._send(agent, 1, {})
        return agent

    def _send(self, agent: Agent, step: int, fields: dict[str, list[int]]) -> None:
        body = agent.body(SITES, [step], fields=fields)
        until_taken(lambda: agent.post(body))
        self.acked[agent.run, agent.session, 0, agent.seq] = hashlib.sha256(body).digest()[:16]


def opened_at(engines: Sequence[sa.Engine]) -> dict[str, float]:
    """Run -> when its first incident was written."""
    i, out = t.incident.c, dict[str, float]()
    for engine in engines:
        with engine.connect() as conn:
            for run, at in conn.execute(sa.select(i.run_id, sa.func.min(i.opened_at)).group_by(i.run_id)):
                out[run] = min(at, out.get(run, at))
    return out


@dataclass(frozen=True)
class Late:
    """One failure."""

    run: str
    at: float
    opened: float
    relayed: bool
    near: frozenset[str]  # kinds of kills within NEAR_S before it, or until its incident
    back: float  # when the shard of its run, or the relay that had taken it, was there again; 0: they were not away

    @property
    def wait_s(self) -> float:
        """From acknowledgement to incident."""
        return self.opened - self.at

    @property
    def there_s(self) -> float:
        """The same from when its database, and the relay that had taken it, were there."""
        return self.opened - max(self.at, min(self.back, self.opened))


def lates(failures: Failures, opened: dict[str, float], kills: Sequence[Kill], shard_of: dict[str, str]) -> list[Late]:
    """Each failure, with the kills near it."""
    out = []
    for run, acked in failures.at.items():
        near = frozenset(k.kind for k in kills if acked - NEAR_S < k.up and k.down < opened[run])
        needed = {("shard", shard_of[run]), *([("relay", "0")] if run in failures.relayed else [])}
        backs = [k.up for k in kills if (k.kind, k.what) in needed and k.down < opened[run] and k.up > acked]
        out.append(Late(run, acked, opened[run], run in failures.relayed, near, max(backs, default=0.0)))
    return out


def table(found: Sequence[Late]) -> dict[str, dict[str, float]]:
    """Per way and kind of kill: how many failures, median, 90 and 99 %, worst, and how many beyond 2 s."""
    out = {"both ways, all": _row([late.wait_s for late in found])} if found else {}
    for way, relayed in (("to a collector", False), ("through the relay", True)):
        of_way = [late for late in found if late.relayed is relayed]
        kinds = sorted({kind for late in of_way for kind in late.near})
        groups = {"all": of_way, "no kill near": [late for late in of_way if not late.near]}
        groups |= {f"near a kill of: {kind}": [late for late in of_way if kind in late.near] for kind in kinds}
        for name, group in groups.items():
            if group:
                out[f"{way}, {name}"] = _row([late.wait_s for late in group])
        if of_way:
            out[f"{way}, all, from the return of what had it on"] = _row([late.there_s for late in of_way])
    return out


def _row(waits: Sequence[float]) -> dict[str, float]:
    named = {
        "p50": quantile(waits, 0.5),
        "p90": quantile(waits, 0.9),
        "p99": quantile(waits, 0.99),
        "worst": max(waits),
    }
    return {"num": len(waits), **{k: round(v, 2) for k, v in named.items()}, "over_2_s": sum(w > 2 for w in waits)}
