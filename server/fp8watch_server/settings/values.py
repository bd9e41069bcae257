"""Types of settings: how a text is read, which values are taken, and what is said of others.

Upstream:   fp8watch_server.settings    Downstream: fp8watch_server.settings.webhook_url
Shapes:     text of the environment or the command line -> value

The bounds of a type are msgspec's; the rule, which names the remedy too, is in our own words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from fp8watch_server.db.dialect import parse_url
from fp8watch_server.settings.webhook_url import check_url


@dataclass(frozen=True)
class Text:
    """How a type is read from text.

    Args:
        rule: what is said where `parse` or the bounds of the type refuse a text.
        parse: text -> value. ValidationError stands for the rule; any other ValueError speaks for itself.
    """

    rule: str = ""
    parse: Callable[[str], Any] = str


def read(text: str, hint: Any) -> Any:
    """The value of a text, by the type of a setting.

    Raises:
        ValueError: the rule, with the remedy.
    """
    how = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Text)), Text())
    try:
        return msgspec.convert(how.parse(text), hint)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: a lone surrogate is no text to msgspec
        raise ValueError(how.rule) from None


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise msgspec.ValidationError
    return int(text)


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


def _file(text: str) -> str:
    if text and not Path(text).expanduser().is_file():
        raise msgspec.ValidationError
    return str(Path(text).expanduser()) if text else ""


Port = Annotated[int, Meta(ge=0, le=65535), Text("must be a whole number from 0 (any free port) to 65535", _digits)]
Host = Annotated[
    str,
    Meta(pattern=r"\A[^\s/@]+\Z"),
    Text("must be an address or a host name, such as 127.0.0.1 or 0.0.0.0"),
]
Hosts = Annotated[
    tuple[Annotated[str, Meta(pattern=r"\A[^\s/@*]+\Z")], ...],
    Text("must be host names without ports and wildcards, separated by commas", _hosts),
]
DatabaseUrl = Annotated[str, Text(parse=_database_url)]
HttpUrl = Annotated[str, Text("must be an http:// or https:// URL", _http_url)]
WebhookUrl = Annotated[str, Text(parse=_webhook)]
Token = Annotated[
    str, Text("must be 16 or more ASCII characters without spaces; make one: openssl rand -hex 32", _token)
]
Flag = Annotated[bool, Text("must be 1 or 0", _flag)]
File = Annotated[str, Text("must be a file that is there", _file)]
LogFormat = Annotated[Literal["text", "json"], Text("must be one of text, json", str.lower)]
LogLevel = Annotated[
    Literal["error", "warning", "info", "debug"], Text("must be one of error, warning, info, debug", str.lower)
]
Amount = Annotated[
    float,
    Meta(ge=0, le=sys.float_info.max),  # neither NaN nor Inf
    Text("must be a number of 0 or more; 0 stands for no limit", _number),
]
Whole = Annotated[int, Meta(ge=0), Text("must be a whole number of 0 or more; 0 stands for no limit", _digits)]
