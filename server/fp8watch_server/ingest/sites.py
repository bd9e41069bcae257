"""Registration of sites: a part after the other, and at once where the same has been registered of late.

Shapes:     JSON bytes -> rows of the table `site`
Thread:     ingest pool

Every rank of a run sends the same sites, and whoever was told to come back sends them again. So bodies that were
registered are known by their digest, and a repetition costs a question of one row, however slow the collector is.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from sqlalchemy.engine import Engine

from fp8watch_server.db.dialect import writing
from fp8watch_server.ingest.registration import Name, SitesBody, check_name, decode
from fp8watch_server.store import registrations

SITES_PER_COMMIT = 250
TURN_S = 5.0
"""How long a registration waits for its turn to write: batches come again and again, and would go before it."""
KNOWN_FOR_S = 60.0
"""So long a body is known without a look at its sites: another collector may have changed them."""
MAX_KNOWN_BODIES = 8192


class _Undecoded(msgspec.Struct):
    session: Name
    sites: msgspec.Raw


class KnownBodies:
    """Bodies of sites that are registered, by digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, float, bytes], tuple[float, int]] = OrderedDict()

    def find(self, run_id: str, created_at: float, digest: bytes) -> int | None:
        """How many sites a body holds that was registered of late."""
        with self._lock:
            at, num_sites = self._known.get((run_id, created_at, digest), (0.0, None))
        return num_sites if time.monotonic() - at < KNOWN_FOR_S else None

    def remember(self, run_id: str, created_at: float, digest: bytes, num_sites: int) -> None:
        """It is registered."""
        with self._lock:
            self._known[run_id, created_at, digest] = (time.monotonic(), num_sites)
            while len(self._known) > MAX_KNOWN_BODIES:
                self._known.popitem(last=False)

    def forget(self, run_id: str) -> None:
        """Sites of a run have other facts than they had: what was registered before may be no more."""
        with self._lock:
            for key in [key for key in self._known if key[0] == run_id]:
                del self._known[key]


class SiteRegistry:
    """One per collector.

    Args:
        progress: is told when the database has finished something.
    """

    def __init__(self, engine: Engine, progress: Callable[[], None]) -> None:
        self._engine = engine
        self._progress = progress
        self._bodies = KnownBodies()

    def register(self, run_id: str, body: bytes, key_sha256: str = "") -> int:
        """Register the sites of a body, or renew their static facts.

        Returns:
            How many it holds.

        Raises:
            Problem: what is wrong with it.
            Unknown: the session, or its run.
            WrongKey: the session is somebody else's.
        """
        check_name("run", run_id)
        digest = _digest(body)
        known = None if digest is None else self._known(run_id, *digest, key_sha256)
        if known is not None:
            return known
        got = decode(body, SitesBody)
        sites = [site.as_site() for site in got.sites]
        with self._engine.connect() as conn:
            created_at = registrations.require_registered(conn, run_id, got.session, key_sha256)
        for at in range(0, len(sites), SITES_PER_COMMIT):
            with self._engine.connect() as conn:
                fresh, changed = registrations.unregistered_sites(conn, run_id, sites[at : at + SITES_PER_COMMIT])
            self._progress()
            if fresh:
                with writing(self._engine, TURN_S) as conn:
                    registrations.register_sites(conn, run_id, got.session, fresh, now=time.time())
                self._progress()
            if changed:
                self._bodies.forget(run_id)
        if digest is not None:
            self._bodies.remember(run_id, created_at, digest[1], len(sites))
        return len(sites)

    def _known(self, run_id: str, session: str, digest: bytes, key_sha256: str) -> int | None:
        with self._engine.connect() as conn:
            try:
                created_at = registrations.require_registered(conn, run_id, session, key_sha256)
            except registrations.Unknown:  # said once the body is found to be right
                return None
        return self._bodies.find(run_id, created_at, digest)


def _digest(body: bytes) -> tuple[str, bytes] | None:
    """Session, and a digest of the sites; None where there are none: `decode` says why."""
    try:
        got = msgspec.json.decode(body, type=_Undecoded)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return got.session, hashlib.sha256(got.sites).digest()
