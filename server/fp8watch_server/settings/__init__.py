"""Settings of the collector: one list, from which the command line, the checks and the docs are made.

Thread:     any; frozen data

A setting is a field of `Settings`, and nothing else. A secret may come from a file named by `<VARIABLE>_FILE`, and is
masked wherever settings are shown.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlsplit

from fp8watch_agent.checks import checked
from fp8watch_server.db import embedded
from fp8watch_server.db.dialect import DatabaseUrlError, parse_url
from fp8watch_server.settings import values as v
from fp8watch_server.settings.otlp_target import header_pairs


class SettingError(ValueError):
    """A setting that cannot work: where it came from, value, rule, remedy."""


def default_database_url(environ: Mapping[str, str] = os.environ) -> str:
    """An SQLite file in the user's data folder."""
    return f"sqlite:///{data_folder(environ) / 'fp8watch.db'}"


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's data folder."""
    home = environ.get("XDG_DATA_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "share")
    return Path(home) / "fp8watch"


def pg_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where `fp8watch serve --pg` keeps its PostgreSQL."""
    return (data_folder(environ) / "pg").expanduser().resolve()


@dataclass(frozen=True)
class Setting:
    """What stands beside a field of `Settings`; name, default and type are those of the field.

    Args:
        variable: the environment variable.
        help: what it is for, in one line.
        secret: never shown, and not on the command line.
        file: may come from <VARIABLE>_FILE, as every secret may.
    """

    variable: str
    help: str
    secret: bool = False
    file: bool = False
    name: str = ""
    default: Any = ""
    type: Any = str

    @property
    def variables(self) -> tuple[str, ...]:
        """Where it is read from."""
        return (self.variable, f"{self.variable}_FILE") if self.secret or self.file else (self.variable,)


@dataclass(frozen=True)
class Settings:
    """What the collector runs with."""

    database_url: Annotated[
        v.DatabaseUrl,
        Setting(
            "FP8WATCH_DATABASE_URL",
            "database, as a URL of SQLAlchemy: sqlite:////path or postgresql+psycopg://user:password@host/name; default: an "
            "SQLite file in the user's data folder",
            file=True,
        ),
    ]
    pg: Annotated[
        v.Flag,
        Setting(
            "FP8WATCH_PG",
            "start a PostgreSQL of its own in the user's data folder, and keep the database there; needs fp8watch[pg]",
        ),
    ] = False
    host: Annotated[v.Host, Setting("FP8WATCH_HOST", "address to listen on; beyond loopback a token is required")] = (
        "127.0.0.1"
    )
    port: Annotated[v.Port, Setting("FP8WATCH_PORT", "TCP port to listen on; 0 takes any free one")] = 8420
    public_url: Annotated[
        v.HttpUrl,
        Setting(
            "FP8WATCH_PUBLIC_URL",
            "address under which people reach the pages, for links in messages; default: the address listened on, "
            "of 0.0.0.0 the name of the machine",
        ),
    ] = ""
    slack_webhook_url: Annotated[
        v.WebhookUrl,
        Setting(
            "FP8WATCH_SLACK_WEBHOOK_URL",
            "Slack incoming webhook that incidents are sent to; none: no messages",
            secret=True,
        ),
    ] = ""
    webhook_url: Annotated[
        v.WebhookUrl,
        Setting(
            "FP8WATCH_WEBHOOK_URL",
            "receiver of Alertmanager's webhook body that incidents are sent to; none: no messages",
            secret=True,
        ),
    ] = ""
    webhook_secret: Annotated[
        str,
        Setting(
            "FP8WATCH_WEBHOOK_SECRET",
            "key that messages to FP8WATCH_WEBHOOK_URL are signed with (HMAC-SHA256); none: not signed",
            secret=True,
        ),
    ] = ""
    routes: Annotated[v.File, Setting("FP8WATCH_ROUTES", "channels and routes of messages, as a TOML or JSON file")] = (
        ""
    )
    token: Annotated[
        v.Token,
        Setting(
            "FP8WATCH_TOKEN",
            "token that agents and readers must send as Authorization: Bearer; none: open, on loopback only",
            secret=True,
        ),
    ] = ""
    insecure: Annotated[v.Flag, Setting("FP8WATCH_INSECURE", "listen beyond loopback without any token")] = False
    hosts: Annotated[
        v.Hosts,
        Setting(
            "FP8WATCH_HOSTS",
            "names, separated by commas, that a collector without tokens answers to beside localhost and the public URL's",
        ),
    ] = ()
    tls_cert: Annotated[
        v.File, Setting("FP8WATCH_TLS_CERT", "certificate chain as a PEM file: serve https; needs the key")
    ] = ""
    tls_key: Annotated[v.File, Setting("FP8WATCH_TLS_KEY", "private key of the certificate as a PEM file")] = ""
    rules: Annotated[v.File, Setting("FP8WATCH_RULES", "thresholds of the detectors, as a TOML or JSON file")] = ""
    log_format: Annotated[v.LogFormat, Setting("FP8WATCH_LOG_FORMAT", "text, or json: one object a line")] = "text"
    log_level: Annotated[
        v.LogLevel,
        Setting("FP8WATCH_LOG_LEVEL", "error, warning, info (one line for each request) or debug"),
    ] = "warning"
    detail_hours: Annotated[
        v.Amount,
        Setting(
            "FP8WATCH_DETAIL_HOURS",
            "hours for which the blocks of every single rank are kept beside their roll-up; 0: for good",
        ),
    ] = 24.0
    keep_days: Annotated[
        v.Amount, Setting("FP8WATCH_KEEP_DAYS", "days for which a run's blocks are kept; 0: for good")
    ] = 0.0
    keep_steps: Annotated[
        v.Whole, Setting("FP8WATCH_KEEP_STEPS", "newest steps of a run of which blocks are kept; 0: all")
    ] = 0
    keep_bytes: Annotated[v.Whole, Setting("FP8WATCH_KEEP_BYTES", "bytes of blocks that are kept of a run; 0: all")] = 0

    queue: Annotated[
        v.QueueUrl,
        Setting(
            "FP8WATCH_QUEUE",
            "NATS servers with JetStream, separated by commas: batches are accepted into a queue, and fp8watch worker commits "
            "them; needs PostgreSQL and fp8watch[nats]; none: batches are committed at once",
            file=True,
        ),
    ] = ""
    queue_replicas: Annotated[
        v.Replicas, Setting("FP8WATCH_QUEUE_REPLICAS", "NATS servers that keep each batch of the queue: 1, 3 or 5")
    ] = 3
    queue_bytes: Annotated[
        v.QueueBytes,
        Setting(
            "FP8WATCH_QUEUE_BYTES",
            "bytes that the queue may hold on each of its servers; an eighth of them is for batches with non-finite values",
        ),
    ] = 4 << 30

    otlp_endpoint: Annotated[
        v.OtlpEndpoint,
        Setting(
            "FP8WATCH_OTLP_ENDPOINT",
            "root URL of a receiver of OTLP/HTTP, such as http://127.0.0.1:4318, that metrics and incidents are exported to; "
            "needs fp8watch[otlp]; none: off",
            secret=True,
        ),
    ] = ""
    otlp_headers: Annotated[
        v.OtlpHeaders,
        Setting(
            "FP8WATCH_OTLP_HEADERS",
            "headers of these exports, as name=value separated by commas, beside those of OTEL_EXPORTER_OTLP_HEADERS",
            secret=True,
        ),
    ] = ""
    otlp_interval: Annotated[
        v.Interval, Setting("FP8WATCH_OTLP_INTERVAL", "seconds from one export of metrics to the next")
    ] = 15.0
    shards: Annotated[
        v.Shards,
        Setting(
            "FP8WATCH_SHARDS",
            "further databases that new runs are spread over, as name=URL separated by spaces; none: all runs lie in "
            "FP8WATCH_DATABASE_URL",
            secret=True,
        ),
    ] = ""

    quotas: Annotated[
        v.Quotas,
        Setting(
            "FP8WATCH_QUOTAS",
            "what the tokens of a tenant may bring in: tenant=records:N,runs:N,bytes:N separated by spaces (records a second and "
            "collector, runs, bytes stored); * is each other tenant; none: no limits",
        ),
    ] = ""

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
        if values["pg"] and values["database_url"]:
            raise SettingError("FP8WATCH_PG is set together with a database URL; keep one of them")
        if values["pg"]:
            values["database_url"] = embedded.url_of(pg_folder(environ), embedded.DATABASE)
        values["database_url"] = values["database_url"] or default_database_url(environ)
        if values["queue"] and parse_url(values["database_url"]).get_backend_name() != "postgresql":
            raise SettingError(
                "FP8WATCH_QUEUE is set with an SQLite database; workers and collectors share a PostgreSQL: set "
                "FP8WATCH_DATABASE_URL to one, or unset FP8WATCH_QUEUE"
            )
        settings = cls(**values)
        on_files = [n for n, url in settings.shard_urls.items() if parse_url(url).get_backend_name() != "postgresql"]
        if settings.queue and on_files:
            raise SettingError(
                f"FP8WATCH_QUEUE is set, and shards {', '.join(on_files)} of FP8WATCH_SHARDS are SQLite; workers and collectors "
                "share a PostgreSQL: name one, or unset FP8WATCH_QUEUE"
            )
        if values["otlp_headers"] and not values["otlp_endpoint"]:
            raise SettingError(
                "FP8WATCH_OTLP_HEADERS is set without FP8WATCH_OTLP_ENDPOINT, and nothing is exported; set both, or neither"
            )
        if bool(values["tls_cert"]) != bool(values["tls_key"]):
            given = "FP8WATCH_TLS_CERT" if values["tls_cert"] else "FP8WATCH_TLS_KEY"
            raise SettingError(f"{given} is set alone; https needs the certificate and its key: set both, or neither")
        return settings

    @property
    def shard_urls(self) -> dict[str, str]:
        """Name -> URL of each shard."""
        return {name: url for name, _, url in (word.partition("=") for word in self.shards.split())}

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be shown."""
        password = parse_url(self.database_url).password
        found = [getattr(self, s.name) for s in SETTINGS if s.secret] + [str(password or "")]
        found += [str(parse_url(url).password or "") for url in self.shard_urls.values()]
        found += header_pairs(self.otlp_headers).values()
        for server in self.queue.split(","):
            parts = urlsplit(server)
            found += [parts.password or "", "" if parts.password else parts.username or ""]  # a user alone is a token
        return tuple(sorted((value for value in found if value), key=len, reverse=True))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the collector: a public URL of another name is a proxy's."""
        public = urlsplit(self.public_url).hostname
        return _is_loopback(self.host) and (public is None or _is_loopback(public))

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={'***' if _BY_NAME[f.name].secret and getattr(self, f.name) else repr(getattr(self, f.name))}"
            for f in fields(self)
        ]
        return f"Settings({', '.join(shown)})"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _listed() -> tuple[Setting, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    found = []
    for f in fields(Settings):
        (row,) = (m for m in hints[f.name].__metadata__ if isinstance(m, Setting))
        found.append(replace(row, name=f.name, default="" if f.default is MISSING else f.default, type=hints[f.name]))
    return tuple(found)


SETTINGS = _listed()
"""Every setting, in the order of the fields."""
_BY_NAME = {s.name: s for s in SETTINGS}


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
        return checked(given, s.type)
    except DatabaseUrlError as e:
        raise SettingError(f"{source}: {e}") from e
    except ValueError as e:
        shown = "(not shown)" if s.secret or "@" in given else repr(given)  # of a URL with a password
        raise SettingError(f"{source}={shown}: {e}") from e
