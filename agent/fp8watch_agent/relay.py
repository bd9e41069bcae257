"""`fp8watch relay`: takes the batches of a host's ranks, keeps them on disk, and sends them on together.

Upstream:   fp8watch_agent.transport (HTTP)
Downstream: fp8watch_agent.relay_journals
Shapes:     the collector's ingest interface -> the journal; an answer of 200 means written to disk
Thread:     one a connection

Agents take it for a collector: FP8WATCH_COLLECTOR=http://127.0.0.1:8421. It listens on loopback only, and asks for the token
that it was given itself.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hmac
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from fp8watch_agent.batch import Kind
from fp8watch_agent.relay_collectors import Collectors, read_collectors
from fp8watch_agent.relay_express import Express
from fp8watch_agent.relay_forward import Forwarder
from fp8watch_agent.relay_journals import Journals
from fp8watch_agent.relay_sessions import Sessions
from fp8watch_agent.settings import AgentSettings, read_token_file
from fp8watch_agent.transport import SESSION_KEY
from fp8watch_agent.uploader import Told
from fp8watch_agent.urgency import is_urgent
from fp8watch_agent.wire import (
    BATCH_CONTENT_TYPE,
    MAX_WIRE_BYTES,
    TILE_MAPS_CONTENT_TYPE,
    TooLarge,
    WireError,
    decode_batch,
    decode_tile_maps,
)

log = logging.getLogger("fp8watch.relay")

PORT = 8421
STOP_S = 10.0
IDLE_S = 30.0
MAX_JSON_BYTES = 4 << 20
_KINDS = {"/v1/batches": (Kind.BATCH, BATCH_CONTENT_TYPE), "/v1/tile-maps": (Kind.MAPS, TILE_MAPS_CONTENT_TYPE)}


class _Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, error: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.error, self.detail, self.retry_after_s = status, error, detail, retry_after_s


class Relay:
    """One relay: a folder, a listening server, and what forwards.

    Args:
        settings: token, folder.
        collectors: URLs, the preferred one first.
        max_bytes: of bodies that wait.
        join_s: how long the first batch of a request waits for others.
        port: to listen on; 0 takes any.
    """

    def __init__(
        self, settings: AgentSettings, collectors: Sequence[str], *, max_bytes: int, join_s: float, port: int = PORT
    ) -> None:
        self.directory = settings.spool_dir / "relay"
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._settings = settings
        self.journals = Journals(self.directory, max_bytes)
        self.sessions = Sessions(self.directory, self.journals.sessions)
        self.collectors, told = Collectors(settings, collectors), Told()
        self.forwarder = Forwarder(self.journals, self.sessions, self.collectors, told, self.directory, join_s)
        self.express = Express(self.journals, self.sessions, self.collectors, told)
        self.num_taken = 0
        relay = self

        class Handler(_Handler):
            owner = relay

        self.server = _Server(("127.0.0.1", port), Handler)
        self._serving = threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True)

    @property
    def url(self) -> str:
        """Where agents reach it."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def start(self) -> None:
        """Listen and forward."""
        self.collectors.start()
        self.express.start()
        self.forwarder.start()
        self._serving.start()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Take nothing more, deliver what can be delivered in this time, and end."""
        self.server.shutdown()
        self.server.server_close()
        self.express.stop()
        self.forwarder.stop(timeout_s)
        self.collectors.stop()
        self.journals.close()

    def admits(self, given: str) -> bool:
        """Whether an Authorization header is that of the relay's own token; without one anybody on this host may send."""
        token = self._settings.token
        if self._settings.token_file is not None:
            with contextlib.suppress(ValueError):
                token = read_token_file(self._settings.token_file)
        return token is None or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def put(self, path: str, key: str, body: bytes) -> dict[str, Any]:
        """A registration."""
        parts = [unquote(part) for part in path.removeprefix("/v1/runs/").split("/")]
        try:
            if len(parts) == 1:
                self.sessions.put_run(parts[0], body)
            elif len(parts) == 3 and parts[1] == "sessions":
                self.sessions.put_session(parts[0], parts[2], key, body)
            elif len(parts) == 2 and parts[1] == "sites":
                if not self.sessions.put_sites(key, body):
                    raise _Refused(424, "unknown-session", "register the session first")
            else:
                raise _Refused(404, "no-route", path)
        except PermissionError as e:
            raise _Refused(403, "session-key", "the session was registered with another key") from e
        except (msgspec.MsgspecError, ValueError, TypeError) as e:
            raise _Refused(422, "refused", str(e)) from e
        return {"run": parts[0]}

    def post(self, kind: Kind, key: str, body: bytes) -> dict[str, Any]:
        """A body: checked, written to disk, acknowledged."""
        try:
            if kind is Kind.BATCH:
                batch = decode_batch(body)
                header, urgent = batch.header, is_urgent(batch)
                session, seq, amount = header.session, header.seq, header.num_records
            else:
                maps = decode_tile_maps(body)
                session, seq, amount, urgent = maps.session, maps.seq, len(maps.maps), False
        except TooLarge as e:
            raise _Refused(413, "too-large", str(e)) from e
        except (WireError, ValueError, TypeError, OverflowError) as e:
            raise _Refused(422, "refused", str(e)) from e
        known = self.sessions.of(session)
        if known is None:
            raise _Refused(424, "unknown-session", "register run, session and sites, and send the same again")
        if known.session.key != key:
            raise _Refused(403, "session-key", "the session was registered with another key")
        held = session in self.forwarder.holds
        entry = self.journals.append(kind, session, seq, amount, body, urgent=urgent, held=held)
        if urgent:
            self.express.add(entry)
        self.num_taken += 1
        answer: dict[str, Any] = {"acked": seq}
        captures = self.sessions.captures(session)
        return answer if captures is None or kind is not Kind.BATCH else answer | {"captures": captures}

    def health(self) -> dict[str, Any]:
        """What it has done since it was started, and what waits."""
        f = self.forwarder
        return {
            "taken": self.num_taken,
            "delivered": f.num_delivered,
            "refused": f.num_refused,
            "requests": f.num_requests,
            "express": self.express.num_delivered,
            "waiting": self.journals.num_waiting,
            "waiting_bytes": self.journals.num_bytes,
            "damaged_bytes": self.journals.num_damaged_bytes,
            "held_sessions": len(f.holds),
            "away": self.collectors.away(),
            "problem": f.problem,
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of the relay."""
        log.debug("connection of %s ended", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    owner: Relay

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def do_GET(self) -> None:
        """/healthz."""
        if self.path != "/healthz":
            self._answer(404, {"error": "no-route"})
            return
        self._answer(200, self.owner.health())

    def do_PUT(self) -> None:
        """Registrations."""
        self._handle(lambda key: self.owner.put(self.path, key, self._body(MAX_JSON_BYTES)))

    def do_POST(self) -> None:
        """Bodies."""
        kind, content_type = _KINDS.get(self.path, (None, ""))

        def take(key: str) -> dict[str, Any]:
            body = self._body(MAX_WIRE_BYTES)
            if kind is None:
                raise _Refused(404, "no-route", self.path)
            if self.headers.get("Content-Type", "") != content_type or self.headers.get("Content-Encoding") != "zstd":
                raise _Refused(415, "refused", f"Content-Type is {content_type}, Content-Encoding is zstd")
            return self.owner.post(kind, key, body)

        self._handle(take)

    def _handle(self, work: Any) -> None:
        try:
            if not self.owner.admits(self.headers.get("Authorization", "")):
                self._body(MAX_WIRE_BYTES)
                raise _Refused(401, "token", "the relay was started with another token")
            self._answer(200, work(self.headers.get(SESSION_KEY, "")))
        except _Refused as e:
            self._answer(e.status, {"error": e.error, "detail": e.detail}, e.retry_after_s)
        except OSError as e:
            if self.close_connection:
                return
            log.warning("nothing can be written (%s)", e)
            self._answer(503, {"error": "no-room", "detail": str(e)}, 5.0)

    def _body(self, limit: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 12):
            self.close_connection = True
            raise _Refused(411, "refused", "Content-Length is given")
        if int(length) > limit:
            self.close_connection = True
            raise _Refused(413, "too-large", f"at most {limit} bytes")
        try:
            body = self.rfile.read(int(length))
        except OSError:
            self.close_connection = True
            raise
        if len(body) != int(length):
            self.close_connection = True
            raise _Refused(400, "refused", "the body ended early")
        return body

    def _answer(self, status: int, value: dict[str, Any], retry_after_s: float | None = None) -> None:
        raw = msgspec.json.encode(value)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if retry_after_s is not None:
            self.send_header("Retry-After", f"{retry_after_s:g}")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(directory / "relay.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def main(argv: list[str]) -> int:
    """Entry point of `fp8watch relay`. Exit status: 0 told to stop, 1 something still waits on disk, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="fp8watch relay", description="Take the batches of this host's ranks, and send them on together."
    )
    parser.add_argument(
        "--collector", help="URLs of collectors, separated by commas, the preferred one first (FP8WATCH_COLLECTOR)"
    )
    parser.add_argument("--spool-dir", help="folder; what waits lies in relay/ (FP8WATCH_SPOOL_DIR)")
    parser.add_argument("--port", type=int, default=PORT, help=f"TCP port on 127.0.0.1; 0 takes any ({PORT})")
    parser.add_argument("--join", type=float, default=0.5, metavar="S", help="wait for other ranks so long (0.5)")
    parser.add_argument("--max-mib", type=int, default=1024, help="of bodies that wait on disk (1024)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="fp8watch relay: %(message)s")
    try:
        if not 0 <= args.join <= 10:
            raise ValueError(f"--join={args.join}: must be from 0 to 10; give seconds, such as 0.5")
        if not 0 <= args.port <= 65535:
            raise ValueError(f"--port={args.port}: must be from 0 (any free port) to 65535")
        if args.max_mib < 32:
            raise ValueError(f"--max-mib={args.max_mib}: must be 32 or more; give mebibytes, such as 1024")
        environ = dict(os.environ)
        text, source = environ.pop("FP8WATCH_COLLECTOR", ""), "FP8WATCH_COLLECTOR"
        if args.collector is not None:
            text, source = args.collector, "--collector"
        if not text:
            raise ValueError("--collector=None: a relay needs a collector; give its URL, or set FP8WATCH_COLLECTOR")
        collectors = read_collectors(text, source)
        settings = AgentSettings.from_environ(environ, spool_dir=args.spool_dir)
        with _locked(settings.spool_dir / "relay") as ours:
            if not ours:
                print(f"another `fp8watch relay` is at work in {settings.spool_dir}", file=sys.stderr)
                return 1
            relay = Relay(settings, collectors, max_bytes=args.max_mib << 20, join_s=args.join, port=args.port)
            return _serve(relay)
    except (ValueError, OSError) as e:
        print(f"fp8watch relay: {e}", file=sys.stderr)
        return 2


def _serve(relay: Relay) -> int:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    relay.start()
    print(f"fp8watch relay on {relay.url} ({relay.journals.num_waiting} bodies wait)", flush=True)
    stop.wait()
    relay.stop()
    left = relay.journals.num_waiting
    if left:
        print(f"{left} bodies wait in {relay.directory}: they are sent when the relay is started again", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
