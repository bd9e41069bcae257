"""The collectors of a relay: which of them is asked next, and when one that was away is asked again.

Shapes:     URLs -> their order; the first that answers is used
Thread:     any; a thread of its own asks those that were away

A batch may go to two of them: its key makes it count once, in whichever database they share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from fp8watch_agent.checks import checked
from fp8watch_agent.settings import ADDRESS, AgentSettings, Url
from fp8watch_agent.transport import Answer, Transport

log = logging.getLogger("fp8watch.relay")

MAX_COLLECTORS = 16
PROBE_EVERY_S, PROBE_TIMEOUT_S = 0.5, 1.0
RELAPSE_S = 10.0
"""One that fails so soon after its return is left alone for a while, twice as long each time."""
MIN_REST_S, MAX_REST_S = 1.0, 30.0


def read_collectors(text: str, source: str) -> list[str]:
    """URLs separated by commas, in the order in which they are used.

    Raises:
        ValueError: source, value, rule and remedy.
    """
    out: list[str] = []
    shown = "(hidden)" if "@" in text else repr(text)
    for part in text.split(","):
        try:
            url = str(checked(part.strip(), Url))
            if url in out:
                raise ValueError(f"{url} is named twice; name each collector once")
        except ValueError as e:
            which = "" if part == text or "@" in part else f" ({part.strip()!r})"
            raise ValueError(f"{source}={shown}{which}: {e}; separate several with commas") from None
        out.append(url)
    if len(out) > MAX_COLLECTORS:
        raise ValueError(f"{source}={shown}: {len(out)} collectors; give {MAX_COLLECTORS} at most, or a load balancer")
    return out


class Collectors:
    """Of one relay.

    Args:
        settings: token and time-out.
        urls: [n] of collectors that share a database; the first is preferred.
    """

    def __init__(self, settings: AgentSettings, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError(f"collectors={urls!r}: a relay needs one; {ADDRESS}")
        self.urls = list(urls)
        self.timeout_s = settings.request_timeout_s
        self._settings = settings
        self._lock = threading.Lock()
        self._away: dict[int, str] = {}  # those that did not answer, and what they did
        self._suspected: set[int] = set()
        self._rest_s = [0.0] * len(urls)
        self._rests_until = [0.0] * len(urls)
        self._back_at = [-RELAPSE_S] * len(urls)
        self._look = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fp8watch-relay-probe", daemon=True)

    def __len__(self) -> int:
        return len(self.urls)

    def transports(self) -> list[Transport]:
        """A connection to each, for one thread."""
        s = self._settings
        return [Transport(url, s.token, s.token_file, self.timeout_s) for url in self.urls]

    def start(self) -> None:
        """Start the thread."""
        if len(self) > 1:
            self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        self._look.set()
        if self._thread.is_alive():
            self._thread.join(2 * PROBE_TIMEOUT_S)

    def order(self) -> list[int]:
        """Numbers of the collectors, the one to use first; those that are away come last."""
        return sorted(range(len(self)), key=lambda i: (i in self._away, i))

    def away(self) -> dict[str, str]:
        """URLs of those that are away, and why."""
        with self._lock:
            return {self.urls[i]: why for i, why in self._away.items()}

    def unanswered(self, i: int, answer: Answer) -> bool:
        """It did not answer, or with 5xx. True: it is away. False: it is slow, and it is asked whether it works."""
        if answer.error.startswith("ReadTimeout"):  # the same again would make a busy one slower
            self.suspect(i)
            return False
        self.failed(i, str(answer))
        return True

    def failed(self, i: int, why: str) -> None:
        """It is away."""
        if len(self) < 2:
            return
        with self._lock:
            if i not in self._away:
                now = time.monotonic()
                relapsed = now - self._back_at[i] < RELAPSE_S
                self._rest_s[i] = min(MAX_REST_S, max(MIN_REST_S, 2 * self._rest_s[i])) if relapsed else 0.0
                self._rests_until[i] = now + self._rest_s[i]
                log.warning("%s is away (%s)", self.urls[i], why)
            self._away[i] = why
        self._look.set()

    def suspect(self, i: int) -> None:
        """It is slow: ask whether it works."""
        if len(self) > 1:
            with self._lock:
                self._suspected.add(i)
            self._look.set()

    def answered(self, i: int) -> None:
        """It took something."""
        if i in self._away and time.monotonic() >= self._rests_until[i]:
            self._returned(i)

    def _returned(self, i: int) -> None:
        with self._lock:
            if self._away.pop(i, None) is not None:
                self._back_at[i] = time.monotonic()
                log.warning("%s is there again", self.urls[i])

    def _run(self) -> None:
        ways = [Transport(url, timeout_s=PROBE_TIMEOUT_S) for url in self.urls]
        while not self._stopping.is_set():
            with self._lock:
                suspected, self._suspected = self._suspected, set()
                away = [i for i in self._away if time.monotonic() >= self._rests_until[i]]
                waits = bool(self._away)
            for i in sorted(suspected.union(away)):
                answer = ways[i].get("/readyz")
                if answer.status == 0 or answer.status >= 500:
                    self.failed(i, str(answer))
                elif i in away:
                    self._returned(i)
            self._look.wait(PROBE_EVERY_S if waits else None)
            self._stopping.wait(PROBE_EVERY_S / 5)
            self._look.clear()
        for way in ways:
            way.close()
