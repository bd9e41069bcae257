"""Sends what a relay has taken: batches of many ranks in one request, those of each rank in order.

Upstream:   fp8watch_agent.relay_journals
Downstream: fp8watch_server.ingest.joined (HTTP)
Shapes:     entries of the journals -> joined requests; what is answered oddly goes alone, as an agent sends it
Thread:     two: one for those that are being refused, one for all others

Nothing leaves a journal before a collector has answered for it: as committed, or as refused for good, which is counted, and
kept under refused/ while there is room. A collector that does not answer is left for the next one. A session whose batch is refused for now is
held: its oldest batch is tried again by the second thread, at each collector in turn, and the others go on without it. So is one
whose batch ends in an error that nobody foresaw: a thread ends when the relay does.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.joined import JOINED_CONTENT_TYPE, MAX_JOINED, JoinedAnswer, JoinedAnswers, join_bodies
from fp8watch_agent.relay_collectors import Collectors
from fp8watch_agent.relay_holds import MAX_BACKOFF_S, MIN_BACKOFF_S, Holds
from fp8watch_agent.relay_journal import DamagedEntry, Entry
from fp8watch_agent.relay_journals import Journals
from fp8watch_agent.relay_refused import Refused
from fp8watch_agent.relay_sessions import Sessions
from fp8watch_agent.transport import Answer, Capture, ResponseMeaning, Transport, judge
from fp8watch_agent.uploader import Told, Uploader

log = logging.getLogger("fp8watch.relay")

REQUEST_BYTES = 4 << 20
HOLD_S, SAY_EVERY_S = 30.0, 10.0
MIN_JOINED = 8
OF_ONE_SESSION = (401, 403)
"""Statuses of a batch in a joined request that is otherwise accepted: its key, or the runs that the token names."""


@dataclass
class _Lane:
    """A thread with connections of its own."""

    held: bool  # whether it tries sessions that are being refused, or sends those of all others
    uploader: Uploader
    transports: list[Transport]
    most: int = MAX_JOINED  # batches in a request; fewer while it is not answered in time
    failures: int = 0
    rounds: int = 0
    tried: list[Entry] = field(default_factory=list)  # what the round is about


class Forwarder:
    """Delivers the journals until it is stopped.

    Args:
        told: what other threads have registered.
        join_s: how long the first of a request waits for others.
    """

    def __init__(
        self,
        journals: Journals,
        sessions: Sessions,
        collectors: Collectors,
        told: Told,
        directory: Path,
        join_s: float,
    ) -> None:
        self._journals, self._sessions, self._collectors = journals, sessions, collectors
        self._refused, self._join_s = Refused(directory), join_s
        self.holds = Holds()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        for held in (False, True):
            ways = collectors.transports()
            lane = _Lane(held, Uploader(ways[0], told), ways)
            name = "fp8watch-relay-held" if held else "fp8watch-relay"
            self._threads.append(threading.Thread(target=self._run, args=(lane,), name=name, daemon=True))
        self._until: float | None = None
        self._together = True  # until a collector does not know joined requests
        self._counting = threading.Lock()
        self.num_delivered = self.num_refused = self.num_requests = 0
        self._problem = ""
        self._said_at = -SAY_EVERY_S

    @property
    def problem(self) -> str:
        """What the last request was refused with, or what somebody waits for; "": nothing."""
        return self._problem or self.holds.why()

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """Deliver what can be delivered in this time, and end. The rest stays in the journals."""
        self._until = time.monotonic() + timeout_s
        self._stopping.set()
        self._journals.wake()
        for thread in self._threads:
            thread.join(max(0.0, self._until - time.monotonic()) + 1.0)

    def _run(self, lane: _Lane) -> None:
        try:
            self._deliver(lane)
        finally:
            for transport in lane.transports:
                transport.close()

    def _deliver(self, lane: _Lane) -> None:
        while True:
            if self._stopping.is_set() and (not self._journals.num_waiting or self._late()):
                return
            lane.tried = []
            try:
                if not self._journals.wait(0.2, lambda: self._has_work(lane)):
                    if not lane.held:
                        self._problem = ""
                        self._journals.tidy()
                    continue
                if not lane.held:
                    self._stopping.wait(self._join_s)
                verdict, answer = self._round(lane)
                if verdict is not ResponseMeaning.ACKNOWLEDGED:
                    for transport in lane.transports:
                        transport.reload_token()
            except OSError as e:
                verdict, answer = ResponseMeaning.RETRY, Answer(0, error=str(e))
            except Exception as e:  # noqa: BLE001 - said in _broke
                verdict, answer = self._broke(lane, e)
            if verdict is ResponseMeaning.ACKNOWLEDGED:
                lane.failures, self._problem = 0, "" if not lane.held else self._problem
                continue
            if not lane.held and str(answer) != self._problem:
                self._problem = str(answer)
                log.warning("no collector takes it (%s); %d bodies wait", answer, self._journals.num_waiting)
            wait_s = random.uniform(0, min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(lane.failures, 16)))
            lane.failures += 1
            self._sleep(max(wait_s, answer.retry_after_s or 0.0, HOLD_S if verdict is ResponseMeaning.HOLD else 0.0))

    def _broke(self, lane: _Lane, error: Exception) -> tuple[ResponseMeaning, Answer]:
        """A round ended in an error that nobody foresaw: of several batches one goes next, and one alone is held: who comes then
        does not wait for it."""
        why = f"{type(error).__name__}: {error}"
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            log.error("batches wait behind an error of this relay (%s)", why, exc_info=error)
        lane.most = 1
        if len(lane.tried) == 1:
            self.holds.hold(lane.tried[0].session, None, why)
            return ResponseMeaning.ACKNOWLEDGED, Answer(0, error=why)
        return ResponseMeaning.RETRY, Answer(0, error=why)

    def _has_work(self, lane: _Lane) -> bool:
        if lane.held:
            return bool(self.holds.due())
        return self._stopping.is_set() or any(session not in self.holds for session in self._journals.sessions)

    def _late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def _sleep(self, wait_s: float) -> None:
        if self._stopping.is_set():
            time.sleep(min(wait_s, 0.2))
        else:
            self._stopping.wait(wait_s)

    def _round(self, lane: _Lane) -> tuple[ResponseMeaning, Answer]:
        """Send something to one collector after the other until one of them answers."""
        lane.tried = entries = self._entries(lane)
        if not entries:
            if self._stopping.is_set():
                time.sleep(0.05)  # what is left is held
            return ResponseMeaning.ACKNOWLEDGED, Answer(0)
        order = self._collectors.order()
        if lane.held:  # a collector may be refused by a database that another one reaches
            order = order[lane.rounds % len(order) :] + order[: lane.rounds % len(order)]
            lane.rounds += 1
        verdict, answer = ResponseMeaning.RETRY, Answer(0)
        for at in order:
            lane.uploader.transport = lane.transports[at]
            began = time.monotonic()
            verdict, answer = self._some(lane, at, entries)
            if answer.status and answer.status < 500:
                self._collectors.answered(at)
                if time.monotonic() - began < self._collectors.timeout_s / 4:
                    lane.most = min(MAX_JOINED, 2 * lane.most)
                break
            if verdict is ResponseMeaning.ACKNOWLEDGED:
                break
            lane.most = max(MIN_JOINED, min(lane.most, len(entries)) // 2)
            if not self._collectors.unanswered(at, answer):
                break
        return verdict, answer

    def _entries(self, lane: _Lane) -> list[Entry]:
        """What goes in a request: the oldest batches, or tile maps by themselves."""
        if lane.held:
            due = [self._journals.first_of(session) or session for session in self.holds.due()[: lane.most]]
            for session in due:
                if isinstance(session, str):  # nothing of it waits any more
                    self.holds.release(session)
            entries = [entry for entry in due if isinstance(entry, Entry)]
        else:
            entries = self._journals.first(lane.most, REQUEST_BYTES, but=self.holds)
        size, num = 0, 0
        for entry in entries:
            size += entry.num_bytes
            if num and (entry.kind != Kind.BATCH or entries[0].kind != Kind.BATCH or size > REQUEST_BYTES):
                break
            num += 1
        return entries[:num]

    def _some(self, lane: _Lane, at: int, entries: list[Entry]) -> tuple[ResponseMeaning, Answer]:
        """Send entries, and take from the journals those that are answered for.

        Returns RETRY or HOLD only where the collector answered for none: of a session that it does not take now, `holds` knows.
        """
        sent: list[tuple[Entry, bytes]] = []
        stuck: set[str] = set()  # sessions of which nothing more is sent in this round
        for entry in entries:
            try:
                if entry.session not in stuck:
                    sent.append((entry, self._journals.body(entry)))
            except DamagedEntry as e:
                if not any(other.session == entry.session for other, _ in sent):
                    self._give_up(entry, e)
                stuck.add(entry.session)
        if not sent:
            return ResponseMeaning.ACKNOWLEDGED, Answer(0)
        if len(sent) < 2 or not self._together:
            return self._each(lane, at, sent)
        failed = self._register(lane, at, [entry.session for entry, _ in sent], stuck)
        if failed is not None:
            return judge(failed), failed
        sent = [(entry, body) for entry, body in sent if entry.session not in stuck]
        if not sent:
            return ResponseMeaning.ACKNOWLEDGED, Answer(0)
        body = join_bodies([(self._key(entry.session), raw) for entry, raw in sent])
        self._count(requests=1)
        answer = lane.uploader.transport.post_joined(body, JOINED_CONTENT_TYPE)
        verdict = judge(answer)
        if answer.status in (404, 405, 413, 415):  # an older collector, or a proxy with a limit of its own
            self._together = answer.status == 413
            return self._each(lane, at, sent[:1] if self._together else sent)
        if verdict is not ResponseMeaning.ACKNOWLEDGED:
            return verdict, answer
        try:
            answers = msgspec.json.decode(answer.body, type=JoinedAnswers).answers
        except msgspec.MsgspecError:
            answers = []
        if len(answers) != len(sent):
            return ResponseMeaning.RETRY, Answer(0, error=f"{len(answers)} answers to {len(sent)} batches: {answer}")
        for (entry, raw), one in zip(sent, answers, strict=True):
            if entry.session in stuck:
                continue  # it goes once more: the collector knows it
            if one.status == 200 and one.acked == entry.seq:
                self._sessions.wanted(entry.session, one.captures)
                self._done(lane, entry)
            elif not self._odd(lane, at, entry, raw, one):
                stuck.add(entry.session)
        return ResponseMeaning.ACKNOWLEDGED, answer

    def _register(self, lane: _Lane, at: int, names: list[str], stuck: set[str]) -> Answer | None:
        """Register sessions. Those whose run is refused are held; returns an answer where the collector is away."""
        refused: dict[str, tuple[ResponseMeaning, Answer]] = {}  # by run: its other ranks would be told the same
        for session in dict.fromkeys(names):
            registration = self._sessions.of(session)
            if registration is None:
                continue
            run = registration.session.run_id
            if run not in refused:
                failed = lane.uploader.register(registration)
                if failed is None or judge(failed) is ResponseMeaning.REGISTER:
                    continue
                if failed.status == 0:
                    return failed
                refused[run] = judge(failed), failed
            self._hold(at, session, *refused[run])
            stuck.add(session)
        return None

    def _each(self, lane: _Lane, at: int, sent: list[tuple[Entry, bytes]]) -> tuple[ResponseMeaning, Answer]:
        """Send entries one by one."""
        stuck: set[str] = set()
        answer = Answer(0)
        for entry, body in sent:
            if entry.session in stuck:
                continue
            verdict, answer = self._alone(lane, entry, body)
            if verdict is ResponseMeaning.ACKNOWLEDGED:
                continue
            if answer.status == 0:
                return verdict, answer
            self._hold(at, entry.session, verdict, answer)
            stuck.add(entry.session)
        return ResponseMeaning.ACKNOWLEDGED, answer

    def _hold(self, at: int, session: str, verdict: ResponseMeaning, answer: Answer) -> None:
        least_s = max(answer.retry_after_s or 0.0, HOLD_S if verdict is ResponseMeaning.HOLD else 0.0)
        fresh = self.holds.hold(session, at, str(answer), least_s, after=len(self._collectors) - 1)
        if fresh and time.monotonic() - self._said_at > SAY_EVERY_S:  # a run may have hundreds of sessions
            self._said_at = time.monotonic()
            log.warning("batches of %d sessions wait, %s among them (%s)", len(self.holds), session, answer)

    def _done(self, lane: _Lane, entry: Entry) -> None:
        """A batch is delivered: who was held goes on with the others."""
        self._count(delivered=1)
        self._journals.advance(entry)
        self._release(lane, entry)

    def _release(self, lane: _Lane, entry: Entry) -> None:
        was_held, refused_by = self.holds.release(entry.session)
        at = lane.transports.index(lane.uploader.transport)
        if refused_by is not None and refused_by != at:
            self._collectors.failed(refused_by, "it refuses what another one takes")
        if was_held:
            self._journals.wake()

    def _count(self, *, delivered: int = 0, refused: int = 0, requests: int = 0) -> None:
        with self._counting:
            self.num_delivered += delivered
            self.num_refused += refused
            self.num_requests += requests

    def _give_up(self, entry: Entry, why: DamagedEntry) -> None:
        self._count(refused=1)
        log.error("%s; session %s loses %d records", why, entry.session, entry.amount)
        self._journals.advance(entry)

    def _key(self, session: str) -> str:
        registration = self._sessions.of(session)
        return "" if registration is None else registration.session.key

    def _odd(self, lane: _Lane, at: int, entry: Entry, body: bytes, one: JoinedAnswer) -> bool:
        """A batch of a joined request that was not taken. False: what follows it in its session waits."""
        answer = Answer(one.status, one.error.encode())
        if one.status in OF_ONE_SESSION:
            self._refuse(lane, entry, body, f"http_{one.status}")
            return True
        verdict = judge(answer)
        if verdict is not ResponseMeaning.RETRY:
            verdict, answer = self._alone(lane, entry, body)
        if verdict is not ResponseMeaning.ACKNOWLEDGED:
            self._hold(at, entry.session, verdict, answer)
        return verdict is ResponseMeaning.ACKNOWLEDGED

    def _alone(self, lane: _Lane, entry: Entry, body: bytes) -> tuple[ResponseMeaning, Answer]:
        """Send one entry as its agent would: registering, splitting, or under another key."""
        parcel, registration = _parcel(entry, body), self._sessions.of(entry.session)
        if registration is None:  # its file was deleted
            self._refuse(lane, entry, body, "unregistered")
            return ResponseMeaning.ACKNOWLEDGED, Answer(0, error="unregistered")
        self._count(requests=1)
        receipt = lane.uploader.send(parcel, registration)
        if receipt.verdict is ResponseMeaning.HOLD and b'"session-key"' in receipt.answer.body:
            self._refuse(lane, entry, body, "http_403")
            return ResponseMeaning.ACKNOWLEDGED, receipt.answer
        if receipt.verdict is not ResponseMeaning.ACKNOWLEDGED:
            return receipt.verdict, receipt.answer
        if receipt.captures is not None:
            self._sessions.wanted(entry.session, [Capture(site, steps) for site, steps in receipt.captures.items()])
        for refused, reason in receipt.refused_bodies:
            self._keep(entry, refused, reason)
        self._count(delivered=not receipt.refused_bodies)
        self._journals.advance(entry)
        self._release(lane, entry)
        return ResponseMeaning.ACKNOWLEDGED, receipt.answer

    def _refuse(self, lane: _Lane, entry: Entry, body: bytes, reason: str) -> None:
        self._keep(entry, _parcel(entry, body), reason)
        self._journals.advance(entry)
        self._release(lane, entry)

    def _keep(self, entry: Entry, parcel: Parcel, reason: str) -> None:
        self._count(refused=1)
        self._refused.keep(entry.session, parcel, reason)


def _parcel(entry: Entry, body: bytes) -> Parcel:
    return Parcel(Kind(entry.kind), entry.seq, body, entry.amount)
