"""An incident as an Alertmanager webhook, version 4: receivers made for Alertmanager read it.

Upstream:   fp8watch_server.incidents.messages    Downstream: fp8watch_server.notify.channels
Shapes:     outbox payload -> {"version": "4", "alerts": [one], ...}
Thread:     dispatcher

With a secret the body is signed: `X-Fp8watch-Signature: sha256=<hex of HMAC-SHA256 over timestamp + "." + body>` beside
`X-Fp8watch-Timestamp`, so that a receiver can refuse forgeries and old copies.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from .slack import evidence_line, place_words

RECEIVER = "fp8watch"
_NOT_YET = "0001-01-01T00:00:00Z"  # Go's zero time: how Alertmanager says "still firing"


def rfc3339(seconds: float | None) -> str:
    """Seconds since 1970 as UTC."""
    if seconds is None:
        return _NOT_YET
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def message(payload: dict[str, Any], kind: str) -> dict[str, Any]:
    """The body to post. Labels are those of CONTRACT: alertname, run, severity, module, operand."""
    incident, run = payload["incident"], payload["run"]
    place = incident["place"]
    labels = {
        "alertname": incident["mode"],
        "run": run["id"],
        "severity": incident["severity"],
        "module": place.get("module") or "",
        "operand": place.get("operand") or "",
    }
    annotations = {
        "summary": incident["title"],
        "description": incident["cause"],
        "place": place_words(place),
        "steps": f"{incident['first_step']} to {incident['last_step']}",
        "evidence": evidence_line(incident["evidence"]),
        "fix": "\n".join(f["text"] for f in incident["fix"]),
        "verdict": incident["verdict"],
        "run_name": run["name"],
        "runbook_url": incident["runbook_url"],
    }
    if payload.get("note"):
        annotations["note"] = payload["note"]
    parts = urlsplit(incident["url"])
    group = {"alertname": labels["alertname"], "run": labels["run"]}
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{group["alertname"]}", run="{group["run"]}"}}',
        "truncatedAlerts": 0,
        "status": kind,
        "receiver": RECEIVER,
        "groupLabels": group,
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": f"{parts.scheme}://{parts.netloc}" if parts.netloc else "",
        "alerts": [
            {
                "status": kind,
                "labels": labels,
                "annotations": annotations,
                "startsAt": rfc3339(incident["opened_at"]),
                "endsAt": rfc3339(incident["resolved_at"] if kind == "resolved" else None),
                "generatorURL": incident["url"],
                "fingerprint": incident["fingerprint"],
            }
        ],
    }


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """Value of X-Fp8watch-Signature."""
    signed = str(timestamp).encode() + b"." + body
    return "sha256=" + hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
