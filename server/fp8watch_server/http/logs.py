"""Lines that the collector writes about itself: text for people, or one JSON object a line; never a secret.

Upstream:   fp8watch_server.cli    Downstream: fp8watch_server.app
Thread:     any

Values from outside (names of runs, paths, texts of errors) cannot forge a line: control characters are escaped.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator
from urllib.parse import unquote, urlsplit

import msgspec
import urllib3
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8watch_server.settings import Settings

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_BEARER = re.compile(r"fp8w_[A-Za-z0-9_-]{8,}")
MAX_CHARS = 8000
MIN_SECRET_CHARS, MIN_PART_CHARS, MIN_MIXED_CHARS = 4, 16, 9
"""Parts of a URL's path and query from this length on are taken for tokens, with a digit in them from the last one on;
others are words that logs need."""
OWN = ("fp8watch", "fp8watch_server", "fp8watch_agent")
request_log = logging.getLogger("fp8watch.request")


class Redacted(logging.Formatter):
    """Formats a record and takes the secrets out of it, those of tracebacks too."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets: list[str] = []
        self.hide(secrets)

    def hide(self, secrets: Iterable[str]) -> None:
        """Take these out too."""
        found = {part for secret in secrets for part in _ways_to_write(secret) if len(part) >= MIN_SECRET_CHARS}
        self._secrets = sorted({*self._secrets, *found}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Without secrets, and not without end."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _BEARER.sub("fp8w_***", text)[:MAX_CHARS]

    def parts(self, record: logging.LogRecord) -> tuple[str, str]:
        """Message, and traceback or ''."""
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return self.clean(record.getMessage()), self.clean(trace)


def _ways_to_write(secret: str) -> Iterator[str]:
    """A secret, and of a URL what clients log of it: a path and a query that hold a token, apart from the host, as given and as sent."""
    yield secret
    try:
        parts = urlsplit(secret)
        sent = urllib3.util.parse_url(secret)
    except (ValueError, urllib3.exceptions.LocationParseError):
        return
    if not parts.netloc:
        return
    if parts.password:
        yield from (parts.password, unquote(parts.password))
    for path, query in ((parts.path, parts.query), (sent.path or "", sent.query or "")):
        whole = f"{path}?{query}" if query else path
        tokens = [part for part in re.split(r"[/?&=;]+", whole) if _is_token(unquote(part))]
        for text in (whole, path, query, *tokens):
            if any(token in text for token in tokens):
                yield from (text, unquote(text))


def _is_token(part: str) -> bool:
    return len(part) >= MIN_PART_CHARS or (len(part) >= MIN_MIXED_CHARS and any(c.isdigit() for c in part))


class TextLines(Redacted):
    """A line for people; a traceback follows below it."""

    def format(self, record: logging.LogRecord) -> str:
        """As text."""
        message, trace = self.parts(record)
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: {_escaped(message)}"
        return f"{head}\n{trace}" if trace else head


class JsonLines(Redacted):
    """One object a line: time, level, logger, message, and what a record carries in `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """As JSON."""
        message, trace = self.parts(record)
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        for name, value in getattr(record, "fields", {}).items():
            line.setdefault(name, self.clean(value) if isinstance(value, str) else value)
        if trace:
            line["traceback"] = trace
        return _CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", msgspec.json.encode(line).decode())


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def hide(secrets: Iterable[str]) -> None:
    """More that must never be shown: secrets that became known after the start."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Redacted):
            handler.formatter.hide(secrets)


def set_up(settings: Settings) -> None:
    """Send everything to the standard error; of libraries warnings alone: at other levels they log what they send."""
    kind = JsonLines if settings.log_format == "json" else TextLines
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(kind(settings.secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelName(settings.log_level.upper())
    root.setLevel(max(level, logging.WARNING))
    for name in OWN:
        logging.getLogger(name).setLevel(level)


class RequestLog:
    """A middleware: one line for each request, at level info."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and say what became of it."""
        if scope["type"] != "http" or not request_log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            seconds = round(time.perf_counter() - began, 6)
            path = scope["path"][:512]  # never the query: nothing secret belongs there, but people put it there
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
            request_log.info("%s %s %d %.3f s", *fields.values(), extra={"fields": fields})
