"""A URL leads only where it may, and is never shown."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest
from notify.receiver import Receiver

from fp8watch_server.notify import safe_http as target_module
from fp8watch_server.notify.safe_http import MAX_ANSWER_BYTES, Target, Unreachable, refusal
from fp8watch_server.settings.webhook_url import TargetError


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"]
)
def test_every_way_to_write_loopback_is_refused_from_elsewhere(host: str) -> None:
    with pytest.raises((TargetError, Unreachable)):
        Target(f"http://{host}:9/").post(b"", {})


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "fe80::1",
        "fc00::1",
        "::ffff:10.0.0.1",
    ],
)
@pytest.mark.parametrize("from_operator", [True, False])
def test_what_is_neither_global_nor_loopback_is_refused_for_everyone(address: str, from_operator: bool) -> None:
    assert refusal(address, from_operator=from_operator) is not None


def test_global_addresses_are_allowed_and_loopback_for_the_operator() -> None:
    assert refusal("8.8.8.8", from_operator=False) is None
    assert refusal("2606:4700::1111", from_operator=False) is None
    assert refusal("127.0.0.1", from_operator=True) is None
    assert refusal("::ffff:127.0.0.1", from_operator=True) is None
    assert refusal("127.0.0.1", from_operator=False) is not None


def test_a_name_with_one_bad_address_among_good_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 443)) for ip in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
    with pytest.raises(TargetError, match=r"10\.0\.0\.1 is not a global address"):
        Target("https://hooks.example/secret", from_operator=True).post(b"", {})


def test_the_checked_address_is_the_one_that_is_connected_to(
    receiver_of: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, real, asked = receiver_of(), socket.getaddrinfo, []

    def rebinding(host: str, *args: object, **kwargs: object) -> object:
        if host != "hooks.example":
            return real(host, *args, **kwargs)  # type: ignore[arg-type]
        asked.append(host)
        return real("127.0.0.1", *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    port = receiver.url.split(":")[2].split("/")[0]
    answer = Target(f"http://hooks.example:{port}/path?x=1", from_operator=True).post(b"{}", {})
    assert answer.status == 200
    assert len(asked) == 1  # a second look-up could lead elsewhere
    assert receiver.got[0].headers["Host"] == f"hooks.example:{port}"
    assert receiver.got[0].path == "/path?x=1"


def test_redirects_are_not_followed(receiver_of: Callable[..., Receiver]) -> None:
    elsewhere = receiver_of()
    receiver = receiver_of((307, {"Location": elsewhere.url}, b""))
    assert Target(receiver.url, from_operator=True).post(b"{}", {}).status == 307
    assert elsewhere.got == []


def test_a_huge_answer_is_not_read(receiver_of: Callable[..., Receiver]) -> None:
    receiver = receiver_of((400, {}, b"x" * (MAX_ANSWER_BYTES * 40)))
    assert len(Target(receiver.url, from_operator=True).post(b"{}", {}).text) == 200


@pytest.mark.parametrize(
    "path", ["/hook/5f3c0a9e-77f1-4d35", "/a/b?key=5f3c0a9e-77f1-4d35", "/hook/5f3c0a9e%2D77f1-4d35"]
)
def test_a_receiver_that_repeats_its_address_does_not_make_it_known(
    receiver_of: Callable[..., Receiver], path: str
) -> None:
    said = f"{'x' * 170} Cannot POST {path}: 5f3c0a9e-77f1-4d35 is not registered"
    receiver = receiver_of((404, {}, said.encode()), (404, {}, said[150:].encode()))
    target = Target(receiver.url.removesuffix("/services/T0/B0/secret") + path, from_operator=True)
    for _ in range(2):
        answer = target.post(b"{}", {})
        assert "Cannot POST ***" in answer.text
        assert "5f3c" not in answer.text


def test_nobody_there_is_unreachable_and_the_url_stays_secret() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        target = Target(f"http://127.0.0.1:{s.getsockname()[1]}/services/secret", from_operator=True)
        with pytest.raises(Unreachable) as e:
            target.post(b"", {}, timeout_s=1)
    assert "secret" not in str(e.value)
    assert "secret" not in repr(target)


def test_retry_after_as_a_date_is_read_by_the_receivers_clock(receiver_of: Callable[..., Receiver]) -> None:
    date = {"Date": "Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT"}
    receiver = receiver_of((429, date, b""))
    assert Target(receiver.url, from_operator=True).post(b"", {}).retry_after_s == 30.0


@pytest.mark.parametrize(
    "headers", [{"Retry-After": "soon"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": "x"}]
)
def test_a_retry_after_that_cannot_be_read_is_none(
    receiver_of: Callable[..., Receiver], headers: dict[str, str]
) -> None:
    receiver = receiver_of((429, headers, b""))
    assert Target(receiver.url, from_operator=True).post(b"", {}).retry_after_s is None


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("ftp://x/", "http and https"),
        ("hooks.slack.com/services/x", "http and https"),
        ("https:///x", "no host"),
        ("https://user:pw@x/", "user or password"),
        ("https://x:99999/", "cannot be read"),
        ("https://x/a b", "space or a control"),
    ],
)
def test_a_url_that_cannot_work_says_the_rule_and_not_itself(url: str, rule: str) -> None:
    with pytest.raises(TargetError, match=rule) as e:
        Target(url, from_operator=True)
    assert url not in str(e.value)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_receiver_that_drips_is_left_in_time(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then restarts every timeout of a socket; the whole has an end of its own, long before the last drop."""
    monkeypatch.setattr(target_module, "TOTAL_S", 0.5)
    left = threading.Event()

    def drip(server: socket.socket) -> None:
        conn, _ = server.accept()
        with conn:
            conn.recv(65536)
            if part == "body":
                conn.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 60000\r\n\r\n")
            else:
                conn.sendall(b"HTTP/1.1 200 ")
            for _ in range(400):
                time.sleep(0.05)
                try:
                    conn.sendall(b"x")
                except OSError:
                    left.set()
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        with contextlib.suppress(Unreachable):
            Target(f"http://127.0.0.1:{server.getsockname()[1]}/", from_operator=True).post(b"{}", {})
        thread.join()
    assert left.is_set()
