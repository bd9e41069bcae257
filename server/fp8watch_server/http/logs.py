"""Logging: text or JSON lines with secrets redacted.

Thread:     any

External values (names of runs, paths, error texts) cannot forge a line: control characters are escaped.
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
    """Formatter that removes secrets, also from tracebacks."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets: list[str] = []
        self.hide(secrets)

    def hide(self, secrets: Iterable[str]) -> None:
        """Redact these as well."""
        self._secrets = sorted({*self._secrets, *_all_ways(secrets)}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Redact and truncate."""
        text = _replaced(text, self._secrets)
        return _BEARER.sub("fp8w_***", text)[:MAX_CHARS]

    def parts(self, record: logging.LogRecord) -> tuple[str, str]:
        """Message, and traceback or ''."""
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return self.clean(record.getMessage()), self.clean(trace)


def without(text: str, url: str) -> str:
    """What a receiver said, without what is secret of its address, which it may repeat: its path in any case."""
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    ways = _all_ways([url, path, parts.path])
    return _replaced(text, sorted(ways, key=len, reverse=True))


def _all_ways(secrets: Iterable[str]) -> set[str]:
    return {part for secret in secrets for part in _ways_to_write(secret) if len(part) >= MIN_SECRET_CHARS}


def _replaced(text: str, longest_first: Iterable[str]) -> str:
    for secret in longest_first:
        text = text.replace(secret, "***")
    return text


def _ways_to_write(secret: str) -> Iterator[str]:
    """Forms of a secret; of a URL also the path and query that hold a token, apart from the host, raw and encoded."""
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
    """Text lines for people, each followed by its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """As text."""
        message, trace = self.parts(record)
        head = f"{self.formatTime(record)} {record.levelname} {record.name}: {_escaped(message)}"
        return f"{head}\n{trace}" if trace else head


class JsonLines(Redacted):
    """JSON lines: time, level, logger, message, and the record's `fields`."""

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
    """Redact secrets that become known after the start."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Redacted):
            handler.formatter.hide(secrets)


def set_up(settings: Settings) -> None:
    """Configure logging to stderr; libraries log warnings only, because at lower levels they log what they send."""
    kind = JsonLines if settings.log_format == "json" else TextLines
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(kind(settings.secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelName(settings.log_level.upper())
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("psycopg").addFilter(_says_more)
    for name in OWN:
        logging.getLogger(name).setLevel(level)


def _says_more(record: logging.LogRecord) -> bool:
    """Whether a record of psycopg says more than an error that it raises as well: of many statements one failed, and those
    behind it were not run."""
    return not str(record.msg).startswith("error ignored terminating")


class RequestLog:
    """ASGI middleware: one line per request, at level info."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the request and log its status and duration."""
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
            path = scope["path"][:512]  # never the query string: people put secrets there
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": seconds}
            request_log.info("%s %s %d %.3f s", *fields.values(), extra={"fields": fields})
