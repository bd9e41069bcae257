"""Whatever a collector logs, at whatever level, the addresses that it sends to are not in it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector.kit import Agent, Serving, make_site
from notify.receiver import Receiver

from fp8watch_server.http.logs import JsonLines, TextLines
from fp8watch_server.settings import Settings

SITE = make_site("up")
KEY = "key-of-the-signature"


def with_secret(receiver: Receiver, secret: str) -> str:
    return receiver.url.replace("/services/T0/B0/secret", secret)


def told_of_a_broken_run(tmp_path: Path, receivers: list[Receiver], **env: str) -> str:
    """What a collector logs while it sends a message to each receiver, of which some fail at first."""
    env |= {"FP8WATCH_TEST_WHOLE": "1", "FP8WATCH_LOG_LEVEL": "debug"}
    with Serving(tmp_path, "--port", "0", **env) as serving, httpx.Client(base_url=serving.url, timeout=20) as client:
        agent = Agent(client).register([SITE])
        infinite = [0] * 4 + [1, 0]
        agent.send([SITE], list(range(6)), fields={"num_inf": infinite, "num_sentinel_tiles": infinite})
        for receiver in receivers:
            receiver.wait_for(2, 30)
        time.sleep(0.2)
        _, err = serving.kill(15)
    return err


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_address_is_in_the_log_of_a_collector_that_says_all(
    tmp_path: Path, receiver_of: Callable[..., Receiver], log_format: str
) -> None:
    failing = [(500, {}, b""), (0, {}, b"")]
    receivers = [receiver_of(failing[i % 2]) for i in range(4)]
    secrets = [f"/services/T00000/B00000/secret-of-receiver-{i}?key=word%20and-more-{i}" for i in range(4)]
    urls = [with_secret(r, s) for r, s in zip(receivers, secrets, strict=True)]
    routes = tmp_path / "routes.toml"
    (tmp_path / "two").write_text(urls[2])
    (tmp_path / "three").write_text(urls[3])
    routes.write_text(
        '[channels.two]\nkind = "slack"\nurl_file = "two"\n'
        '[channels.three]\nkind = "alertmanager"\nurl_file = "three"\n'
        '[[routes]]\nchannels = ["slack", "webhook", "two", "three"]\n'
    )
    err = told_of_a_broken_run(
        tmp_path,
        receivers,
        FP8WATCH_SLACK_WEBHOOK_URL=urls[0],
        FP8WATCH_WEBHOOK_URL=urls[1],
        FP8WATCH_WEBHOOK_SECRET=KEY,
        FP8WATCH_ROUTES=str(routes),
        FP8WATCH_LOG_FORMAT=log_format,
    )
    assert "fp8watch" in err, "nothing was logged, so nothing was shown"
    for word in ("secret-of-receiver", "T00000", "B00000", "and-more", KEY):
        assert word not in err, [line for line in err.splitlines() if word in line]
    assert "urllib3" not in err


@pytest.mark.parametrize("kind", [TextLines, JsonLines])
def test_an_address_is_masked_in_parts_too(kind: Any) -> None:
    url = "https://hooks.example/services/T00/B00/abcdefghijklmnopqrstuvwx?token=ä%20bcdefghijklmnopq"
    secrets = Settings("sqlite:///x.db", slack_webhook_url=url).secrets
    try:
        raise ConnectionError("no answer: /services/T00/B00/abcdefghijklmnopqrstuvwx")
    except ConnectionError:
        import sys

        trace = sys.exc_info()
    lines = [
        ("%s", (url,)),
        (
            '%s://%s:%s "%s %s %s" %s',
            ("https", "hooks.example", 443, "POST", url.partition("example")[2], "HTTP/1.1", 200),
        ),
        ("%s", ("/services/T00/B00/abcdefghijklmnopqrstuvwx?token=%C3%A4%20bcdefghijklmnopq",)),
        ("%s", ("abcdefghijklmnopqrstuvwx",)),
        ("%s", ("ä bcdefghijklmnopq",)),
        ("the services of T00 are in /api/v1/runs", ()),
    ]
    texts = []
    for message, args in lines:
        record = logging.LogRecord("urllib3.connectionpool", logging.WARNING, "f.py", 1, message, args, trace)
        text = kind(secrets).format(record)
        texts.append(json.dumps(json.loads(text), ensure_ascii=False) if kind is JsonLines else text)
    for text in texts:
        assert "***" in text, "the traceback"
        for word in ("abcdefghijkl", "bcdefghijklmnopq", "/T00/"):
            assert word not in text, text
    assert "the services of T00 are in /api/v1/runs" in texts[-1], "words that logs need were masked"


@pytest.mark.parametrize(
    "url", ["https://ops.example/alerts", "http://10.0.0.7:9/fp8watch", "https://x.example/v1/runs"]
)
def test_words_of_an_address_stay_in_other_lines(url: str) -> None:
    lines = TextLines([url])
    for line in ("GET /alerts/history 200", "/var/lib/fp8watch/fp8watch.db is locked", "PUT /v1/runs/a/sites 503"):
        assert lines.clean(line) == line
    assert url not in lines.clean(f"no answer from {url}")


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("https://u:p4ssw0rd@hooks.example/x", "who is u with p4ssw0rd"),
        ("https://hooks.example/?t=p4ssw0rd-1", "POST /?t=p4ssw0rd-1 HTTP/1.1"),
        ("https://hooks.example/in/p4ssw0rd-1", "told p4ssw0rd-1"),
    ],
)
def test_short_tokens_and_passwords_of_an_address_are_masked(url: str, line: str) -> None:
    assert "p4ssw0rd" not in TextLines([url]).clean(line)
