"""Services that the package apprise knows: told in plain text, held to the rules of our own connections."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notify.receiver import Outbox, Receiver

from fp8watch_server.notify import egress, plain
from fp8watch_server.notify.channels.apprise import LOCAL, UNCHECKED, AppriseChannel
from fp8watch_server.notify.channels.base import Pace
from fp8watch_server.notify.command import main
from fp8watch_server.notify.command import test_payload as payload_of_a_test
from fp8watch_server.notify.egress import watched
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.routes_file import RoutesError, load_routes
from fp8watch_server.notify.safe_http import Unreachable
from fp8watch_server.settings.webhook_url import TargetError

Receivers = Callable[..., Receiver]
AT_ONCE = Pace(group_wait_s=0.0, group_interval_s=0.0)


@pytest.fixture
def _package() -> None:
    pytest.importorskip("apprise", reason="pip install 'fp8watch[apprise]'")


def address(receiver: Receiver) -> str:
    return receiver.url.replace("http://", "json://")


def payload(**facts: Any) -> dict[str, Any]:
    made = payload_of_a_test("https://watch.example", 1.0)
    made["incident"].update(facts)
    return made


@pytest.mark.usefixtures("_package")
def test_an_incident_and_its_end_are_told_by_a_service_of_apprise(
    outbox: Outbox, receiver_of: Receivers, dispatch: Callable[..., Dispatcher]
) -> None:
    receiver = receiver_of()
    outbox.put("firing", "i1", severity="critical")
    outbox.put("resolved", "i1", severity="critical")
    dispatch(AppriseChannel(address(receiver), pace=AT_ONCE))
    outbox.wait_for(["sent", "sent"])
    first, second = (g.body for g in receiver.got)
    assert (first["type"], second["type"]) == ("failure", "success")
    assert first["title"].startswith("critical: Test message: Inf laundered")
    assert "Where: layers.1.mlp.down_proj input (fprop), tile (37, 5)" in first["message"]
    assert "Incident: https://watch.example/incidents/" in first["message"]
    assert second["title"].startswith("Resolved: ")


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(("status", "state", "num"), [(404, "dead", 1), (500, "sent", 2)])
def test_what_it_answers_is_read_as_from_our_own_channels(
    outbox: Outbox, receiver_of: Receivers, status: int, state: str, num: int
) -> None:
    receiver = receiver_of((status, {}, b"no"))
    outbox.put()
    clock = [time.time() + 1]
    channel = AppriseChannel(address(receiver), pace=AT_ONCE)
    dispatcher = Dispatcher(outbox.db, [channel], clock=lambda: clock[0])
    while dispatcher.deliver_one(channel):
        clock[0] += 60
    [row] = outbox.rows
    assert (row["state"], len(receiver.got)) == (state, num)
    assert "secret" not in str(row["last_error"])
    if state == "dead":
        assert row["last_error"].startswith("HTTP 404")


@pytest.mark.usefixtures("_package")
def test_nobody_there_is_tried_again_and_the_address_stays_secret() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        channel = AppriseChannel(f"json://127.0.0.1:{s.getsockname()[1]}/a-very-secret-token")
        with pytest.raises(Unreachable) as error:
            channel.send(payload(), "firing", "key", 0.0)
    for shown in (str(error.value), repr(channel), channel.masked):
        assert "secret" not in shown
    assert "a-very-secret-token" in channel.secrets


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize("inside", ["10.0.0.1", "169.254.169.254", "hooks.example"])
def test_it_is_not_led_inside(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: real("10.0.0.1" if host == "hooks.example" else host, *a, **k)
    )
    with pytest.raises(TargetError, match="not a global address"):
        AppriseChannel(f"json://{inside}/token").send(payload(), "firing", "key", 0.0)


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize("asks", ["", "?redirect=yes"])
def test_no_redirect_is_followed(receiver_of: Receivers, asks: str) -> None:
    elsewhere = receiver_of()
    receiver = receiver_of((307, {"Location": elsewhere.url}, b""))
    answer = AppriseChannel(address(receiver) + asks).send(payload(), "firing", "key", 0.0)
    assert answer.status == 307
    assert elsewhere.got == []


@pytest.mark.usefixtures("_package")
def test_a_receiver_that_never_ends_is_left(receiver_of: Receivers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "TOTAL_S", 0.3)
    receiver = receiver_of()
    receiver.hold = threading.Event()
    patient = f"{address(receiver)}?cto=60&rto=60"  # of itself it would wait until the answer comes
    with pytest.raises(Unreachable, match="no answer in time"):
        AppriseChannel(patient).send(payload(), "firing", "key", 0.0)


def test_a_connection_inside_is_refused_before_it_is_made_and_only_while_it_is_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with watched() as watch, socket.create_connection(("127.0.0.1", port)):
            assert watch.refused is None
        for target in (("192.168.0.1", 9), ("::ffff:10.0.0.1", 9), ("localhost", 9)):
            kind = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
            with watched() as watch, socket.socket(kind) as s, pytest.raises(ConnectionRefusedError):
                s.connect(target)
            assert watch.refused
        with watched() as watch, socket.socket(socket.AF_UNIX) as s, pytest.raises(ConnectionRefusedError):
            s.connect("/run/docker.sock")
        with watched() as watch, socket.socket(type=socket.SOCK_DGRAM) as s, pytest.raises(ConnectionRefusedError):
            s.sendto(b"x", ("10.0.0.1", 9))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.settimeout(0.01)
            s.connect(("192.168.0.1", 9))  # not watched: no business of ours


def test_names_stay_text_whatever_the_service_makes_of_them() -> None:
    evil = "<!channel> @everyone <script>\x1b[31m\u202e"
    made = payload(title=evil, place={"module": evil, "operand": "input", "gemm": "fprop", "ranks": [0]})
    made["run"]["name"] = evil
    told = plain.message(made, "firing")
    for text in (told.title, told.text):
        assert not set("<>\x1b\u202e") & set(text)
        assert "@everyone" not in text
    long = payload(cause="x" * 10_000, title="y" * 1000)
    assert len(plain.message(long, "firing").text) == plain.TEXT_CHARS
    assert len(plain.message(long, "firing").title) == plain.TITLE_CHARS


def test_several_are_told_together() -> None:
    made = payload(severity="critical")
    made["also"] = [{**payload(id=f"other-{i}", title=f"number {i}"), "kind": "firing"} for i in range(12)]
    told = plain.message(made, "firing")
    assert told.title.startswith("13 incidents, first critical: Test message")
    assert "number 3" in told.text
    assert told.text.endswith("5 more on the pages")


# ---- in a routes file


@pytest.fixture
def routes(tmp_path: Path) -> Callable[[str], Path]:
    def write(url: str) -> Path:
        (tmp_path / "address").write_text(url)
        path = tmp_path / "routes.json"
        path.write_text(json.dumps({"channels": {"team": {"kind": "apprise", "url_file": "address"}}}))
        return path

    return write


@pytest.mark.usefixtures("_package")
def test_a_routes_file_names_it_and_notify_test_sends_to_it(
    routes: Callable[[str], Path], receiver_of: Receivers, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = receiver_of()
    path = routes(address(receiver))
    assert main(["check", str(path)], {}) == 0
    assert "team: json://…, 60 messages an hour" in capsys.readouterr().out
    assert main(["test"], {"FP8WATCH_ROUTES": str(path)}) == 0
    assert receiver.got[0].body["title"].startswith("info: Test message")


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("nothing://a-very-secret-token/x", "begins with nothing://"),
        ("a-very-secret-token", "begins with apprise://"),
        *((f"{scheme}://a-very-secret-token", "connects where it cannot be checked") for scheme in sorted(UNCHECKED)),
        *((f"{scheme}://a-very-secret-token", "collector's own machine") for scheme in sorted(LOCAL)),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_not_shown(
    routes: Callable[[str], Path], url: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RoutesError, match=rule) as error:
        load_routes(routes(url), {})
    assert "secret" not in str(error.value) + caplog.text


def test_without_the_package_it_says_what_to_install(
    routes: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "apprise":
            raise ModuleNotFoundError("No module named 'apprise'", name="apprise")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        RoutesError, match=r"\[channels.team\] url: .*not installed; run pip install 'fp8watch\[apprise\]'"
    ):
        load_routes(routes("json://a-very-secret-token"), {})
