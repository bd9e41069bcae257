"""Bearer-token authentication: scopes, SHA-256 storage, and open access on loopback without tokens.

Shapes:     an ASGI middleware in front of every route
Thread:     event loop

Scopes: `ingest` for /v1/, `admin` for any other change, `read` for the rest; /healthz and /readyz are open. A browser
may send the token as the password of HTTP Basic. A token may name runs and an end (`auth.grant`). Without tokens the collector answers this machine only, and only under
its own host names.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import re
import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from sqlalchemy.engine import Engine
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fp8watch_server.auth.grant import ALL_RUNS, OPEN, Grant, attach
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert, writing
from fp8watch_server.http.away_page import asked_by_a_person, away_page
from fp8watch_server.http.errors import Problem
from fp8watch_server.settings import Settings

log = logging.getLogger(__name__)

SCOPES = ("ingest", "read", "admin")
PREFIX = "fp8w_"
SETTINGS_NAME = "settings"
"""Name of the token that FP8WATCH_TOKEN holds."""
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
RELOAD_AFTER_S = 5.0
FIRST_READ_S, READ_S = 0.9, 0.25
"""Timeouts of reading the tokens: the first time, and when there is an older snapshot."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Exposed(ValueError):
    """Listening on a reachable address without a token."""


def new_token() -> str:
    """256 random bits, with a prefix that secret scanners recognise."""
    return PREFIX + secrets.token_urlsafe(32)


def token_sha256(token: str) -> str:
    """Hash of a token as stored."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True)
class Known:
    """Snapshot of the tokens in the database."""

    grants: dict[str, Grant]  # of tokens that were not revoked, by hash
    closed: bool  # whether any token was ever made: revoking the last one opens nothing


def read_tokens(engine: Engine) -> Known:
    """Read all tokens."""
    c = t.token.c
    with engine.connect() as conn:
        rows = conn.execute(sa.select(c.token_sha256, c.scopes, c.runs, c.expires_at, c.revoked_at, c.tenant)).all()
    grants = {
        row.token_sha256: Grant(
            frozenset(row.scopes.split(",")), tuple(row.runs.split(",")), row.expires_at, row.tenant
        )
        for row in rows
        if row.revoked_at is None
    }
    return Known(grants, bool(rows))


class Tokens:
    """Cached tokens of the database, refreshed every few seconds.

    While the database does not answer, the last snapshot stays valid: nothing can be read or written then anyway, and
    requests must fail with that reason instead of hanging.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: Known | None = None
        self._read_at = -RELOAD_AFTER_S
        self._reading: asyncio.Future[Known] | None = None

    async def known(self) -> Known:
        """The cached snapshot, refreshed when due.

        Raises:
            SQLAlchemyError, TimeoutError: they were never read, and cannot be now.
        """
        known = self._known
        if known is not None and time.monotonic() - self._read_at < RELOAD_AFTER_S:
            return known
        reading = self._reading
        if reading is None or reading.done() or reading.get_loop() is not asyncio.get_running_loop():
            own = CapacityLimiter(1)  # a thread that waits behind no question of anybody
            reading = self._reading = asyncio.ensure_future(to_thread.run_sync(self._read, limiter=own))
        await asyncio.wait({reading}, timeout=FIRST_READ_S if known is None else READ_S)
        if reading.done() and reading.exception() is None:
            return reading.result()
        if known is not None:
            return known
        if reading.done():
            return reading.result()
        raise TimeoutError

    def _read(self) -> Known:
        began = time.monotonic()
        self._known = read_tokens(self._engine)
        self._read_at = began
        return self._known


def install_token(engine: Engine, settings: Settings) -> None:
    """Store the hash of the token from the settings; it replaces the previous one from the settings.

    Without one nothing changes: another collector of the database may have it, and its agents send it.
    """
    c = t.token.c
    if not settings.token:
        with engine.connect() as conn:
            others = conn.execute(sa.select(c.name).where(c.name == SETTINGS_NAME, c.revoked_at.is_(None))).first()
        if others is not None:
            log.warning(
                "the token of FP8WATCH_TOKEN of an earlier start, or of another collector of this database, stays valid; "
                "if nobody is to use it: fp8watch token revoke %s",
                SETTINGS_NAME,
            )
        return
    with writing(engine) as conn:
        conn.execute(sa.delete(t.token).where(c.name == SETTINGS_NAME))
        row = {"token_sha256": token_sha256(settings.token), "tenant": t.DEFAULT_TENANT, "name": SETTINGS_NAME}
        row |= {"scopes": ",".join(SCOPES), "runs": ALL_RUNS}
        upsert(conn, t.token, [{**row, "created_at": time.time(), "expires_at": None, "revoked_at": None}])


def check_exposure(engine: Engine, settings: Settings) -> None:
    """Refuse to be reached from beyond loopback without a token: by its address, or by that of a proxy.

    Raises:
        Exposed: with the remedy.
    """
    guarded = any(not grant.expired for grant in read_tokens(engine).grants.values())
    if settings.loopback or settings.insecure or guarded:
        return
    proxy = f" behind {settings.public_url}" if settings.public_url else ""
    raise Exposed(
        f"host {settings.host!r}{proxy} can be reached from other machines, and there is no token: anyone could read "
        "and write. Make one with `fp8watch token create`, or set FP8WATCH_TOKEN (or FP8WATCH_TOKEN_FILE), listen on "
        "127.0.0.1 without a public URL of another name, or say --insecure"
    )


def needed_scope(method: str, path: str) -> str | None:
    """Scope that a request needs; None for open paths."""
    if path in OPEN_PATHS:
        return None
    if path.startswith("/v1/"):
        return "ingest"
    return "read" if method in ("GET", "HEAD", "OPTIONS") else "admin"


def presented_token(authorization: str) -> str | None:
    """Token from an Authorization header."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip() or None
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2] or None
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


class Auth:
    """ASGI middleware that checks tokens and scopes."""

    def __init__(self, app: ASGIApp, tokens: Tokens, settings: Settings) -> None:
        self._app = app
        self._tokens = tokens
        self._open_without_tokens = settings.loopback or settings.insecure
        self._own_origin = urlsplit(settings.public_url).netloc
        self._any_host = settings.insecure
        public = urlsplit(settings.public_url).hostname
        self._hosts = LOOPBACK_NAMES | set(settings.hosts) | ({public.lower()} if public else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http":
            refusal = await self._refusal(scope)
            if refusal is not None:
                by_a_person = refusal.status == 503 and asked_by_a_person(scope)
                await (away_page(1, refusal.detail) if by_a_person else refusal.response())(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        needed = needed_scope(scope["method"], scope["path"])
        if needed is None:
            return None
        if needed != "read" and self._of_another_site(headers):
            return Problem(
                403,
                f"the page at {headers.get('origin', 'another site')[:200]!r} may not write here",
                rule="only pages of the collector itself may change anything",
                remedy="open the collector's own address",
            )
        try:
            known = await self._tokens.known()
        except (sa.exc.SQLAlchemyError, TimeoutError):
            return Problem(
                503,
                "the database cannot be used at the moment",
                rule="tokens are kept in the database",
                remedy="ask again later",
                headers={"Retry-After": "1"},
            )
        if not known.closed and self._open_without_tokens:
            attach(scope, OPEN)
            return self._misdirected(headers)
        token = presented_token(headers.get("authorization", ""))
        grant = known.grants.get(token_sha256(token)) if token else None
        if grant is None or grant.expired:
            renew = (
                "make another with fp8watch token create" if grant is not None else "send Authorization: Bearer <token>"
            )
            return Problem(
                401,
                "the token has expired" if grant is not None else "no token, or one that is not known",
                rule="this collector has tokens, so every request needs one",
                remedy=f"{renew}; agents read FP8WATCH_TOKEN or FP8WATCH_TOKEN_FILE",
                headers={"WWW-Authenticate": 'Basic realm="fp8watch (any name, the token as password)"'},
            )
        if needed not in grant.scopes:
            return Problem(
                403,
                f"the token's scopes are {', '.join(sorted(grant.scopes))}",
                rule=f"{scope['method']} {scope['path'][:200]} needs the scope {needed}",
                remedy=f"use a token with the scope {needed}",
            )
        attach(scope, grant)
        return None

    def _misdirected(self, headers: Headers) -> Problem | None:
        """Without tokens the Host must be one of ours: an attacker's page may point its own name to 127.0.0.1 (DNS
        rebinding).
        """
        given = headers.get("host")
        name = re.sub(r":[0-9]*$", "", given or "").lower()
        if self._any_host or given is None or name in self._hosts:
            return None
        return Problem(
            421,
            f"this collector is not {given[:200]!r}",
            rule=f"a collector without tokens answers to {', '.join(sorted(self._hosts))} only",
            remedy="name it in FP8WATCH_HOSTS, or make a token: fp8watch token create",
        )

    def _of_another_site(self, headers: Headers) -> bool:
        """Whether a browser sends this on behalf of another site's page, or may (CSRF): one that is too old to say so
        can have been made to by any page, and our own pages need a newer one."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None and site is None:
            return headers.get("user-agent", "").startswith("Mozilla/")
        if origin is None:
            return site not in ("none", "same-origin")
        return urlsplit(origin).netloc not in (headers.get("host", ""), self._own_origin or None)
