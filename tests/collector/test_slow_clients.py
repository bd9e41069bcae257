"""One hostile connection stops nobody: headers and silence have limits, and connections leave descriptors for others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from collector.kit import Agent, Serving, make_site, served

from fp8watch_server.http.connections import LIMITS, ConnectionLimits, Connections, Stage
from fp8watch_server.http.server import Server, limits_within

SITE = make_site()
QUICK = ConnectionLimits(header_s=0.5, idle_s=0.5, linger_s=0.3)
SOON_S = 30.0
"""Thirty times what is promised of /healthz: the machine may be busy. What this is about takes minutes, or does not end."""
NUM_DESCRIPTORS = 256
NUM_ENDLESS = 200


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture(scope="module")
def quick() -> Iterator[str]:
    """A server with quick limits, and an application that says how much of a body came."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size = 0
        while scope["path"] != "/unread":
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
        await send(start)
        if scope["path"] == "/stream":
            for _ in range(15):
                await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
                await asyncio.sleep(0.1)
        if scope["path"] == "/endless":
            for _ in range(NUM_ENDLESS):  # more than any buffer holds; what comes after the end costs nothing
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            return
        await send({"type": "http.response.body", "body": b"%d" % size})

    with served(app, limits=QUICK) as url:
        yield url


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), parts.port or 80), timeout=20)


def answer_of(sock: socket.socket) -> bytes:
    """Everything until the end of the connection, which must come."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            got += piece
    return got


def asked(url: str, request: bytes) -> bytes:
    with connect(url) as sock:
        sock.sendall(request)
        return answer_of(sock)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


class Watch:
    """Somebody else, who asks /healthz again and again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.worst_s = 0.0
        self.statuses: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            try:
                self.statuses.append(httpx.get(f"{self.url}/healthz", timeout=60, verify=False).status_code)
            except httpx.HTTPError:
                self.statuses.append(0)
            self.worst_s = max(self.worst_s, time.perf_counter() - began)
            self._over.wait(0.02)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(70)

    def assert_unharmed(self) -> None:
        print(f"{len(self.statuses)} times /healthz, the slowest took {self.worst_s:.2f} s")
        assert set(self.statuses) == {200}
        assert self.worst_s < SOON_S


def test_the_limits_are_those_that_are_promised() -> None:
    assert (LIMITS.max_header_bytes, LIMITS.header_s, LIMITS.idle_s) == (64 << 10, 10.0, 10.0)
    assert limits_within(None) == LIMITS
    for num in (16, 64, 256, 1024, 4096, 1 << 20):
        left = num - limits_within(num).max_connections
        assert left >= min(256, num // 2), "descriptors for the database"
    assert limits_within(1024).max_connections >= 512


HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
ENDLESS = {
    "a value": (HEAD + b"X-A: ", b"a" * 4096),
    "a name": (HEAD, b"a" * 4096),
    "a path": (b"GET /", b"a" * 4096),
    "lines": (HEAD, b"a: b\r\n" * 500),
    "empty lines": (b"", b"\r\n" * 2048),
    "a trailer": (
        b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-A: ",
        b"a" * 4096,
    ),
    "a size of a chunk": (
        b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"a" * 4096,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_header_without_end_is_refused_at_its_limit(quick: str, what: str) -> None:
    begin, more = ENDLESS[what]
    sent = 0
    with connect(quick) as sock:
        sock.sendall(begin)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 2 << 20:
                sock.sendall(more)
                sent += len(more)
                time.sleep(0.002)
                sock.setblocking(False)
                try:
                    first = sock.recv(1 << 16)
                    break
                except BlockingIOError:
                    continue
                finally:
                    sock.settimeout(20)
            else:
                pytest.fail(f"{sent} bytes were taken")
    assert status_of(first) == 431
    assert b"connection: close" in first.lower()
    assert b"65536 bytes" in first
    assert sent >= 60 << 10 or what == "lines"


def test_a_header_without_end_stops_nobody(quick: str) -> None:
    with Watch(quick) as watch, connect(quick) as sock, contextlib.suppress(OSError):
        sock.sendall(HEAD + b"X-A: ")
        for _ in range(40):
            sock.sendall(b"a" * 1_000_000)
    watch.assert_unharmed()


def test_a_header_has_a_number_of_lines_and_one_host(quick: str) -> None:
    many = b"".join(b"X-%d: 1\r\n" % i for i in range(LIMITS.max_headers + 1))
    close = b"Connection: close\r\n\r\n"
    cases = {
        b"GET / HTTP/1.1\r\nHost: a\r\n" + close: 200,
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 60_000 + b"\r\n" + close: 200,
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 65_500 + b"\r\n" + close: 431,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + many + close: 431,
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + close: 400,
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n" + close: 400,
        b"GET / HTTP/1.1\r\n" + close: 400,
        b"GET / HTTP/1.0\r\n\r\n": 200,
        b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n": 400,
        b"nonsense\r\n\r\n": 400,
    }
    for request, status in cases.items():
        assert status_of(asked(quick, request)) == status, request[:80]
    following = asked(
        quick, b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 70_000 + b"\r\n" + close
    )
    assert following.count(b"HTTP/1.1 200") <= 1, "the second of two requests had more than the first"


def test_a_request_that_does_not_come_is_ended(quick: str) -> None:
    cases = {
        b"": 0,
        b"GET": 408,
        HEAD: 408,
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345": 408,
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12": 408,
        HEAD + b"\r\n": 200,  # and nothing more
        HEAD + b"\r\n\r\n": 200,
        b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n12345": 200,  # answered before it was read
    }
    for request, status in cases.items():
        got = asked(quick, request)
        assert (status_of(got) if got else 0) == status, request
        assert got.count(b"HTTP/1.1") <= 1


def test_a_body_that_trickles_is_ended_and_one_that_goes_on_is_not(quick: str) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with connect(quick) as sock:
        sock.sendall(head % 100)
        with contextlib.suppress(OSError):
            for _ in range(100):
                sock.sendall(b"x")
                time.sleep(0.05)
            pytest.fail("a body of 20 bytes a second was waited for")
    size = 16 << 10
    with connect(quick) as sock:
        sock.sendall(head % size)
        for _ in range(16):
            sock.sendall(bytes(size // 16))
            time.sleep(0.08)
        assert answer_of(sock).endswith(b"%x\r\n%d\r\n0\r\n\r\n" % (5, size))


def test_an_answer_may_take_its_time_but_must_be_read(quick: str) -> None:
    got = asked(quick, b"GET /stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert got.count(b"tick") == 15, "an answer of three times the deadline was cut"
    with connect(quick) as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(4 * QUICK.idle_s)
        read = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 20):
                read += len(piece)
        assert read < NUM_ENDLESS << 20, "the server waited until it was read"


def limited(argv: list[str], num: int) -> list[str]:
    """A command under a limit of descriptors that it cannot raise."""
    code = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({num}, {num})); "
    return [sys.executable, "-c", code + "os.execv(sys.argv[1], sys.argv[1:])", *argv]


SERVE = [sys.executable, str(Path(__file__).parent / "serve.py")]


def held_open(url: str, num: int, request: bytes = HEAD) -> list[socket.socket]:
    """So many connections that never end their request; those that are refused are no matter."""
    made = []
    for _ in range(num):
        with contextlib.suppress(OSError):
            made.append(connect(url))
            made[-1].sendall(request)
    return made


def num_alive(held: list[socket.socket]) -> int:
    alive = 0
    for sock in held:
        sock.setblocking(False)
        try:
            alive += bool(sock.recv(1 << 16))
        except BlockingIOError:
            alive += 1
        except OSError:
            pass
    return alive


def assert_held_sockets_harm_nobody(serving: Serving, num: int, request: bytes = HEAD) -> None:
    with httpx.Client(base_url=serving.url, timeout=60, verify=False) as client:
        agent = Agent(client).register([SITE])
        held = held_open(serving.url, num, request)
        try:
            with Watch(serving.url) as watch:
                for step in range(1, 6):
                    answer = agent.post(agent.body([SITE], [step]))
                    assert answer.status_code == 200, answer.text
                    time.sleep(0.1)
            watch.assert_unharmed()
            until = time.monotonic() + 90
            while num_alive(held):
                assert time.monotonic() < until, f"{num_alive(held)} of {num} are alive"
                time.sleep(0.1)
            assert httpx.get(f"{serving.url}/readyz", verify=False).status_code == 200
        finally:
            for sock in held:
                sock.close()


def test_half_open_requests_leave_descriptors_for_agents(tmp_path: Path) -> None:
    command = limited(SERVE, NUM_DESCRIPTORS)
    with Serving(tmp_path, "--port", "0", command=command, FP8WATCH_TEST_DEADLINE_S="2") as serving:
        assert_held_sockets_harm_nobody(serving, 400)
        _, err = serving.kill(15)
    assert "Too many open files" not in err
    assert "this must not happen" not in err


def test_who_asks_for_nothing_makes_room_first(quick: str) -> None:
    """Four places: an agent's, one that is being answered, and two that ask for nothing, of which the older goes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10 if scope["path"] == "/slow" else 1):
            await asyncio.sleep(0.1 if scope["path"] == "/slow" else 0)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with (
        served(app, limits=ConnectionLimits(max_connections=4)) as url,
        httpx.Client(base_url=url) as agent,
        connect(url) as answered,
    ):
        agent.get("/")
        answered.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        time.sleep(0.05)
        held = [connect(url) for _ in range(2)]
        for sock in held:
            sock.sendall(b"GET / HTTP/1.1\r\n")
        time.sleep(0.05)
        assert httpx.get(url).status_code == 200
        assert num_alive(held[:1]) == 0
        assert num_alive(held[1:]) == 1
        for _ in range(8):
            held.append(connect(url))
        (pool,) = [agent._transport._pool]
        before = list(pool.connections)
        assert agent.get("/").status_code == 200
        assert list(pool.connections) == before, "the agent had to connect again"
        assert answer_of(answered).count(b"x\r\n") == 10
        for sock in held:
            sock.close()


@pytest.mark.heavy(10, "server/fp8watch_server/http")
@pytest.mark.parametrize("num_descriptors", [1024, 8192])
def test_five_thousand_half_open_requests_harm_nobody(tmp_path: Path, num_descriptors: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("this machine lets a process open too few sockets")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with Serving(tmp_path, "--port", "0", command=limited(SERVE, num_descriptors)) as serving:
            assert_held_sockets_harm_nobody(serving, 5000)
            serving.kill(15)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.heavy(9, "server/fp8watch_server/http", first=True)
def test_with_tls_the_limits_are_the_same(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    args = ("--port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    limit = limited(SERVE, NUM_DESCRIPTORS)
    with Serving(tmp_path, *args, command=limit, FP8WATCH_TEST_DEADLINE_S="1.5") as serving:
        assert_held_sockets_harm_nobody(serving, 300, b"")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for request, status in ((HEAD + b"X: " + bytes(70_000).replace(b"\0", b"a"), 431), (HEAD, 408)):
            with connect(serving.url) as raw, context.wrap_socket(raw) as sock:
                sock.sendall(request)
                with contextlib.suppress(ssl.SSLError):
                    assert status_of(answer_of(sock)) == status
        _, err = serving.kill(15)
    assert "no descriptor is left" not in err


def test_a_collector_raises_its_own_limit_of_descriptors(tmp_path: Path) -> None:
    code = "import os, resource, sys; h = resource.getrlimit(7)[1]; resource.setrlimit(7, (128, h)); "
    command = [sys.executable, "-c", code + "os.execv(sys.argv[1], sys.argv[1:])", *SERVE]
    with Serving(tmp_path, "--port", "0", command=command) as serving:
        limits = Path(f"/proc/{serving.process.pid}/limits").read_text()
        soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
        assert soft == hard
        serving.kill(15)


def test_a_request_that_finds_no_descriptor_is_a_503(app: Any, client: httpx.Client) -> None:
    async def out_of_files(body: bytes, sender: Any) -> Any:
        raise ImportError("numpy.ma") from OSError(24, "Too many open files")

    app.state.ingest.commit = out_of_files
    agent = Agent(client).register([SITE])
    agent.patient = False
    answer = agent.post(agent.body([SITE], [1]))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "ulimit -n" in answer.text


def in_a_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: a browser of other tests keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result(20)


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.EPERM])
def test_a_socket_that_accepts_nothing_leaves_others_their_turn(number: int) -> None:
    tries = 0

    class Loop:
        async def sock_accept(self, sock: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries > 100:
                await asyncio.Event().wait()
            raise OSError(number, "it fails, and does not wait")

    async def turns() -> int:
        task = asyncio.ensure_future(Server(None, lifespan="off")._accept(Loop(), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        return tries

    assert in_a_loop(turns()) == 1


def test_a_transport_that_fails_leaves_others_their_limits() -> None:
    told: list[str] = []

    class Broken:
        transport = SimpleNamespace(abort=lambda: told.append("aborted"))

        def tick(self, seconds: float) -> None:
            raise AttributeError("'NoneType' object has no attribute 'close'")

    class Sound:
        def tick(self, seconds: float) -> None:
            told.append("looked at")

    async def one_tick() -> None:
        connections = Connections(QUICK)
        for connection in (Broken(), Sound()):
            connections.move(connection, None, Stage.NEW)  # type: ignore[arg-type]
        connections._tick(asyncio.get_running_loop())
        connections.stop()

    in_a_loop(one_tick())
    assert told == ["aborted", "looked at"]


def test_nothing_is_imported_once_the_collector_serves(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import httpx
from collector.kit import Agent, Recorder, make_site, served
from fp8watch_server.app import create_app
from fp8watch_server.settings import Settings
from fp8watch_agent.record import TileMap

settings = Settings(database_url={f"sqlite:///{tmp_path}/x.db"!r})
app = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)
with served(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
    client.get("/healthz")
    before = set(sys.modules)
    agent = Agent(client).register([make_site()])
    agent.send([make_site()], [1, 2])
    agent.send([make_site()], [3], fields={{"num_nan": 3}})
    print(sorted(set(sys.modules) - before))
app.state.ingest.stop()
app.state.engine.dispose()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
