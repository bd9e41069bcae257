"""Sends broken batches of a relay at once: past those that wait, each by itself, to whichever collector answers.

Upstream:   fp8watch_agent.relay_journals
Downstream: fp8watch_server.ingest.routes (HTTP)
Shapes:     entries of the journals -> requests, a batch each
Thread:     THREADS for each collector

The first collector is asked at once. Where it has not answered after a third of a second the next one is asked besides, so that one that
hangs costs a fraction of a second. A run that all of them refuse is tried again after a while; of each run a collector
is sent one batch at a time, so that a run whose database hangs leaves threads for the others.

A batch stays in its journal, and goes with the others once more: its key is known. So nothing depends on this way but the
time until an incident, and whatever is answered oddly is left to the other one.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from fp8watch_agent.relay_collectors import Collectors
from fp8watch_agent.relay_holds import MIN_BACKOFF_S
from fp8watch_agent.relay_journal import DamagedEntry, Entry
from fp8watch_agent.relay_journals import Journals
from fp8watch_agent.relay_sessions import Sessions
from fp8watch_agent.transport import Answer, ResponseMeaning, Transport, judge
from fp8watch_agent.uploader import Told, Uploader
from fp8watch_agent.wire import BATCH_CONTENT_TYPE

log = logging.getLogger("fp8watch.relay")

MAX_WAITING, MAX_OF_RUN = 256, 32
"""Of a storm of broken batches the first ones say enough."""
GIVE_UP_S = 120.0
YOUNG_S, YOUNG_BACKOFF_S, MAX_BACKOFF_S = 10.0, 0.3, 1.0
"""How long a run waits that all collectors refuse: at most so long while its batch is young, and after that."""
HEDGE_S, MAX_HEDGE_S = 0.3, 1.0
"""The next collector is asked after twice the time that answers took lately, within these bounds."""
THREADS = 4
LOOK_S = 0.05
"""How often threads look for what has become due, while anything waits."""


@dataclass(eq=False)
class _Job:
    """A broken batch, and which collectors have been asked since `ready_at`."""

    entry: Entry
    run: str
    since: float
    ready_at: float
    asked: dict[int, bool] = field(default_factory=dict)  # True: it has refused


@dataclass
class _OfRun:
    """What is known of a run that has broken batches."""

    ready_at: float = 0.0
    failures: int = 0
    busy: set[int] = field(default_factory=set)  # collectors that are being asked


class Express:
    """Tries each broken batch until a collector has answered for it.

    Args:
        journals: have its body, until it was delivered.
        sessions: what it needs to be registered.
        told: what other threads have registered.
    """

    def __init__(self, journals: Journals, sessions: Sessions, collectors: Collectors, told: Told) -> None:
        self._journals, self._sessions, self._collectors, self._told = journals, sessions, collectors, told
        self._jobs: list[_Job] = []  # the newest at the end, and taken first
        self._runs: dict[str, _OfRun] = {}
        self._more = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(at, way), name="fp8watch-relay-express", daemon=True)
            for _ in range(THREADS)
            for at, way in enumerate(collectors.transports())
        ]
        self.num_delivered = 0
        self._took_s = 0.0
        for entry in journals.urgent():  # what an earlier relay has left, the newest first
            self._add(entry)
        self._jobs.reverse()

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them; what waits goes with the others."""
        self._stopping.set()
        with self._more:
            self._more.notify_all()
        until = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def add(self, entry: Entry) -> None:
        """A broken batch that is on disk."""
        with self._more:
            self._add(entry)
            self._more.notify_all()

    def _add(self, entry: Entry) -> None:
        registration = self._sessions.of(entry.session)
        if registration is None or len(self._jobs) >= MAX_WAITING:
            return
        now, run = time.monotonic(), registration.session.run_id
        if sum(job.run == run for job in self._jobs) < MAX_OF_RUN:
            self._runs.setdefault(run, _OfRun())
            self._jobs.append(_Job(entry, run, now, now))

    def _run(self, at: int, way: Transport) -> None:
        uploader = Uploader(way, self._told)
        while True:
            with self._more:
                job = None
                while not self._stopping.is_set() and (job := self._take(at)) is None:
                    self._more.wait(LOOK_S if self._jobs else None)
                if job is None:
                    way.close()
                    return
            began = time.monotonic()
            try:
                answer = self._send(uploader, job)
                if answer is not None and (answer.status == 0 or answer.status >= 500):
                    if answer.status == 0:
                        self._collectors.unanswered(at, answer)
                    way.reload_token()
            except Exception as e:  # it goes with the others, who know what to do
                log.error("a broken batch goes with the others (%s: %s)", type(e).__name__, e, exc_info=e)
                answer = None
            with self._more:
                if answer is not None and answer.status == 200:
                    self._took_s += (time.monotonic() - began - self._took_s) / 4
                self._settle(at, job, answer)
                self._more.notify_all()

    def _take(self, at: int) -> _Job | None:
        """The newest batch that this collector is to be asked about now."""
        now, order = time.monotonic(), self._collectors.order()
        place = order.index(at)
        for job in reversed(self._jobs):
            of_run = self._runs[job.run]
            if at in job.asked or at in of_run.busy or now < max(job.ready_at, of_run.ready_at):
                continue
            if not all(job.asked.get(i) for i in order[:place]):
                begun = max(job.ready_at, of_run.ready_at)
                if now < begun + max(HEDGE_S, min(MAX_HEDGE_S, 2 * self._took_s)) * place:
                    continue
                self._collectors.suspect(order[0])
            job.asked[at] = False
            of_run.busy.add(at)
            return job
        return None

    def _settle(self, at: int, job: _Job, answer: Answer | None) -> None:
        """What became of a batch at one collector. `answer`: None where nothing was to be sent."""
        of_run = self._runs[job.run]
        of_run.busy.discard(at)
        verdict = ResponseMeaning.REFUSED if answer is None else judge(answer)
        if job not in self._jobs:  # another collector has answered for it
            self._forget(job.run)
            return
        now = time.monotonic()
        if verdict is ResponseMeaning.ACKNOWLEDGED:
            self.num_delivered += 1
            of_run.failures, of_run.ready_at = 0, 0.0
        elif now - job.since < GIVE_UP_S and verdict in (
            ResponseMeaning.RETRY,
            ResponseMeaning.REGISTER,
            ResponseMeaning.HOLD,
        ):
            job.asked[at] = True
            if sum(job.asked.values()) == len(self._collectors):
                most_s = YOUNG_BACKOFF_S if now - job.since < YOUNG_S else MAX_BACKOFF_S
                of_run.ready_at = now + min(most_s, MIN_BACKOFF_S * 2.0**of_run.failures)
                of_run.failures = min(of_run.failures + 1, 16)
                job.ready_at = of_run.ready_at
                job.asked.clear()
            return
        self._jobs.remove(job)
        self._forget(job.run)

    def _forget(self, run: str) -> None:
        if not self._runs[run].busy and all(job.run != run for job in self._jobs):
            del self._runs[run]

    def _send(self, uploader: Uploader, job: _Job) -> Answer | None:
        """Send it; None: it was delivered with the others, or cannot be sent like this."""
        registration = self._sessions.of(job.entry.session)
        if registration is None or not self._journals.waits(job.entry):
            return None
        try:
            body = self._journals.body(job.entry)
        except (DamagedEntry, OSError) as e:  # delivered meanwhile, perhaps
            log.debug("a broken batch goes with the others: %s", e)
            return None
        answer = Answer(0)
        for _ in range(2):
            answer = uploader.register(registration) or uploader.transport.post(
                "/v1/batches", body, BATCH_CONTENT_TYPE, registration.session.key
            )
            if judge(answer) is not ResponseMeaning.REGISTER:
                break
            uploader.forget(registration.session)
        return answer
