"""A message as an Alertmanager webhook, version 4: receivers made for Alertmanager read it.

Shapes:     outbox payload -> {"version": "4", "alerts": [...], ...}
Thread:     dispatcher

The group is the run, as `group_by: [run]` would make it: `alerts` holds what began and what ended, and what was told
before and is still open, and `status` is `resolved` only when nothing of the run is open any more. A receiver that
opens and closes one ticket per groupKey is therefore right.

With a secret the body is signed: `X-Fp8watch-Signature: sha256=<hex of HMAC-SHA256 over timestamp + "." + body>` beside
`X-Fp8watch-Timestamp`, so that a receiver can refuse forgeries and old copies.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.channels.base import HttpChannel, channel
from fp8watch_server.notify.message import SUMMARY, IncidentNotice, labels_of, notices_of
from fp8watch_server.notify.phrases import evidence_line, place_words
from fp8watch_server.notify.safe_http import Answer

RECEIVER = "fp8watch"
MAX_ALERTS = 64
_NOT_YET = "0001-01-01T00:00:00Z"  # Go's zero time: how Alertmanager says "still firing"


@channel("webhook", secrets=("url", "secret"), settings={"url": "webhook_url", "secret": "webhook_secret"})
@dataclass(frozen=True)
class WebhookChannel(HttpChannel):
    """A generic receiver of Alertmanager's webhook body."""

    name: str = "webhook"
    secret: str = field(default="", repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        return (self.target.url, self.secret) if self.secret else (self.target.url,)

    def send(self, payload: MessagePayload, kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        body = msgspec.json.encode(message(payload, kind, receiver=self.name))
        headers = {}
        if self.secret:
            headers["X-Fp8watch-Timestamp"] = str(int(now))
            headers["X-Fp8watch-Signature"] = signature(self.secret, int(now), body)
        return self.post(body, idempotency_key, headers)


def rfc3339(seconds: float | None) -> str:
    """Seconds since 1970 as UTC."""
    if seconds is None:
        return _NOT_YET
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def message(payload: MessagePayload, kind: str, receiver: str = RECEIVER) -> dict[str, Any]:
    """The body to post. Labels are those of CONTRACT: alertname, run, severity, module, operand."""
    notices = notices_of(payload, kind)
    run = notices[0].run
    still = [IncidentNotice("firing", incident, run, "", incident) for incident in payload.get("open", ())]
    alerts = [alert(notice) for notice in [*notices, *still]]
    shown = alerts[:MAX_ALERTS]
    parts = urlsplit(notices[0].incident["url"])
    group = {} if kind == SUMMARY else {"run": run["id"]}
    matched = ", ".join(f'{name}="{value}"' for name, value in group.items())
    return {
        "version": "4",
        "groupKey": f"{{}}:{{{matched}}}",
        "truncatedAlerts": len(alerts) - len(shown),
        "status": "firing" if any(a["status"] == "firing" for a in alerts) else "resolved",
        "receiver": receiver,
        "groupLabels": group,
        "commonLabels": _common([a["labels"] for a in alerts]),
        "commonAnnotations": _common([a["annotations"] for a in alerts]),
        "externalURL": f"{parts.scheme}://{parts.netloc}" if parts.netloc else "",
        "alerts": shown,
    }


def alert(notice: IncidentNotice) -> dict[str, Any]:
    """One of `alerts`."""
    incident = notice.incident
    annotations = {
        "summary": incident["title"],
        "description": incident["cause"],
        "place": place_words(incident["place"]),
        "steps": f"{incident['first_step']} to {incident['last_step']}",
        "evidence": evidence_line(incident["evidence"]),
        "fix": "\n".join(f["text"] for f in incident["fix"]),
        "verdict": incident["verdict"],
        "run_name": notice.run["name"],
        "runbook_url": incident["runbook_url"],
    }
    if notice.note:
        annotations["note"] = notice.note
    return {
        "status": notice.kind,
        "labels": labels_of(notice),
        "annotations": annotations,
        "startsAt": rfc3339(incident["opened_at"]),
        "endsAt": rfc3339(incident["resolved_at"] if notice.kind == "resolved" else None),
        "generatorURL": incident["url"],
        "fingerprint": incident["fingerprint"],
    }


def _common(each: list[dict[str, str]]) -> dict[str, str]:
    first, *others = each
    return {name: value for name, value in first.items() if all(o.get(name) == value for o in others)}


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """Value of X-Fp8watch-Signature."""
    signed = str(timestamp).encode() + b"." + body
    return "sha256=" + hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
