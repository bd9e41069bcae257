"""Sends broken batches of a relay at once: past those that wait, each by itself.

Upstream:   fp8watch_agent.relay_journal
Downstream: fp8watch_server.ingest.routes (HTTP)
Shapes:     entries of the journal -> requests, a batch each
Thread:     its own

A batch stays in the journal, and goes with the others once more: the collector knows its key. So nothing depends on this
way but the time until an incident, and whatever is answered oddly is left to the other one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fp8watch_agent.relay_journal import DamagedEntry, Entry, Journal
from fp8watch_agent.relay_sessions import Sessions
from fp8watch_agent.transport import ResponseMeaning, judge
from fp8watch_agent.uploader import Uploader
from fp8watch_agent.urgency import is_urgent
from fp8watch_agent.wire import BATCH_CONTENT_TYPE, decode_batch

log = logging.getLogger("fp8watch.relay")

MAX_WAITING = 256
"""Of a storm of broken batches the first ones say enough."""
MAX_LOOKED_AT = 4096
"""Of what a relay finds in its journal when it starts."""
GIVE_UP_S = 120.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0


@dataclass(frozen=True)
class _Waiting:
    entry: Entry
    since: float


class Express:
    """Tries each broken batch until the collector has answered for it.

    Args:
        journal: has its body, until it was delivered.
        sessions: what it needs to be registered.
        uploader: a connection of its own.
    """

    def __init__(self, journal: Journal, sessions: Sessions, uploader: Uploader) -> None:
        self._journal, self._sessions, self._uploader = journal, sessions, uploader
        self._waiting: deque[_Waiting] = deque()
        self._more = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fp8watch-relay-express", daemon=True)
        self.num_delivered = 0

    def start(self) -> None:
        """Start the thread; what an earlier relay has left in the journal is looked through as well."""
        self._thread.start()

    def stop(self) -> None:
        """End it; what waits goes with the others."""
        self._stopping.set()
        with self._more:
            self._more.notify_all()
        self._thread.join(1.0)

    def add(self, entry: Entry) -> None:
        """A broken batch that is on disk."""
        with self._more:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(_Waiting(entry, time.monotonic()))
                self._more.notify_all()

    def _run(self) -> None:
        unlooked = self._journal.first(1 << 30, 1 << 62)[-MAX_LOOKED_AT:]
        again: deque[_Waiting] = deque()
        backoff_s = MIN_BACKOFF_S
        while True:
            with self._more:
                if not unlooked:
                    self._more.wait_for(self._has_news, backoff_s if again else None)
                if self._stopping.is_set():
                    return
                news = self._waiting.popleft() if self._waiting else None
            if news is not None:
                self._try((news,), again)
            elif unlooked:  # the newest first: those before them went out before the relay ended
                self._try(self._looked_at(unlooked.pop()), again)
            elif again:
                num_failed = len(again)
                for one in [again.popleft() for _ in range(num_failed)]:
                    if self._waiting:
                        again.append(one)
                    else:
                        self._try((one,), again)
                backoff_s = MIN_BACKOFF_S if len(again) < num_failed else min(2 * backoff_s, MAX_BACKOFF_S)

    def _has_news(self) -> bool:
        return bool(self._waiting) or self._stopping.is_set()

    def _try(self, some: Sequence[_Waiting], again: deque[_Waiting]) -> None:
        again.extend(one for one in some if not self._is_done(one))

    def _looked_at(self, entry: Entry) -> Sequence[_Waiting]:
        """An entry that an earlier relay has left, if it is a broken batch."""
        try:
            if self._journal.waits(entry) and is_urgent(decode_batch(self._journal.body(entry))):
                return (_Waiting(entry, time.monotonic()),)
        except (DamagedEntry, OSError, ValueError):  # tile maps among them
            pass
        return ()

    def _is_done(self, one: _Waiting) -> bool:
        """Send it; False: once more."""
        if time.monotonic() - one.since > GIVE_UP_S or not self._journal.waits(one.entry):
            return True
        registration = self._sessions.of(one.entry.session)
        if registration is None:
            return True
        try:
            failed = self._uploader.register(registration)
            if failed is None:
                body = self._journal.body(one.entry)
                failed = self._uploader.transport.post(
                    "/v1/batches", body, BATCH_CONTENT_TYPE, registration.session.key
                )
        except (DamagedEntry, OSError) as e:  # delivered meanwhile, perhaps
            log.debug("a broken batch goes with the others: %s", e)
            return True
        verdict = judge(failed)
        if verdict is ResponseMeaning.REGISTER:
            self._uploader.forget(registration.session)
        self._uploader.transport.reload_token()
        self.num_delivered += verdict is ResponseMeaning.ACKNOWLEDGED
        return verdict not in (ResponseMeaning.RETRY, ResponseMeaning.REGISTER, ResponseMeaning.HOLD)
