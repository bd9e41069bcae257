"""Where OTLP goes, and with which headers: how the texts of both settings are read."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def check_endpoint(text: str) -> str:
    """A root URL, without its last slash. Raises ValueError."""
    parts = urlsplit(text.strip())
    _ = parts.port
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError
    if any(c.isspace() or ord(c) < 32 for c in text.strip()):
        raise ValueError
    return text.strip().rstrip("/")


def header_pairs(text: str) -> dict[str, str]:
    """Header -> value of "name=value,name=value"; values may be percent-encoded. Raises ValueError."""
    found: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        name, equals, value = pair.partition("=")
        value = unquote(value.strip())
        if (
            not equals
            or not _NAME.fullmatch(name.strip())
            or not value
            or not value.isprintable()
            or not value.isascii()
        ):
            raise ValueError
        found[name.strip().lower()] = value
    return found
