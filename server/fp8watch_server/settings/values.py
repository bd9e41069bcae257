"""Types of settings: how a text is read, which values are taken, and what is said of others.

Shapes:     text of the environment or the command line -> value
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from fp8watch_agent.checks import Rule, digits
from fp8watch_server.db.dialect import parse_url
from fp8watch_server.settings.otlp_target import check_endpoint, header_pairs
from fp8watch_server.settings.quotas import checked_text
from fp8watch_server.settings.webhook_url import check_url


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise msgspec.ValidationError from None


def _database_url(text: str) -> str:
    parse_url(text)
    return text


def _http_url(text: str) -> str:
    if text == "":
        return ""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise msgspec.ValidationError
    return text.rstrip("/")


def _webhook(text: str) -> str:
    if text:
        check_url(text)
    return text.strip()  # every other character of it may be part of the secret


def _token(text: str) -> str:
    if text and (len(text) < 16 or not text.isascii() or any(c.isspace() for c in text)):
        raise msgspec.ValidationError
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", ""):  # msgspec takes -0 too
        raise msgspec.ValidationError
    return text.lower() in ("1", "true")


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


def _queue_url(text: str) -> str:
    if text == "":
        return ""
    servers = [server.strip() for server in text.split(",")]
    for server in servers:
        parts = urlsplit(server)
        if parts.scheme not in ("nats", "tls") or not parts.hostname or parts.path.strip("/"):
            raise msgspec.ValidationError
        try:
            _ = parts.port
        except ValueError:
            raise msgspec.ValidationError from None
    return ",".join(servers)


def _otlp_endpoint(text: str) -> str:
    try:
        return check_endpoint(text) if text.strip() else ""
    except ValueError:
        raise msgspec.ValidationError from None


def _otlp_headers(text: str) -> str:
    try:
        header_pairs(text)
    except ValueError:
        raise msgspec.ValidationError from None
    return text.strip()


def _shards(text: str) -> str:
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, url = word.partition("=")
        if not equals or not _SHARD_NAME.fullmatch(name) or name in found:
            raise msgspec.ValidationError
        parse_url(url)
        found[name] = url
    return " ".join(f"{name}={url}" for name, url in found.items())


_SHARD_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def _file(text: str) -> str:
    if not text:
        return ""
    path = Path(text).expanduser()
    try:
        path.open("rb").close()
    except OSError as e:
        raise msgspec.ValidationError from e
    return str(path)


Port = Annotated[int, Meta(ge=0, le=65535), Rule("must be a whole number from 0 (any free port) to 65535", digits)]
Host = Annotated[
    str,
    Meta(pattern=r"\A[^\s/@]+\Z"),
    Rule("must be an address or a host name, such as 127.0.0.1 or 0.0.0.0"),
]
Hosts = Annotated[
    tuple[Annotated[str, Meta(pattern=r"\A[^\s/@*]+\Z")], ...],
    Rule("must be host names without ports and wildcards, separated by commas", _hosts),
]
DatabaseUrl = Annotated[str, Rule(parse=_database_url)]
HttpUrl = Annotated[str, Rule("must be an http:// or https:// URL", _http_url)]
WebhookUrl = Annotated[str, Rule(parse=_webhook)]
Token = Annotated[
    str, Rule("must be 16 or more ASCII characters without spaces; make one: openssl rand -hex 32", _token)
]
Flag = Annotated[bool, Rule("must be 1 or 0", _flag)]
File = Annotated[str, Rule("must be a file that is there and may be read", _file)]
QueueUrl = Annotated[
    str,
    Rule("must be nats://host:4222 or tls://host:4222 of one or more servers, separated by commas", _queue_url),
]
Shards = Annotated[
    str,
    Rule(
        "must be name=URL of one or more databases, separated by spaces; a name is of small letters, digits and -, and "
        "stands once",
        _shards,
    ),
]
Quotas = Annotated[
    str,
    Rule(
        "must be tenant=records:N,runs:N,bytes:N of one or more tenants, separated by spaces, with one or more of the three; "
        "* stands for each other tenant",
        checked_text,
    ),
]
OtlpEndpoint = Annotated[
    str,
    Rule(
        "must be the root URL of a receiver of OTLP/HTTP, such as http://127.0.0.1:4318, without ?...", _otlp_endpoint
    ),
]
OtlpHeaders = Annotated[str, Rule("must be name=value pairs of ASCII, separated by commas", _otlp_headers)]
Interval = Annotated[float, Meta(ge=1, le=3600), Rule("must be seconds from 1 to 3600", _number)]
Replicas = Annotated[Literal[1, 3, 5], Rule("must be 1, 3 or 5", digits)]
QueueBytes = Annotated[int, Meta(ge=1 << 20), Rule("must be a whole number of 1048576 or more", digits)]
LogFormat = Annotated[Literal["text", "json"], Rule("must be one of text, json", str.lower)]
LogLevel = Annotated[
    Literal["error", "warning", "info", "debug"], Rule("must be one of error, warning, info, debug", str.lower)
]
Amount = Annotated[
    float,
    Meta(ge=0, le=sys.float_info.max),  # neither NaN nor Inf
    Rule("must be a number of 0 or more; 0 stands for no limit", _number),
]
Whole = Annotated[int, Meta(ge=0), Rule("must be a whole number of 0 or more; 0 stands for no limit", digits)]
