"""Very many ranks in one process: the bodies of a few are recorded, and each rank sends them under a header of its own.

Shapes:     (plan, URL) -> FleetReport
Thread:     a few senders; each stands for some hosts and has one connection

A recorded body is kept as it lies behind its header. A rank's body is its own header, these bytes, and zstd over both:
about a tenth of a millisecond, and no memory for each rank. The ranks of a host share requests, as behind a relay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zstandard

from fp8watch_agent.joined import JOINED_CONTENT_TYPE, MAX_JOINED, JoinedAnswers, join_bodies
from fp8watch_agent.session import Registration
from fp8watch_agent.transport import Answer, ResponseMeaning, Transport, judge, meaning_of
from fp8watch_agent.uploader import Uploader
from fp8watch_agent.wire import Header, decompress
from fp8watch_server.load.drive import LoadReport, Refused, session_of
from fp8watch_server.load.model import traits_of
from fp8watch_server.load.stream import Array, Change, LoadPlan, RankStream

RECORDED_RANKS = 16
"""As many as there are places of a rank in a window of 16 merged steps."""
RANKS_PER_HOST = 8
BACKOFF_S = 1.0


class _Parts(msgspec.Struct):
    header: msgspec.Raw
    steps: msgspec.Raw
    columns: msgspec.Raw
    constants: msgspec.Raw
    experts: msgspec.Raw = msgspec.Raw(b"\x80")


@dataclass(frozen=True)
class Recorded:
    """A body without its rank: what stands in its header, and everything behind it."""

    header: Header
    parts: _Parts

    @classmethod
    def of(cls, body: bytes) -> Recorded:
        """Take a wire body apart."""
        parts = msgspec.msgpack.decode(decompress(body), type=_Parts)
        return cls(msgspec.msgpack.decode(parts.header, type=Header), parts)

    def sent_by(self, session: str, rank: int, seq: int, clock: float, run: str) -> bytes:
        """The wire body of another rank."""
        header = msgspec.structs.replace(self.header, run=run, session=session, rank=rank, seq=seq, clock=clock)
        parts = msgspec.structs.replace(self.parts, header=msgspec.Raw(msgspec.msgpack.encode(header)))
        return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(parts))


@dataclass
class FleetReport(LoadReport):
    """Result of a fleet. `num_requests` are those with batches; times are seconds."""

    num_requests: int = 0
    registered_s: float = 0.0  # until the last rank was registered
    broken_at: float | None = None  # when the broken body was acknowledged, seconds since 1970

    def add(self, other: LoadReport) -> None:
        """Add another sender's report."""
        super().add(other)
        if isinstance(other, FleetReport):
            self.num_requests += other.num_requests
            self.broken_at = self.broken_at or other.broken_at

    def lines(self) -> list[str]:
        """Text lines for people."""
        said = [f"all ranks registered after {self.registered_s:.1f} s; {self.num_requests} requests with batches"]
        if self.broken_at is not None:
            said.append(f"the broken batch was acknowledged at {self.broken_at:.3f}")
        return said + super().lines()


@dataclass(frozen=True)
class FleetPlan:
    """Many ranks of one run.

    Args:
        load: the run; its `num_ranks` are simulated, RECORDED_RANKS of them at most recorded.
        interval_s: seconds between two batches of a rank; 0: no pause.
        ranks_per_host: that share requests.
        broken: rank, and number of its batch from 0, in whose first record an Inf stands; None: none.
    """

    load: LoadPlan
    interval_s: float = 0.0
    ranks_per_host: int = RANKS_PER_HOST
    broken: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_per_host <= MAX_JOINED:
            raise ValueError(f"ranks_per_host={self.ranks_per_host}: must be 1 to {MAX_JOINED}")

    @property
    def num_hosts(self) -> int:
        """Hosts of `ranks_per_host`, the last one perhaps smaller."""
        return -(-self.load.num_ranks // self.ranks_per_host)

    def ranks(self, host: int) -> range:
        """Ranks of a host."""
        first = host * self.ranks_per_host
        return range(first, min(first + self.ranks_per_host, self.load.num_ranks))


def record(plan: LoadPlan, *, change: Change | None = None, ranks: Sequence[int] | None = None) -> list[list[Recorded]]:
    """The bodies of a few ranks, [rank][batch]."""
    traits = traits_of(plan.sites, plan.seed)
    chosen = range(min(RECORDED_RANKS, plan.num_ranks)) if ranks is None else ranks
    return [[Recorded.of(b.data) for b in RankStream(plan, r, traits=traits, change=change)] for r in chosen]


class Fleet:
    """All ranks of a plan, and the connection settings of its senders.

    Args:
        on_ack: called with (rank, number of the batch) after each acknowledgement, by the senders.
    """

    def __init__(
        self,
        plan: FleetPlan,
        url: str,
        *,
        token: str | None = None,
        num_senders: int = 8,
        stop: threading.Event | None = None,
        on_ack: Callable[[int, int], None] = lambda rank, number: None,
        timeout_s: float = 60.0,
    ) -> None:
        self._plan, self._on_ack = plan, on_ack
        self._stop = stop or threading.Event()
        self._streams = record(plan.load)
        self._broken: list[Recorded] = []
        if plan.broken is not None:
            like = plan.broken[0] % len(self._streams)
            (self._broken,) = record(plan.load, change=_put_inf, ranks=[like])
        count = min(num_senders, plan.num_hosts)
        self._transports = [Transport(url, token, timeout_s=timeout_s) for _ in range(count)]
        self._sites = plan.load.sites

    def run(self) -> FleetReport:
        """Register all ranks, then send all batches of each.

        Raises:
            Refused: 401, 403 or an address that is no collector's.
        """
        began = time.perf_counter()
        total = FleetReport()
        self._in_turns(self._register)
        total.registered_s = time.perf_counter() - began
        began = time.perf_counter()
        for report in self._in_turns(lambda at: self._send(at, began)):
            total.add(report)
        total.elapsed_s = time.perf_counter() - began
        for transport in self._transports:
            transport.close()
        return total

    def _in_turns(self, work: Callable[[int], FleetReport]) -> list[FleetReport]:
        """Run one piece of work for each sender, in threads."""
        done: list[FleetReport] = []
        failed: list[BaseException] = []

        def guarded(at: int) -> None:
            try:
                done.append(work(at))
            except BaseException as e:  # noqa: BLE001  raised again below
                failed.append(e)
                self._stop.set()

        threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(len(self._transports))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return done

    def _hosts(self, at: int) -> range:
        return range(at, self._plan.num_hosts, len(self._transports))

    def _session(self, rank: int) -> str:
        return f"{self._plan.load.seed & 0xFFFFFFFF:08x}{rank:024x}"

    def _register(self, at: int) -> FleetReport:
        report = FleetReport()
        for host in self._hosts(at):
            uploader = Uploader(self._transports[at])  # a relay each, which says of the run and its sites once
            for rank in self._plan.ranks(host):
                if self._stop.is_set():
                    return report
                registration = Registration(session_of(self._plan.load, rank, self._session(rank)), self._sites)
                while (failed := uploader.register(registration)) is not None and not self._stop.is_set():
                    self._wait(failed)
        return report

    def _wait(self, answer: Answer) -> None:
        if judge(answer) is ResponseMeaning.HOLD:
            raise Refused(str(answer)[:200])
        self._stop.wait(answer.retry_after_s or BACKOFF_S)

    def _send(self, at: int, began: float) -> FleetReport:
        report, plan = FleetReport(), self._plan
        for number in range(len(self._streams[0])):
            for host in self._hosts(at):
                due = began + plan.interval_s * (number + host / plan.num_hosts)  # hosts are out of phase
                while (ahead := due - time.perf_counter()) > 0 and not self._stop.is_set():
                    self._stop.wait(ahead)
                if plan.interval_s and -ahead > plan.interval_s:
                    report.num_late += 1
                self._deliver(at, host, number, report)
                if self._stop.is_set():
                    return report
        return report

    def _recorded(self, rank: int, number: int) -> Recorded:
        if self._plan.broken == (rank, number):
            return self._broken[number]
        return self._streams[rank % len(self._streams)][number]

    def _deliver(self, at: int, host: int, number: int, report: FleetReport) -> None:
        """Send a host's bodies in one request, until each is acknowledged or refused."""
        now, run = time.time(), self._plan.load.run
        waiting: dict[int, tuple[bytes, int]] = {}
        for rank in self._plan.ranks(host):
            recorded = self._recorded(rank, number)
            body = recorded.sent_by(self._session(rank), rank, number + 1, now, run)
            waiting[rank] = body, recorded.header.num_records
        while waiting and not self._stop.is_set():
            began = time.perf_counter()
            joined = join_bodies([("", body) for body, _ in waiting.values()])
            answer = self._transports[at].post_joined(joined, JOINED_CONTENT_TYPE)
            report.num_requests += 1
            if judge(answer) is not ResponseMeaning.ACKNOWLEDGED:
                report.num_retries += 1
                _count(report, str(answer)[:200])
                self._wait(answer)
                continue
            took_s = time.perf_counter() - began
            answers = msgspec.json.decode(answer.body, type=JoinedAnswers).answers
            for rank, one in zip(list(waiting), answers, strict=True):
                meaning = meaning_of(one.status)
                if meaning is ResponseMeaning.ACKNOWLEDGED:
                    body, num_records = waiting.pop(rank)
                    report.latencies_s.append(took_s)
                    report.num_bodies += 1
                    report.num_records += num_records
                    report.num_bytes += len(body)
                    if self._plan.broken == (rank, number):
                        report.broken_at = time.time()
                    self._on_ack(rank, number)
                    continue
                _count(report, f"{one.status} {one.error}")
                if meaning is ResponseMeaning.REFUSED:
                    report.num_refused += waiting.pop(rank)[1]
            if waiting:
                report.num_retries += 1
                self._stop.wait(BACKOFF_S)


def _put_inf(rows: Array, step_row: Array, rank: int, step: int) -> None:
    """One Inf that the quantiser laundered, in one tile."""
    rows["num_inf"][0] = rows["num_sentinel_tiles"][0] = 1


def _count(report: LoadReport, text: str) -> None:
    report.problems[text] = report.problems.get(text, 0) + 1
