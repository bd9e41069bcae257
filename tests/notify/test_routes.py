"""Routes files: who is told of what; what is wrong with a file is said, and what is secret is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notify.receiver import Outbox, Receiver

from fp8watch_server.notify import command
from fp8watch_server.notify.channels import channels_of
from fp8watch_server.notify.channels.alertmanager import AlertmanagerChannel
from fp8watch_server.notify.channels.slack import SlackChannel
from fp8watch_server.notify.channels.webhook import WebhookChannel
from fp8watch_server.notify.routes import Route, Routing
from fp8watch_server.notify.routes_file import RoutesError, load_routes
from fp8watch_server.notify.service import Sending, routing_of
from fp8watch_server.settings import Settings

GOOD = """
stalled_after = "15 min"

[channels.oncall]
kind = "slack"
url_file = "oncall"
max_per_hour = 30

[channels.llama]
kind = "webhook"
url_env = "LLAMA_URL"
secret_env = "LLAMA_SECRET"
group_wait = "500 ms"

[channels.am]
kind = "alertmanager"
url_env = "AM_URL"

[[routes]]
runs = ["scratch-*"]
channels = []
stop = true

[[routes]]
severities = ["critical"]
channels = ["oncall", "am"]

[[routes]]
runs = ["llama-*"]
severities = ["warning", "critical"]
modes = ["delayed-clip", "nan-*", "run-stalled"]
channels = ["llama"]
"""
ENVIRON = {
    "HOME": "/h",
    "LLAMA_URL": "https://hooks.example/llama-secret",
    "LLAMA_SECRET": "signing-secret",
    "AM_URL": "http://127.0.0.1:9093/api/v2/alerts",
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    (tmp_path / "oncall").write_text("https://hooks.slack.com/services/oncall-secret\n")
    (tmp_path / "empty").write_text("\n")

    def write(text: str) -> Path:
        path = tmp_path / "routes.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_names_channels_and_the_routes_to_them(file: Callable[[str], Path]) -> None:
    routing, warnings = load_routes(file(GOOD), ENVIRON)
    assert warnings == []
    oncall, llama, am = routing.channels
    assert isinstance(oncall, SlackChannel)
    assert isinstance(llama, WebhookChannel)
    assert isinstance(am, AlertmanagerChannel)
    assert oncall.target.url.endswith("oncall-secret")
    assert (oncall.pace.max_per_hour, oncall.pace.min_interval_s) == (30, 1.0)
    assert (llama.secret, llama.pace.group_wait_s) == ("signing-secret", 0.5)
    assert routing.stalled_after_s == 900.0
    shown = repr(routing)
    assert not any(secret in shown for secret in ("oncall-secret", "llama-secret", "signing-secret"))


@pytest.mark.parametrize(
    ("told", "channels"),
    [
        (("llama-7b", "x", "critical", "nan-in-loss"), ["oncall", "am", "llama"]),
        (("j17", "llama-7b", "warning", "delayed-clip"), ["llama"]),
        (("j17", "llama-7b", "warning", "dead-layer"), []),
        (("gpt", "gpt", "critical", "nan-in-loss"), ["oncall", "am"]),
        (("gpt", "gpt", "warning", "delayed-clip"), []),
        (("scratch-1", "llama-7b", "critical", "nan-in-loss"), []),
    ],
)
def test_every_route_that_matches_adds_its_channels(
    file: Callable[[str], Path], told: tuple[str, str, str, str], channels: list[str]
) -> None:
    routing, _ = load_routes(file(GOOD), ENVIRON)
    assert routing.channels_for(*told) == channels


def test_json_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    path.write_text(json.dumps({"channels": {"hook": {"kind": "webhook", "url_env": "LLAMA_URL"}}}))
    routing, _ = load_routes(path, ENVIRON)
    assert routing.channels_for("any", "run", "info", "dead-layer") == ["hook"]


HEAD = '[channels.a]\nkind = "slack"\nurl_file = "oncall"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[channels", "not TOML"),
        ("[chanels.a]", "chanels: unknown; did you mean channels?"),
        ("channels = 3", "channels: must be tables"),
        ('[channels."a b"]\nkind = "slack"', "a name has 1 to 40"),
        ("[channels]\na = 3", "[channels.a] is no table"),
        ('[channels.a]\nurl_file = "oncall"', "[channels.a] kind: is missing; must be one of otlp, slack, webhook"),
        ('[channels.a]\nkind = "slak"\nurl_file = "oncall"', "'slak' must be one of otlp, slack, webhook, alertmanager, apprise; did you mean slack?"),
        ('[channels.a]\nkind = "slack"', "[channels.a] url: is missing; give url_file or url_env"),
        ('[channels.a]\nkind = "slack"\nurl = "https://h/hidden"', "url: is a secret and never stands in this file"),
        ('[channels.a]\nkind = "slack"\nurl_file = "https://h/hidden"', "holds an address, which is a secret"),
        ('[channels.a]\nkind = "slack"\nurl_file = "absent"', "cannot be read (No such file or directory)"),
        ('[channels.a]\nkind = "slack"\nurl_file = "empty"', "is empty; write the value into it"),
        ('[channels.a]\nkind = "slack"\nurl_env = "NOT_SET"', "variable NOT_SET is not set, or empty"),
        ('[channels.a]\nkind = "slack"\nurl_env = 3', "must be the name of a variable"),
        (HEAD + 'url_env = "LLAMA_URL"', "url_file and url_env are both given"),
        (HEAD + 'secret_env = "LLAMA_SECRET"', "a slack channel signs nothing"),
        (HEAD + 'group_wait = "3 parsecs"', "'3 parsecs' must be a time from 0 s to 3600 s"),
        (HEAD + 'group_interval = -1', "must be a time"),
        (HEAD + 'min_interval = "10 ms"', "Slack takes one message a second at most"),
        (HEAD + 'max_per_hour = "many"', "must be a whole number from 0 (no limit)"),
        (HEAD + 'max_per_hour = true', "must be a whole number"),
        (HEAD + "max_per_hour = 3.0", "must be a whole number"),
        ("stalled_after = " + "9" * 400 + "\n" + HEAD, "must be a time from 90 s"),
        (HEAD + "max_per_huor = 3", "did you mean max_per_hour?"),
        ('stalled_after = "1 s"\n' + HEAD, "stalled_after: '1 s' must be a time from 90 s"),
        (HEAD + "[routes]\nx = 1", "routes: must be tables, each begun with [[routes]]"),
        (HEAD + "[[routes]]\nruns = [\"x\"]", "[[routes]] 1 channels: names whom to tell"),
        (HEAD + "[[routes]]\nchannels = []", "write channels = [] and stop = true"),
        (HEAD + '[[routes]]\nchannels = ["aa"]', "channels 'aa': no such channel; did you mean a?"),
        (HEAD + '[[routes]]\nchannels = "a"', "must be a list of texts"),
        (HEAD + '[[routes]]\nchannels = ["a"]\nseverities = ["critcal"]', "did you mean critical?"),
        (HEAD + '[[routes]]\nchannels = ["a"]\nmodes = ["dead-leyer"]', "no failure mode; did you mean dead-layer?"),
        (HEAD + '[[routes]]\nchannels = ["a"]\nstop = 1', "stop: 1 must be true or false"),
        (HEAD + '[[routes]]\nchannels = ["a"]\nrun = ["x"]', "run: unknown; did you mean runs?"),
        ('[channels.slack]\nkind = "slack"\nurl_file = "oncall"', "the environment has a channel slack already"),
        ('[channels.a]\nkind = "slack"\nurl_env = "FTP"', "http and https are allowed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_rule_and_remedy_and_no_secret(
    file: Callable[[str], Path], text: str, said: str
) -> None:
    environ = {**ENVIRON, "FTP": "ftp://h/hidden", "FP8WATCH_SLACK_WEBHOOK_URL": "https://h/hidden"}
    known = channels_of(Settings.from_environ(environ))
    with pytest.raises(RoutesError) as e:
        load_routes(file(text), environ, known)
    assert said in str(e.value)
    assert "hidden" not in str(e.value)


def test_a_file_without_any_channel_is_refused(file: Callable[[str], Path]) -> None:
    with pytest.raises(RoutesError, match="no channel: a file of routes needs one"):
        load_routes(file(""), ENVIRON)


def test_every_problem_of_a_file_is_said_at_once(file: Callable[[str], Path]) -> None:
    text = HEAD + 'max_per_hour = -1\n[[routes]]\nchannels = ["b"]\n[[routes]]\nchannels = ["a"]\nmodes = ["nan"]'
    with pytest.raises(RoutesError) as e:
        load_routes(file(text), ENVIRON)
    assert len(e.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD.replace(".a]", ".b]") + HEAD + '[[routes]]\nchannels = ["a"]', "channel b is in no route"),
        (HEAD + '[[routes]]\nchannels = ["a"]\nstop = true\n[[routes]]\nchannels = ["a"]', "never reached"),
        (HEAD + '[[routes]]\nchannels = ["a"]\nseverities = ["warning"]', "nobody is told"),
    ],
)
def test_what_has_no_effect_is_warned_of(file: Callable[[str], Path], text: str, said: str) -> None:
    _, warnings = load_routes(file(text), ENVIRON)
    assert said in " ".join(warnings)


def test_without_a_file_the_environments_channels_get_everything() -> None:
    environ = {"HOME": "/h", "FP8WATCH_SLACK_WEBHOOK_URL": "https://h/a", "FP8WATCH_WEBHOOK_URL": "https://h/b"}
    routing, warnings = routing_of(Settings.from_environ(environ), environ)
    assert warnings == []
    for severity in ("info", "warning", "critical"):
        assert routing.channels_for("r", "", severity, "dead-layer") == ["slack", "webhook"]


def test_a_notice_that_cannot_be_read_goes_everywhere() -> None:
    routing = Routing(channels=(_Named("a"), _Named("b")), routes=(Route(("a",), severities=("critical",)),))
    assert routing.route({}) == ["a", "b"]
    assert routing.route({"incident": {}, "run": {}}) == []


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_notify_check_says_what_is_there_and_where_an_incident_would_go(
    file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["check", str(file(GOOD)), "--run", "llama-7b", "--mode", "delayed-clip"]
    assert command.main(asked, ENVIRON) == 0
    printed = capsys.readouterr().out
    assert "oncall: https://hooks.slack.com/…, 30 messages an hour" in printed
    assert "critical delayed-clip of run llama-7b goes to: oncall, am, llama" in printed
    assert "secret" not in printed
    assert command.main(["check", str(file(GOOD.replace("slack", "slck"))), "--run", "x"], ENVIRON) == 1
    printed = capsys.readouterr().err
    assert "did you mean slack?" in printed
    assert command.main(["check", "/nowhere"], ENVIRON) == 1


def test_a_collector_with_a_routes_file_that_cannot_be_used_does_not_start(
    file: Callable[[str], Path], outbox: Outbox
) -> None:
    path = str(file(GOOD.replace('oncall"\nmax', 'absent"\nmax')))
    with pytest.raises(ValueError, match="routes.toml.*cannot be read"):
        Sending(outbox.db, Settings(database_url=outbox.url, routes=path), ENVIRON)


def test_a_collector_sends_by_the_routes_of_its_file(
    file: Callable[[str], Path], outbox: Outbox, receiver_of: Callable[..., Receiver]
) -> None:
    page, other = receiver_of(), receiver_of()
    text = "".join(
        f'[channels.{n}]\nkind = "webhook"\nurl_env = "{n}"\n[[routes]]\nseverities = ["{s}"]\nchannels = ["{n}"]\n'
        for n, s in (("PAGE", "critical"), ("OTHER", "warning"))
    )
    environ = {"PAGE": page.url, "OTHER": other.url}
    sending = Sending(outbox.db, Settings(database_url=outbox.url, routes=str(file(text))), environ)
    outbox.put("firing", "c", severity="critical")
    outbox.put("firing", "w", severity="warning")
    outbox.put("firing", "i", severity="info")
    sending.start()
    try:
        outbox.wait_for(["sent", "sent", "unrouted"])
    finally:
        sending.stop()
    assert [g.body["receiver"] for g in page.got + other.got] == ["PAGE", "OTHER"]
    assert [g.body["alerts"][0]["fingerprint"] for g in page.got + other.got] == ["c", "w"]


def test_notify_test_sends_to_the_channels_of_the_file(
    file: Callable[[str], Path], receiver_of: Callable[..., Receiver], capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = receiver_of()
    path = file('[channels.a]\nkind = "alertmanager"\nurl_env = "A"\n[channels.b]\nkind = "slack"\nurl_env = "A"')
    environ = {"HOME": "/h", "FP8WATCH_ROUTES": str(path), "A": receiver.url}
    assert command.main(["test", "--channel", "a"], environ) == 0
    assert isinstance(receiver.got[0].body_list, list)
    assert command.main(["test", "--channel", "c"], environ) == 2
    assert "there are a, b" in capsys.readouterr().out
