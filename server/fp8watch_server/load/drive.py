"""Sends a synthetic fleet to a collector as its agents would: registered, paced, retried.

Shapes:     (plan, URL) -> LoadReport
Thread:     a few senders; each owns some ranks and one connection for each of them
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.session import Registration, Session
from fp8watch_agent.transport import ResponseMeaning, Transport
from fp8watch_agent.uploader import Uploader
from fp8watch_server.load.model import traits_of
from fp8watch_server.load.stream import Body, LoadPlan, RankStream

MAX_SENDERS = 32
REACH_S = 10.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0


@dataclass
class LoadReport:
    """Result of a load test. Latencies are of whole requests, in seconds."""

    num_bodies: int = 0
    num_records: int = 0
    num_bytes: int = 0
    num_refused: int = 0
    num_retries: int = 0
    num_late: int = 0  # bodies sent more than one step late
    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    problems: dict[str, int] = field(default_factory=dict)

    def quantile_s(self, share: float) -> float:
        """Latency that `share` of the bodies did not exceed; 0 without any."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def add(self, other: LoadReport) -> None:
        """Add another sender's report."""
        for name in ("num_bodies", "num_records", "num_bytes", "num_refused", "num_retries", "num_late"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latencies_s += other.latencies_s
        for text, n in other.problems.items():
            self.problems[text] = self.problems.get(text, 0) + n

    def lines(self) -> list[str]:
        """Text lines for people."""
        per_s = self.elapsed_s or 1.0
        size = self.num_bytes / self.num_records if self.num_records else 0.0
        p50, p99 = self.quantile_s(0.5), self.quantile_s(0.99)
        out = [
            f"acknowledged {self.num_bodies} bodies, {self.num_records} records, {self.num_bytes} bytes "
            f"({size:.1f} a record) in {self.elapsed_s:.1f} s",
            f"{self.num_bodies / per_s:.1f} bodies/s, {self.num_records / per_s:.0f} records/s; "
            f"answers: median {p50 * 1e3:.1f} ms, 99 % within {p99 * 1e3:.1f} ms",
        ]
        if self.num_retries or self.num_refused or self.num_late:
            out.append(f"tried again {self.num_retries}, refused {self.num_refused}, late {self.num_late}")
        return out + [f"{n} times: {text}" for text, n in sorted(self.problems.items())]


def session_of(plan: LoadPlan, rank: int, session: str) -> Session:
    """Session of a rank as its agent would report it."""
    return Session(
        run_id=plan.run,
        run_name=plan.run,
        session=session,
        rank=rank,
        world_size=plan.num_ranks,
        mesh={"dp": plan.num_ranks},
        host=f"load-{rank // 8}",
        pid=rank + 1,
        started_at=time.time(),
        versions={"load": "1"},
        recipe="blockwise",
        fingerprint=f"load-{plan.seed}",
        backend="load",
    )


class _Rank:
    """One rank: its bodies, its connection, and the due time of its next body."""

    def __init__(self, plan: LoadPlan, stream: RankStream, uploader: Uploader, bodies: Sequence[Body] | None) -> None:
        self.registration = Registration(session_of(plan, stream.rank, stream.session), plan.sites)
        self.uploader = uploader
        self.bodies = iter(bodies if bodies is not None else stream)
        self.interval_s = 0.0
        self.due_s = 0.0

    def deliver(self, body: Body, report: LoadReport, stop: threading.Event) -> None:
        """Send until it is acknowledged or refused, or `stop` is set."""
        parcel = Parcel(Kind.BATCH, body.seq, body.data, body.num_records)
        backoff_s = MIN_BACKOFF_S
        while not stop.is_set():
            began = time.perf_counter()
            receipt = self.uploader.send(parcel, self.registration)
            if receipt.verdict is ResponseMeaning.ACKNOWLEDGED:
                report.latencies_s.append(time.perf_counter() - began)
                report.num_bodies += 1
                report.num_records += receipt.acknowledged
                report.num_bytes += receipt.num_bytes
                report.num_refused += sum(receipt.refused.values())
                for _, reason in receipt.refused_bodies:
                    report.problems[reason] = report.problems.get(reason, 0) + 1
                return
            report.num_retries += 1
            text = str(receipt.answer)[:200]
            report.problems[text] = report.problems.get(text, 0) + 1
            if receipt.verdict is ResponseMeaning.HOLD:
                raise Refused(text)
            stop.wait(max(receipt.answer.retry_after_s or 0.0, random.uniform(0, backoff_s)))
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)


class Refused(Exception):
    """The collector accepts nothing until a person changes something: a token, a URL."""


def reach(url: str, token: str | None) -> None:
    """Ask for the collector, once: senders of a load would try again for ever where none is.

    Raises:
        Refused: nothing answers there, or something that is no collector.
    """
    transport = Transport(url, token, timeout_s=REACH_S)
    answer = transport.get("/readyz")
    transport.close()
    if answer.status not in (200, 503):  # 503: it is there, and waits for its database
        raise Refused(f"no collector answers at {url}: {str(answer)[:200]}")


def prepare(plan: LoadPlan, rank: int, *, like: RankStream | None = None) -> list[Body]:
    """Encode all bodies of a rank in advance, so that a measurement covers sending only."""
    return list(RankStream(plan, rank, traits=like.traits if like else None))


def run_load(
    plan: LoadPlan,
    url: str,
    *,
    token: str | None = None,
    rate: float = 0.0,
    num_senders: int | None = None,
    prepared: bool = False,
    stop: threading.Event | None = None,
    on_ack: Callable[[int, Body], None] = lambda rank, body: None,
    timeout_s: float = 30.0,
) -> LoadReport:
    """Send the whole plan.

    Args:
        rate: steps per second of every rank; 0: as fast as the collector answers.
        num_senders: threads; None: one a rank, at most MAX_SENDERS.
        prepared: make all bodies before the first is sent.
        stop: ends it early.
        on_ack: called by the senders after each acknowledgement.

    Raises:
        Refused: 401, 403 or an address that is no collector's.
    """
    stop = stop or threading.Event()
    traits = traits_of(plan.sites, plan.seed)
    count = min(plan.num_ranks, num_senders or MAX_SENDERS)
    shares: list[list[_Rank]] = [[] for _ in range(count)]
    numbers: list[list[int]] = [[] for _ in range(count)]
    for number in range(plan.num_ranks):
        stream = RankStream(plan, number, traits=traits)
        made = prepare(plan, number, like=stream) if prepared else None
        rank = _Rank(plan, stream, Uploader(Transport(url, token, timeout_s=timeout_s)), made)
        rank.interval_s = plan.steps_per_batch / rate if rate > 0 else 0.0
        rank.due_s = rank.interval_s * number / plan.num_ranks  # ranks are out of phase, as in real runs
        shares[number % count].append(rank)
        numbers[number % count].append(number)
    reports = [LoadReport() for _ in range(count)]
    failed: list[BaseException] = []
    began = time.perf_counter()

    def work(at: int) -> None:
        try:
            _send_share(shares[at], numbers[at], reports[at], began, stop, on_ack)
        except BaseException as e:  # noqa: BLE001  raised again by the caller of run_load
            failed.append(e)
            stop.set()

    threads = [threading.Thread(target=work, args=(i,), name=f"fp8watch-load-{i}", daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = replace(LoadReport(), elapsed_s=time.perf_counter() - began)
    for share in shares:
        for rank in share:
            rank.uploader.transport.close()
    if failed:
        raise failed[0]
    for report in reports:
        total.add(report)
    return total


def _send_share(
    ranks: list[_Rank],
    numbers: list[int],
    report: LoadReport,
    began: float,
    stop: threading.Event,
    on_ack: Callable[[int, Body], None],
) -> None:
    live = dict(enumerate(ranks))
    while live and not stop.is_set():
        for at, rank in list(live.items()):
            body = next(rank.bodies, None)
            if body is None or stop.is_set():
                live.pop(at, None)
                continue
            ahead_s = began + rank.due_s - time.perf_counter()
            if ahead_s > 0:
                stop.wait(ahead_s)
            elif rank.interval_s and -ahead_s > rank.interval_s:
                report.num_late += 1
            num_before = report.num_bodies
            rank.deliver(body, report, stop)
            rank.due_s += rank.interval_s
            if report.num_bodies > num_before:
                on_ack(numbers[at], body)
