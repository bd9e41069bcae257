"""Sessions that a relay sends for: what they registered, one file each, and the tile maps that the collector wants.

Shapes:     bodies of PUT requests -> Registration; a file of JSON for each session
Thread:     any; one lock
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from fp8watch_agent.record import Site
from fp8watch_agent.session import Registration, Session, decode_registration, encode_registration
from fp8watch_agent.transport import Capture

SUFFIX = ".session"
FORGET_AFTER_S = 7 * 86_400.0
_FIELDS = {f.name for f in fields(Session)}
_UNSAID: dict[str, Any] = {
    **dict.fromkeys(("host", "recipe", "fingerprint", "backend"), ""),
    "rank": 0,
    "world_size": 1,
    "mesh": {},
    "pid": 0,
    "started_at": 0.0,
    "versions": {},
}


class _Facts(msgspec.Struct):
    session: str
    sites: list[Site]


class Sessions:
    """The sessions of a folder.

    Args:
        directory: exists.
        keep: sessions that something waits for; of the others, those that are older than a week are forgotten.
    """

    def __init__(self, directory: Path, keep: set[str]) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._runs: dict[str, dict[str, Any]] = {}  # what was said of a run before its session came
        self._known: dict[str, Registration] = {}
        self._captures: dict[str, list[Capture]] = {}
        for path in directory.glob(f"*{SUFFIX}"):
            name = path.name.removesuffix(SUFFIX)
            if name not in keep and path.stat().st_mtime < time.time() - FORGET_AFTER_S:
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self._known[name] = decode_registration(path.read_bytes())

    def of(self, session: str) -> Registration | None:
        """What a session registered; None: nothing, or it was forgotten."""
        return self._known.get(session)

    def put_run(self, run_id: str, body: bytes) -> None:
        """`PUT /v1/runs/{run_id}`.

        Raises:
            msgspec.MsgspecError, ValueError: not such a body.
        """
        facts = msgspec.json.decode(body, type=dict[str, Any])
        with self._lock:
            self._runs[run_id] = facts

    def put_session(self, run_id: str, session: str, key: str, body: bytes) -> None:
        """`PUT /v1/runs/{run_id}/sessions/{session}`; on disk when it returns.

        Raises:
            msgspec.MsgspecError, ValueError, TypeError: not such a body.
            PermissionError: the session was registered with another key.
            OSError: it cannot be written.
        """
        given = msgspec.json.decode(body, type=dict[str, Any])
        facts = _UNSAID | {name: value for name, value in given.items() if name in _FIELDS and value is not None}
        said = self._runs.get(run_id, {})
        facts |= {"run_id": run_id, "session": session, "run_name": said.get("name") or run_id}
        facts["tags"] = said.get("tags") or facts.get("tags") or []
        made = msgspec.convert({**facts, "key": key}, type=Session)
        with self._lock:
            before = self._known.get(session)
            if before is not None and before.session.key != key:
                raise PermissionError(session)
            after = Registration(made, [] if before is None else before.sites())
            after.version = 0 if before is None else before.version + 1
            self._write(after)
            self._known[session] = after

    def put_sites(self, key: str, body: bytes) -> bool:
        """`PUT /v1/runs/{run_id}/sites`; on disk when it returns. False: the session is not known.

        Raises:
            As `put_session`.
        """
        got = msgspec.json.decode(body, type=_Facts)
        with self._lock:
            known = self._known.get(got.session)
            if known is None:
                return False
            if known.session.key != key:
                raise PermissionError(got.session)
            if known.add(got.sites):
                self._write(known)
        return True

    def _write(self, registration: Registration) -> None:
        path = self._directory / f"{registration.session.session}{SUFFIX}"
        part = path.with_suffix(".tmp")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            raw = encode_registration(registration.session, registration.sites())
            at = 0
            while at < len(raw):
                at += os.write(fd, raw[at:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(part, path)
        folder = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def wanted(self, session: str, captures: list[Capture] | None) -> None:
        """What the collector asked of a session last."""
        self._captures[session] = captures or []

    def captures(self, session: str) -> list[Capture] | None:
        """The same; None: nothing was heard."""
        return self._captures.get(session)
