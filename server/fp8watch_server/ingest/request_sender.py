"""Who sends: what the token opens, and the key of the session.

Shapes:     a request -> Sender
Thread:     event loop; the checks run where the body is decoded
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from fp8watch_server.auth import grant
from fp8watch_server.auth.grant import OPEN, Grant
from fp8watch_server.auth.quota import Quotas

KEY_HEADER = "fp8watch-session-key"
"""Header with the secret of a session: what its first registration showed is asked of all that follows."""


@dataclass(frozen=True)
class RequestSender:
    """Of one request."""

    grant: Grant = OPEN
    key_sha256: str = ""  # of the session's key; empty: none
    charge: Callable[[Grant, int], None] = lambda grant, num_records: None
    """Is told how many records of it were decoded."""


def sender_of(request: Request) -> RequestSender:
    """Who sent a request."""
    key = request.headers.get(KEY_HEADER, "")
    return RequestSender(
        grant.of(request.scope),
        hashlib.sha256(key.encode("utf-8", "replace")).hexdigest() if key else "",
        quotas_of(request).charge,
    )


def quotas_of(request: Request) -> Quotas:
    """The quotas of the collector."""
    found = request.app.state.quotas
    assert isinstance(found, Quotas)
    return found
