"""Who may do what: bearer tokens, kept as SHA-256; loopback without tokens is open.

Upstream:   fp8watch_server.settings    Downstream: fp8watch_server.app
Shapes:     an ASGI middleware in front of every route
Thread:     event loop

Scopes: `ingest` for /v1/, `admin` for changing anything else, `read` for the rest; /healthz and /readyz are open. A
browser may send the token as the password of HTTP Basic.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
import time
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .problem import Problem
from .settings import Settings
from .store import schema as t
from .store.dialect import upsert, writing

SCOPES = ("ingest", "read", "admin")
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
RELOAD_AFTER_S = 5.0


class Exposed(ValueError):
    """Listening where others can reach it, with no token."""


def token_sha256(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """The tokens of the database, read again every few seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._scopes: dict[str, frozenset[str]] = {}
        self._read_at = -RELOAD_AFTER_S

    def scopes(self) -> dict[str, frozenset[str]]:
        """Scopes by hash of the token."""
        with self._lock:
            if time.monotonic() - self._read_at >= RELOAD_AFTER_S:
                with self._engine.connect() as conn:
                    c = t.token.c
                    rows = conn.execute(sa.select(c.token_sha256, c.scopes).where(c.revoked_at.is_(None)))
                    self._scopes = {hash_: frozenset(scopes.split(",")) for hash_, scopes in rows}
                self._read_at = time.monotonic()
            return self._scopes


def install_token(engine: Engine, settings: Settings) -> None:
    """Keep the hash of the token that the settings name; it replaces the one that they named before."""
    c = t.token.c
    with writing(engine) as conn:
        conn.execute(sa.delete(t.token).where(c.name == "settings"))
        if settings.token:
            row = {"token_sha256": token_sha256(settings.token), "tenant": t.DEFAULT_TENANT, "name": "settings"}
            upsert(conn, t.token, [{**row, "scopes": ",".join(SCOPES), "created_at": time.time(), "revoked_at": None}])


def check_exposure(engine: Engine, settings: Settings) -> None:
    """Refuse to listen beyond loopback without a token.

    Raises:
        Exposed: with the remedy.
    """
    if settings.loopback or settings.insecure or Tokens(engine).scopes():
        return
    raise Exposed(
        f"host {settings.host!r} can be reached from other machines, and there is no token: anyone could read "
        "and write. Set FP8WATCH_TOKEN (or FP8WATCH_TOKEN_FILE), listen on 127.0.0.1, or say --insecure"
    )


def needed_scope(method: str, path: str) -> str | None:
    """The scope that a request needs; None for the open ones."""
    if path in OPEN_PATHS:
        return None
    if path.startswith("/v1/"):
        return "ingest"
    return "read" if method in ("GET", "HEAD", "OPTIONS") else "admin"


def presented_token(authorization: str) -> str | None:
    """The token of an Authorization header."""
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
    """The middleware."""

    def __init__(self, app: ASGIApp, tokens: Tokens, settings: Settings) -> None:
        self._app = app
        self._tokens = tokens
        self._open_without_tokens = settings.loopback or settings.insecure
        self._own_origin = urlsplit(settings.public_url).netloc

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "http":
            refusal = await self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
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
                f"the page at {headers['origin'][:200]!r} may not write here",
                rule="only pages of the collector itself may change anything",
                remedy="open the collector's own address",
            )
        try:
            known = await run_in_threadpool(self._tokens.scopes)
        except sa.exc.SQLAlchemyError:
            return Problem(
                503,
                "the database cannot be used at the moment",
                rule="tokens are kept in the database",
                remedy="ask again later",
                headers={"Retry-After": "1"},
            )
        if not known and self._open_without_tokens:
            return None
        token = presented_token(headers.get("authorization", ""))
        granted = known.get(token_sha256(token)) if token else None
        if granted is None:
            return Problem(
                401,
                "no token, or one that is not known",
                rule="this collector has tokens, so every request needs one",
                remedy="send Authorization: Bearer <token>; agents read FP8WATCH_TOKEN or FP8WATCH_TOKEN_FILE",
                headers={"WWW-Authenticate": 'Basic realm="fp8watch (any name, the token as password)"'},
            )
        if needed not in granted:
            return Problem(
                403,
                f"the token's scopes are {', '.join(sorted(granted))}",
                rule=f"{scope['method']} {scope['path'][:200]} needs the scope {needed}",
                remedy=f"use a token with the scope {needed}",
            )
        return None

    def _of_another_site(self, headers: Headers) -> bool:
        """Whether a browser sends this for a page of somebody else's."""
        origin = headers.get("origin")
        return origin is not None and urlsplit(origin).netloc not in (headers.get("host", ""), self._own_origin or None)
