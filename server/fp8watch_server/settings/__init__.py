"""Settings of the collector: one table, from which the command line, the checks and the docs are made.

Upstream:   fp8watch_server.cli    Downstream: fp8watch_server.app
Thread:     any; frozen data

A secret may come from a file named by `<VARIABLE>_FILE`, and is masked wherever settings are shown.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fp8watch_server.db.dialect import DatabaseUrlError, parse_url
from fp8watch_server.settings.webhook_url import check_url


class SettingError(ValueError):
    """A setting that cannot work: where it came from, value, rule, remedy."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    variable: str
    default: Any
    help: str
    parse: Callable[[str], Any]
    secret: bool = False
    file: bool = False  # may come from <VARIABLE>_FILE, as every secret may

    @property
    def variables(self) -> tuple[str, ...]:
        """Where it is read from."""
        return (self.variable, f"{self.variable}_FILE") if self.secret or self.file else (self.variable,)


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise ValueError("must be a whole number from 0 (any free port) to 65535")
    return port


def _host(text: str) -> str:
    if not text or any(c.isspace() or c in "/@" for c in text):
        raise ValueError("must be an address or a host name, such as 127.0.0.1 or 0.0.0.0")
    return text


def _database_url(text: str) -> str:
    parse_url(text)
    return text


def _http_url(text: str) -> str:
    if text == "":
        return ""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    return text.rstrip("/")


def _webhook(text: str) -> str:
    if text:
        check_url(text)
    return text.strip()  # every other character of it may be part of the secret


def _token(text: str) -> str:
    if text and (len(text) < 16 or not text.isascii() or any(c.isspace() for c in text)):
        raise ValueError("must be 16 or more ASCII characters without spaces; make one: openssl rand -hex 32")
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true", ""):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true")


def _hosts(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if any(c.isspace() or c in "/@*" for name in names for c in name):
        raise ValueError("must be host names without ports and wildcards, separated by commas")
    return names


def _file(text: str) -> str:
    if text and not Path(text).expanduser().is_file():
        raise ValueError("must be a file that is there")
    return str(Path(text).expanduser()) if text else ""


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return text.lower()

    return parse


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("must be a number of 0 or more; 0 stands for no limit")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError("must be a whole number of 0 or more; 0 stands for no limit")
    return int(text)


def default_database_url(environ: Mapping[str, str] = os.environ) -> str:
    """An SQLite file in the user's data folder."""
    home = environ.get("XDG_DATA_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "share")
    return f"sqlite:///{Path(home) / 'fp8watch' / 'fp8watch.db'}"


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "database_url",
        "FP8WATCH_DATABASE_URL",
        "",
        "database, as a URL of SQLAlchemy: sqlite:////path or postgresql+psycopg://user:password@host/name; default: an "
        "SQLite file in the user's data folder",
        _database_url,
        file=True,
    ),
    Setting("host", "FP8WATCH_HOST", "127.0.0.1", "address to listen on; beyond loopback a token is required", _host),
    Setting("port", "FP8WATCH_PORT", 8420, "TCP port to listen on; 0 takes any free one", _port),
    Setting(
        "public_url",
        "FP8WATCH_PUBLIC_URL",
        "",
        "address under which people reach the pages, for links in messages; default: the address listened on",
        _http_url,
    ),
    Setting(
        "slack_webhook_url",
        "FP8WATCH_SLACK_WEBHOOK_URL",
        "",
        "Slack incoming webhook that incidents are sent to; none: no messages",
        _webhook,
        secret=True,
    ),
    Setting(
        "webhook_url",
        "FP8WATCH_WEBHOOK_URL",
        "",
        "receiver of Alertmanager's webhook body that incidents are sent to; none: no messages",
        _webhook,
        secret=True,
    ),
    Setting(
        "webhook_secret",
        "FP8WATCH_WEBHOOK_SECRET",
        "",
        "key that messages to FP8WATCH_WEBHOOK_URL are signed with (HMAC-SHA256); none: not signed",
        str,
        secret=True,
    ),
    Setting("routes", "FP8WATCH_ROUTES", "", "channels and routes of messages, as a TOML or JSON file", _file),
    Setting(
        "token",
        "FP8WATCH_TOKEN",
        "",
        "token that agents and readers must send as Authorization: Bearer; none: open, on loopback only",
        _token,
        secret=True,
    ),
    Setting("insecure", "FP8WATCH_INSECURE", False, "listen beyond loopback without any token", _flag),
    Setting(
        "hosts",
        "FP8WATCH_HOSTS",
        (),
        "names, separated by commas, that a collector without tokens answers to beside localhost and the public URL's",
        _hosts,
    ),
    Setting("tls_cert", "FP8WATCH_TLS_CERT", "", "certificate chain as a PEM file: serve https; needs the key", _file),
    Setting("tls_key", "FP8WATCH_TLS_KEY", "", "private key of the certificate as a PEM file", _file),
    Setting("rules", "FP8WATCH_RULES", "", "thresholds of the detectors, as a TOML or JSON file", _file),
    Setting("log_format", "FP8WATCH_LOG_FORMAT", "text", "text, or json: one object a line", _one_of("text", "json")),
    Setting(
        "log_level",
        "FP8WATCH_LOG_LEVEL",
        "warning",
        "error, warning, info (one line for each request) or debug",
        _one_of("error", "warning", "info", "debug"),
    ),
    Setting(
        "detail_hours",
        "FP8WATCH_DETAIL_HOURS",
        24.0,
        "hours for which the blocks of every single rank are kept beside their roll-up; 0: for good",
        _amount,
    ),
    Setting("keep_days", "FP8WATCH_KEEP_DAYS", 0.0, "days for which a run's blocks are kept; 0: for good", _amount),
    Setting("keep_steps", "FP8WATCH_KEEP_STEPS", 0, "newest steps of a run of which blocks are kept; 0: all", _whole),
    Setting("keep_bytes", "FP8WATCH_KEEP_BYTES", 0, "bytes of blocks that are kept of a run; 0: all", _whole),
)
_BY_NAME = {s.name: s for s in SETTINGS}


@dataclass(frozen=True)
class Settings:
    """What the collector runs with. Field by field described in SETTINGS."""

    database_url: str
    host: str = "127.0.0.1"
    port: int = 8420
    public_url: str = ""
    slack_webhook_url: str = ""
    webhook_url: str = ""
    webhook_secret: str = ""
    routes: str = ""
    token: str = ""
    insecure: bool = False
    hosts: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    rules: str = ""
    log_format: str = "text"
    log_level: str = "warning"
    detail_hours: float = 24.0
    keep_days: float = 0.0
    keep_steps: int = 0
    keep_bytes: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ, **overrides: Any) -> Settings:
        """Read the environment; `overrides` (the command line) win, None standing for "not given".

        Raises:
            SettingError: variable, value, rule and remedy.
        """
        unknown = set(overrides) - set(_BY_NAME)
        if unknown:
            raise SettingError(f"unknown settings {sorted(unknown)}; known are {sorted(_BY_NAME)}")
        values: dict[str, Any] = {}
        for s in SETTINGS:
            given, source = overrides.get(s.name), f"--{s.name.replace('_', '-')}"
            if given is None:
                given, source = _from_environ(s, environ)
            values[s.name] = s.default if given is None else _checked(s, given, source)
        values["database_url"] = values["database_url"] or default_database_url(environ)
        if bool(values["tls_cert"]) != bool(values["tls_key"]):
            given = "FP8WATCH_TLS_CERT" if values["tls_cert"] else "FP8WATCH_TLS_KEY"
            raise SettingError(f"{given} is set alone; https needs the certificate and its key: set both, or neither")
        return cls(**values)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be shown."""
        password = parse_url(self.database_url).password
        found = [getattr(self, s.name) for s in SETTINGS if s.secret] + [str(password or "")]
        return tuple(sorted((value for value in found if value), key=len, reverse=True))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the collector."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={'***' if _BY_NAME[f.name].secret and getattr(self, f.name) else repr(getattr(self, f.name))}"
            for f in fields(self)
        ]
        return f"Settings({', '.join(shown)})"


def _from_environ(s: Setting, environ: Mapping[str, str]) -> tuple[str | None, str]:
    value, path = environ.get(s.variable), environ.get(f"{s.variable}_FILE") if len(s.variables) > 1 else None
    if path is None:
        return (None if value is None or value == "" else value), s.variable
    source = f"{s.variable}_FILE"
    if value:
        raise SettingError(f"{s.variable} and {source} are both set; keep one of them")
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise SettingError(f"{source}={path!r} cannot be read ({e}); name a readable file with the value in it") from e
    if not value:  # a token that is not there must not become a collector that is open
        raise SettingError(f"{source}={path!r} is empty; write the value into it, or unset {source}")
    return value, source


def _checked(s: Setting, given: Any, source: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return s.parse(given)
    except DatabaseUrlError as e:
        raise SettingError(f"{source}: {e}") from e
    except ValueError as e:
        shown = "(not shown)" if s.secret else repr(given)
        raise SettingError(f"{source}={shown}: {e}") from e
