"""`fp8watch serve`: the collector in the foreground.

Thread:     main

The command line is made from the table of settings; a flag wins over its variable.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError

from fp8watch_server.app import create_app
from fp8watch_server.db import embedded
from fp8watch_server.db.dialect import parse_url
from fp8watch_server.db.migrations import UnknownRevision
from fp8watch_server.http import logs
from fp8watch_server.http.connections import LIMITS
from fp8watch_server.http.server import Server, limits_within, raise_descriptor_limit
from fp8watch_server.settings import SETTINGS, SettingError, Settings, default_database_url, pg_folder

DRAIN_S = 10
EXIT_USAGE = 2

_log = logging.getLogger(__name__)


class CannotServe(Exception):
    """Why the collector does not start, in one line with the remedy."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="fp8watch serve",
        description="Take batches in, detect failures, show pages. Every option can be set by its variable too.",
    )
    for s in SETTINGS:
        flag = f"--{s.name.replace('_', '-')}"
        default = default_database_url() if s.name == "database_url" else s.default
        shown = f" (default: {default})" if default not in ("", False, ()) else ""
        text = f"{s.help}{shown} [{' or '.join(s.variables)}]"
        text = text.replace("%", "%%")
        if s.secret:
            continue  # a secret on a command line is seen by everyone on the machine
        if isinstance(s.default, bool):
            made.add_argument(flag, action="store_true", default=None, help=text)
        else:
            made.add_argument(flag, default=None, help=text)
    made.epilog = "Secrets come from the environment or from files: " + "; ".join(
        f"{s.variable} ({s.help})" for s in SETTINGS if s.secret
    )
    return made


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, made as TCP by name: asyncio sends small answers at once only on such a one.

    Raises:
        CannotServe: the port is taken, or the address is not ours.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as e:
        raise CannotServe(f"host {host!r} is no address of this machine ({e}); use 127.0.0.1 or 0.0.0.0") from e
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as e:
        made.close()
        if e.errno == errno.EADDRINUSE:
            raise CannotServe(
                f"port {port} on {host} is in use; stop what listens there, or choose another: "
                "--port 0 takes any free one"
            ) from e
        raise CannotServe(f"cannot listen on {host}:{port}: {e.strerror}; choose another") from e
    return made


def url_of(sock: socket.socket, host: str, scheme: str = "http") -> str:
    """The URL under which a socket is reached from here."""
    port = sock.getsockname()[1]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tell_of_links(settings: Settings, url: str) -> None:
    """Warn where links in messages lead to a name that nobody else may know."""
    if not settings.public_url and settings.host in ("0.0.0.0", "::"):
        _log.warning("links in messages lead to %s; set FP8WATCH_PUBLIC_URL to what people type", url)


def build(settings: Settings) -> FastAPI:
    """The application.

    Raises:
        CannotServe: the database cannot be opened, or the settings do not go together.
    """
    try:
        return create_app(settings)
    except (UnknownRevision, ValueError) as e:  # of settings, targets of messages, or both together
        raise CannotServe(str(e)) from e
    except DBAPIError as e:
        shown = parse_url(settings.database_url).render_as_string(hide_password=True)
        raise CannotServe(
            f"database {shown} cannot be opened ({str(e.orig).splitlines()[0] if e.orig else e}); "
            "check that its folder can be written and that the server runs, or name another with --database-url"
        ) from e


def check_tls(settings: Settings) -> None:
    """Raise CannotServe where certificate and key are none, or not of each other."""
    if not settings.tls_cert:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as e:  # of ssl too
        raise CannotServe(
            f"FP8WATCH_TLS_CERT={settings.tls_cert!r} and FP8WATCH_TLS_KEY={settings.tls_key!r} do not serve "
            f"({getattr(e, 'reason', None) or e}); give a certificate chain and its own key, both as PEM without a password"
        ) from e


def main(argv: list[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM, then drain for at most DRAIN_S seconds."""
    args: dict[str, Any] = vars(parser().parse_args(argv))
    try:
        settings = Settings.from_environ(**args)
        if settings.pg:
            embedded.refuse_private(pg_folder(), os.geteuid() == 0)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # its server is stopped at exit
            settings = replace(settings, database_url=embedded.start(pg_folder()))
        check_tls(settings)
        logs.set_up(settings)
        sock = listen(settings.host, settings.port)
        try:
            url = url_of(sock, settings.host, "https" if settings.tls_cert else "http")
            app = build(replace(settings, public_url=settings.public_url or url))
            tell_of_links(settings, url)
            database = parse_url(settings.database_url).render_as_string(hide_password=True)
            server = Server(
                app,
                limits=limits_within(raise_descriptor_limit(), LIMITS),
                on_started=lambda: print(f"fp8watch collector: {url} (database {database})", flush=True),
                timeout_graceful_shutdown=DRAIN_S,
                lifespan="on",
                ssl_certfile=settings.tls_cert or None,
                ssl_keyfile=settings.tls_key or None,
            )
            server.run(sockets=[sock])
            return 0 if server.started else 1
        finally:
            sock.close()
    except (CannotServe, SettingError, embedded.EmbeddedError) as e:
        print(f"fp8watch serve: {e}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 0
