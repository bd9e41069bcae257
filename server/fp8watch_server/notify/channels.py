"""The channels that messages go out on, from the environment of the collector.

Upstream:   fp8watch_server.notify.slack, fp8watch_server.notify.webhook    Downstream: fp8watch_server.notify.outbox
Shapes:     outbox payload -> one HTTP request
Thread:     dispatcher, one per channel
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from . import slack, webhook
from .target import Answer, Target, TargetError

SLACK_URL = "FP8WATCH_SLACK_WEBHOOK_URL"
WEBHOOK_URL = "FP8WATCH_WEBHOOK_URL"
WEBHOOK_SECRET = "FP8WATCH_WEBHOOK_SECRET"
VARIABLES = (SLACK_URL, WEBHOOK_URL, WEBHOOK_SECRET)
"""Each may be given as `<name>_FILE` instead: the path of a file that holds the value."""


class Channel(Protocol):
    """Somewhere to send messages to."""

    @property
    def name(self) -> str:
        """As stored in outbox.channel; one per process."""
        ...

    @property
    def min_interval_s(self) -> float:
        """Least time between two messages."""
        ...

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        ...

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt. Raises Unreachable or TargetError."""
        ...


@dataclass(frozen=True)
class SlackChannel:
    """A Slack incoming webhook; Slack allows one message a second per URL."""

    target: Target
    name: str = "slack"
    min_interval_s: float = 1.0

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        body = msgspec.json.encode(slack.message(payload, kind))
        return self.target.post(body, {"Content-Type": "application/json", "Idempotency-Key": idempotency_key})


@dataclass(frozen=True)
class WebhookChannel:
    """A generic receiver of Alertmanager's webhook body."""

    target: Target
    secret: str = field(default="", repr=False)
    name: str = "webhook"
    min_interval_s: float = 0.0

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        body = msgspec.json.encode(webhook.message(payload, kind))
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        if self.secret:
            headers["X-Fp8watch-Timestamp"] = str(int(now))
            headers["X-Fp8watch-Signature"] = webhook.signature(self.secret, int(now), body)
        return self.target.post(body, headers)


def channels_from_environ(environ: Mapping[str, str] = os.environ) -> list[Channel]:
    """The channels that the operator configured; none is fine.

    Raises:
        TargetError: naming the variable, the rule and the remedy, never the URL.
    """
    channels: list[Channel] = []
    if url := _secret(environ, SLACK_URL):
        channels.append(SlackChannel(_target(SLACK_URL, url)))
    if url := _secret(environ, WEBHOOK_URL):
        channels.append(WebhookChannel(_target(WEBHOOK_URL, url), secret=_secret(environ, WEBHOOK_SECRET)))
    return channels


class _Settings(Protocol):
    """What is read of the collector's settings."""

    @property
    def slack_webhook_url(self) -> str:
        """Empty for none."""
        ...


def channels_of(settings: _Settings, environ: Mapping[str, str] = os.environ) -> list[Channel]:
    """The channels of a collector: Slack as its settings say, the generic webhook from the environment.

    Raises:
        TargetError: naming the variable, the rule and the remedy, never the URL.
    """
    rest = {k: v for k, v in environ.items() if not k.startswith(SLACK_URL)}
    channels = channels_from_environ(rest)
    if settings.slack_webhook_url:
        channels.insert(0, SlackChannel(_target(SLACK_URL, settings.slack_webhook_url)))
    return channels


def _target(variable: str, url: str) -> Target:
    try:
        return Target(url, from_operator=True)
    except TargetError as e:
        raise TargetError(f"{variable}: {e}") from None


def _secret(environ: Mapping[str, str], variable: str) -> str:
    value, path = environ.get(variable, "").strip(), environ.get(f"{variable}_FILE", "").strip()
    if value and path:
        raise TargetError(f"{variable} and {variable}_FILE are both set; unset one")
    if not path:
        return value
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise TargetError(
            f"{variable}_FILE={path!r} cannot be read ({type(e).__name__}); name a readable file"
        ) from None
    if not value:
        raise TargetError(f"{variable}_FILE={path!r} is empty; write the value into it")
    return value
