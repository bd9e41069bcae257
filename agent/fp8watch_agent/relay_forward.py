"""Sends what a relay has taken: batches of many ranks in one request, in the order in which they came.

Upstream:   fp8watch_agent.relay_journal
Downstream: fp8watch_server.ingest.joined (HTTP)
Shapes:     entries of the journal -> joined requests; what is answered oddly goes alone, as an agent sends it
Thread:     its own

Nothing leaves the journal before the collector has answered for it: as committed, or as refused for good, which is counted
and kept under refused/.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from pathlib import Path

import msgspec

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.joined import JOINED_CONTENT_TYPE, MAX_JOINED, JoinedAnswer, JoinedAnswers, join_bodies
from fp8watch_agent.relay_journal import DamagedEntry, Entry, Journal
from fp8watch_agent.relay_sessions import Sessions
from fp8watch_agent.spool_segment import quarantine
from fp8watch_agent.transport import Answer, Capture, ResponseMeaning, judge
from fp8watch_agent.uploader import Uploader

log = logging.getLogger("fp8watch.relay")

REQUEST_BYTES = 4 << 20
MIN_BACKOFF_S, MAX_BACKOFF_S, HOLD_S = 0.1, 5.0, 30.0
"""A relay has one connection: a collector that is there again is to be noticed soon."""
OF_ONE_SESSION = (401, 403)
"""Statuses of a batch in a joined request that is otherwise accepted: its key, or the runs that the token names."""


class Forwarder:
    """Delivers the journal until it is stopped.

    Args:
        join_s: how long the first of a request waits for others.
    """

    def __init__(
        self, journal: Journal, sessions: Sessions, uploader: Uploader, directory: Path, join_s: float
    ) -> None:
        self._journal, self._sessions, self._uploader = journal, sessions, uploader
        self._directory, self._join_s = directory, join_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fp8watch-relay", daemon=True)
        self._until: float | None = None
        self._failures = 0
        self._together = True  # until a collector does not know joined requests
        self.num_delivered = self.num_refused = self.num_requests = 0
        self.problem = ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Deliver what can be delivered in this time, and end. The rest stays in the journal."""
        self._until = time.monotonic() + timeout_s
        self._stopping.set()
        self._thread.join(timeout_s + 1.0)

    def _run(self) -> None:
        while True:
            if self._stopping.is_set() and (not self._journal.num_waiting or self._late()):
                return
            if not self._journal.wait(0.2):
                continue
            self._stopping.wait(self._join_s)
            try:
                verdict, answer = self._some()
            except OSError as e:
                verdict, answer = ResponseMeaning.RETRY, Answer(0, error=str(e))
            if verdict is ResponseMeaning.ACKNOWLEDGED:
                self._failures, self.problem = 0, ""
                continue
            if str(answer) != self.problem:
                self.problem = str(answer)
                log.warning("the collector does not take it (%s); %d bodies wait", answer, self._journal.num_waiting)
            self._uploader.transport.reload_token()
            wait_s = random.uniform(0, min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(self._failures, 16)))
            self._failures += 1
            self._sleep(max(wait_s, answer.retry_after_s or 0.0, HOLD_S if verdict is ResponseMeaning.HOLD else 0.0))

    def _late(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def _sleep(self, wait_s: float) -> None:
        if self._stopping.is_set():
            time.sleep(min(wait_s, 0.2))
        else:
            self._stopping.wait(wait_s)

    def _some(self) -> tuple[ResponseMeaning, Answer]:
        """Send the oldest entries, and take from the journal those that are answered for."""
        entries = self._journal.first(MAX_JOINED, REQUEST_BYTES)
        bodies: list[bytes] = []
        try:
            for entry in entries:
                if bodies and entry.kind != Kind.BATCH:
                    break
                bodies.append(self._journal.body(entry))
                if entry.kind != Kind.BATCH:
                    break
        except DamagedEntry as e:
            if not bodies:
                self.num_refused += 1
                log.error("%s; session %s loses %d records", e, entries[0].session, entries[0].amount)
                self._journal.advance(1)
                return ResponseMeaning.ACKNOWLEDGED, Answer(0, error=str(e))
        batches = entries[: len(bodies)]
        if len(batches) < 2 or not self._together:
            return self._alone(entries[0])
        for session in dict.fromkeys(e.session for e in batches):
            registration = self._sessions.of(session)
            if registration is not None:
                failed = self._uploader.register(registration)
                if failed is not None and judge(failed) is not ResponseMeaning.REGISTER:
                    return judge(failed), failed
        keys = {e.session: self._key(e.session) for e in batches}
        body = join_bodies([(keys[e.session], body) for e, body in zip(batches, bodies, strict=True)])
        self.num_requests += 1
        answer = self._uploader.transport.post_joined(body, JOINED_CONTENT_TYPE)
        verdict = judge(answer)
        if answer.status in (404, 405, 413, 415):  # an older collector, or a proxy with a limit of its own
            self._together = answer.status == 413
            return self._alone(entries[0])
        if verdict is not ResponseMeaning.ACKNOWLEDGED:
            return verdict, answer
        try:
            answers = msgspec.json.decode(answer.body, type=JoinedAnswers).answers
        except msgspec.MsgspecError:
            answers = []
        if len(answers) != len(batches):
            return ResponseMeaning.RETRY, Answer(0, error=f"{len(answers)} answers to {len(batches)} batches: {answer}")
        num_done = 0
        for entry, one in zip(batches, answers, strict=True):
            if one.status == 200 and one.acked == entry.seq:
                self._sessions.wanted(entry.session, one.captures)
                num_done += 1
                continue
            self._done(num_done)
            num_done = 0
            verdict, answer = self._odd(entry, one)
            if verdict is not ResponseMeaning.ACKNOWLEDGED:
                return verdict, answer  # those behind it go once more: the collector knows them
        self._done(num_done)
        return ResponseMeaning.ACKNOWLEDGED, answer

    def _done(self, num_entries: int) -> None:
        if num_entries:
            self.num_delivered += num_entries
            self._journal.advance(num_entries)

    def _key(self, session: str) -> str:
        registration = self._sessions.of(session)
        return "" if registration is None else registration.session.key

    def _odd(self, entry: Entry, one: JoinedAnswer) -> tuple[ResponseMeaning, Answer]:
        answer = Answer(one.status, one.error.encode())
        if one.status in OF_ONE_SESSION:
            self._refuse(entry, self._parcel(entry), f"http_{one.status}")
            return ResponseMeaning.ACKNOWLEDGED, answer
        if judge(answer) is ResponseMeaning.RETRY:
            return ResponseMeaning.RETRY, answer
        return self._alone(entry)

    def _parcel(self, entry: Entry) -> Parcel:
        return Parcel(Kind(entry.kind), entry.seq, self._journal.body(entry), entry.amount)

    def _alone(self, entry: Entry) -> tuple[ResponseMeaning, Answer]:
        """Send one entry as its agent would: registering, splitting, or under another key."""
        parcel, registration = self._parcel(entry), self._sessions.of(entry.session)
        if registration is None:  # its file was deleted
            self._refuse(entry, parcel, "unregistered")
            return ResponseMeaning.ACKNOWLEDGED, Answer(0, error="unregistered")
        self.num_requests += 1
        receipt = self._uploader.send(parcel, registration)
        if receipt.verdict is ResponseMeaning.HOLD and b'"session-key"' in receipt.answer.body:
            self._refuse(entry, parcel, "http_403")
            return ResponseMeaning.ACKNOWLEDGED, receipt.answer
        if receipt.verdict is not ResponseMeaning.ACKNOWLEDGED:
            return receipt.verdict, receipt.answer
        if receipt.captures is not None:
            self._sessions.wanted(entry.session, [Capture(site, (0, last)) for site, last in receipt.captures.items()])
        for refused, reason in receipt.refused_bodies:
            self._keep(entry, refused, reason)
        self.num_delivered += not receipt.refused_bodies
        self._journal.advance(1)
        return ResponseMeaning.ACKNOWLEDGED, receipt.answer

    def _refuse(self, entry: Entry, parcel: Parcel, reason: str) -> None:
        self._keep(entry, parcel, reason)
        self._journal.advance(1)

    def _keep(self, entry: Entry, parcel: Parcel, reason: str) -> None:
        self.num_refused += 1
        log.warning("session %s, batch %d is refused (%s); it is kept under refused/", entry.session, entry.seq, reason)
        with contextlib.suppress(OSError):
            quarantine(self._directory, entry.session, parcel, reason)
