"""What people and programs receive."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from notify.receiver import Receiver

from fp8watch_server.notify import command
from fp8watch_server.notify.channels import channels_of, slack, webhook
from fp8watch_server.notify.channels.webhook import WebhookChannel
from fp8watch_server.notify.command import test_payload as payload_of_a_test
from fp8watch_server.notify.safe_http import Target
from fp8watch_server.settings import SettingError, Settings

MODULE = "layers.1.mlp.down_proj"


def payload(**changes: Any) -> dict[str, Any]:
    made = payload_of_a_test("https://watch.example", 1_700_000_000.0)
    made["incident"].update(severity="critical", title=f"Inf laundered to 448 in {MODULE} input (fprop), tile (37, 5)")
    made["incident"].update(changes)
    return made


def texts(body: Any) -> list[str]:
    """Every text of a message, at any depth."""
    if isinstance(body, dict):
        return [t for k, v in body.items() for t in ([v] if k == "text" and isinstance(v, str) else texts(v))]
    if isinstance(body, list):
        return [t for v in body for t in texts(v)]
    return []


def test_a_slack_message_names_cause_place_step_evidence_fix_and_links() -> None:
    body = slack.message(payload(), "firing")
    kinds = [b["type"] for b in body["blocks"]]
    assert kinds == ["header", "section", "section", "section", "section", "context", "actions"]
    header, fields, cause, evidence, fix, context, actions = body["blocks"]
    assert header["text"]["type"] == "plain_text"
    assert header["text"]["text"].startswith("🔴 critical: Inf laundered to 448 in")
    assert [f["text"].split("\n")[0] for f in fields["fields"]] == ["*Where*", "*When*", "*Run*", "*Verdict*"]
    assert f"`{MODULE} input (fprop), tile (37, 5), element (37, 700), rank 0`" in fields["fields"][0]["text"]
    assert "step 100" in fields["fields"][1]["text"]
    assert cause["text"]["text"].startswith("*Cause*\n")
    assert evidence["text"]["text"] == "*Evidence*\nnum_inf 1 (normal: 0), num_sentinel_tiles 1 (normal: 0)"
    assert fix["text"]["text"].startswith("*What to change*\n1. ")
    assert "inf-laundering" in context["elements"][0]["text"]
    assert [b["url"].split("/")[3] for b in actions["elements"]] == ["incidents", "runbooks"]
    assert f"{MODULE} input (fprop)" in body["text"]
    assert "step 100" in body["text"]
    assert "Fix: " in body["text"]


def test_a_resolved_message_is_short_and_says_so() -> None:
    body = slack.message(payload(last_step=120, resolved_at=1_700_000_100.0), "resolved")
    assert body["text"].startswith("✅ Resolved: ")
    assert [b["type"] for b in body["blocks"]] == ["header", "section", "section", "context", "actions"]
    assert "steps 100 to 120" in body["blocks"][1]["fields"][1]["text"]


def test_hostile_names_stay_text() -> None:
    hostile = "<!channel> & <https://evil|click> `x`"
    made = payload(title=hostile, cause=hostile)
    made["run"]["name"] = hostile
    made["incident"]["place"]["module"] = hostile
    found = texts(slack.message(made, "firing"))
    assert len(found) > 8
    for text in found:
        assert "<" not in text
        assert ">" not in text
        assert "&" not in text.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "")
    where = slack.message(made, "firing")["blocks"][1]["fields"][0]["text"]
    assert where.count("`") == 2


def test_names_do_not_turn_the_text_of_a_message_around() -> None:
    shown = texts(slack.message(payload(title="Inf in txt\u202egnp.exe"), "firing"))
    assert not any("\u202e" in text for text in shown)
    assert any("txt\\u202egnp.exe" in text for text in shown)


def test_long_texts_fit_slacks_limits_and_are_not_cut_within_an_entity() -> None:
    long = "<&>" * 5000
    made = payload(title=long, cause=long, fix=[{"kind": "code", "text": long}] * 9)
    made["run"]["name"] = long
    made["incident"]["place"]["module"] = long
    body = slack.message(made, "firing")
    assert len(body["blocks"][0]["text"]["text"]) <= 150
    for block in body["blocks"]:
        for text in texts(block):
            assert len(text) <= 3000
            assert "&" not in text.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "")
    assert all(len(f["text"]) <= 2000 for f in body["blocks"][1]["fields"])
    assert len(body["text"]) <= 3000


def test_without_a_public_url_paths_are_written_instead_of_broken_buttons() -> None:
    body = slack.message(payload(url="/incidents/1", runbook_url="/runbooks/inf-laundering"), "firing")
    assert "actions" not in [b["type"] for b in body["blocks"]]
    assert "FP8WATCH_PUBLIC_URL" in body["blocks"][-1]["elements"][0]["text"]


def test_the_webhook_body_is_alertmanagers() -> None:
    body = webhook.message(payload(), "firing")
    assert set(body) == {
        "version",
        "groupKey",
        "truncatedAlerts",
        "status",
        "receiver",
        "groupLabels",
        "commonLabels",
        "commonAnnotations",
        "externalURL",
        "alerts",
    }
    [alert] = body["alerts"]
    assert set(alert) == {"status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint"}
    assert alert["labels"] == {
        "alertname": "inf-laundering",
        "run": "test",
        "severity": "critical",
        "module": MODULE,
        "operand": "input",
    }
    assert alert["startsAt"] == "2023-11-14T22:13:20.000000Z"
    assert alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert body["externalURL"] == "https://watch.example"
    resolved = webhook.message(payload(resolved_at=1_700_000_100.0), "resolved")
    assert resolved["alerts"][0]["endsAt"] == "2023-11-14T22:15:00.000000Z"


def test_a_signed_webhook_can_be_checked(receiver_of: Callable[..., Receiver]) -> None:
    receiver = receiver_of()
    WebhookChannel(Target(receiver.url, from_operator=True), secret="s3cret").send(payload(), "firing", "k", 1234.5)
    [got] = receiver.got
    expected = hmac.new(b"s3cret", b"1234." + got.raw, hashlib.sha256).hexdigest()
    assert got.headers["X-Fp8watch-Signature"] == f"sha256={expected}"
    assert got.headers["X-Fp8watch-Timestamp"] == "1234"


def test_notify_test_delivers_and_says_so(
    receiver_of: Callable[..., Receiver], capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = receiver_of()
    environ = {"FP8WATCH_SLACK_WEBHOOK_URL": receiver.url, "FP8WATCH_PUBLIC_URL": "https://watch.example"}
    assert command.main(["test"], environ) == 0
    assert "Test message" in receiver.got[0].body["text"]
    printed = capsys.readouterr().out
    assert printed.startswith("slack: delivered to http://127.0.0.1/… in ")
    assert "secret" not in printed


def test_notify_test_fails_when_it_is_refused_or_unconfigured(
    receiver_of: Callable[..., Receiver], capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = receiver_of((404, {}, b"no_team"))
    assert command.main(["test"], {"FP8WATCH_SLACK_WEBHOOK_URL": receiver.url}) == 1
    assert "HTTP 404 no_team" in capsys.readouterr().out
    assert command.main(["test"], {}) == 2
    assert "set FP8WATCH_SLACK_WEBHOOK_URL" in capsys.readouterr().out
    assert command.main(["test"], {"FP8WATCH_SLACK_WEBHOOK_URL": "ftp://secret/x"}) == 2
    printed = capsys.readouterr().out
    assert "FP8WATCH_SLACK_WEBHOOK_URL" in printed
    assert "secret" not in printed


def test_the_channels_are_those_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("https://hooks.slack.com/services/secret\n")
    environ = {"HOME": "/h", "FP8WATCH_SLACK_WEBHOOK_URL_FILE": str(file), "FP8WATCH_WEBHOOK_URL": "https://h/hook/"}
    settings = Settings.from_environ({**environ, "FP8WATCH_WEBHOOK_SECRET": "k" * 20})
    slack, webhook = channels_of(settings)
    assert [(c.name, c.masked) for c in (slack, webhook)] == [
        ("slack", "https://hooks.slack.com/…"),
        ("webhook", "https://h/…"),
    ]
    assert isinstance(webhook, WebhookChannel)
    assert (webhook.target.url, webhook.secret) == ("https://h/hook/", "k" * 20)  # to the last slash
    assert not any(word in repr((settings, slack, webhook)) for word in ("/secret", "services", "kkk", "hook/"))
    assert channels_of(Settings.from_environ({"HOME": "/h"})) == []


@pytest.mark.parametrize("variable", ["FP8WATCH_SLACK_WEBHOOK_URL", "FP8WATCH_WEBHOOK_URL", "FP8WATCH_WEBHOOK_SECRET"])
def test_a_channels_file_that_cannot_be_used_is_refused(variable: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, word in ((tmp_path / "absent", "cannot be read"), (empty, "is empty")):
        with pytest.raises(SettingError, match=f"{variable}_FILE.*{word}"):
            Settings.from_environ({"HOME": "/h", f"{variable}_FILE": str(path)})
    with pytest.raises(SettingError, match="both set"):
        Settings.from_environ({"HOME": "/h", f"{variable}_FILE": str(empty), variable: "https://x/"})


@pytest.mark.parametrize(
    "url", ["ftp://h/secret", "hooks.slack.com/secret", "https://", "https://u:secret@h/", "http://h/ secret"]
)
def test_a_webhook_that_cannot_work_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(SettingError, match="FP8WATCH_WEBHOOK_URL") as e:
        Settings.from_environ({"HOME": "/h", "FP8WATCH_WEBHOOK_URL": url})
    assert "secret" not in str(e.value)
