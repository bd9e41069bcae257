"""A message as what an Alertmanager takes at /api/v2/alerts.

Shapes:     outbox payload -> [{labels, annotations, startsAt, endsAt, generatorURL}]
Thread:     dispatcher

An Alertmanager forgets an alert that nobody repeats after `resolve_timeout`, unless it says itself when it ends. A run
may be broken for longer, so a firing alert ends far ahead, and its resolve, with the same labels, ends it for good. A
warning that became critical has other labels: the old alert is ended in the same request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.channels.base import HttpChannel, Pace, channel
from fp8watch_server.notify.channels.webhook import alert, rfc3339
from fp8watch_server.notify.message import IncidentNotice, labels_of, notices_of
from fp8watch_server.notify.safe_http import Answer

FIRING_FOR_S = 30 * 86_400.0
AT_ONCE = Pace(group_wait_s=0.0, group_interval_s=0.0)


@channel("alertmanager")
@dataclass(frozen=True)
class AlertmanagerChannel(HttpChannel):
    """An Alertmanager, which groups, limits and silences by itself: it is told at once, and each time."""

    name: str = "alertmanager"
    pace: Pace = AT_ONCE

    def send(self, payload: MessagePayload, kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        return self.post(msgspec.json.encode(alerts(payload, kind, now)), idempotency_key)


def alerts(payload: MessagePayload, kind: str, now: float) -> list[dict[str, Any]]:
    """The body to post."""
    found = []
    for notice in notices_of(payload, kind):
        found.append(_as_taken(notice, now))
        was = notice.incident.get("was_severity")
        if was and notice.kind == "firing":
            over = replace(notice, kind="resolved", told={**notice.incident, "severity": was})
            found.append(_as_taken(over, now))
    return found


def _as_taken(notice: IncidentNotice, now: float) -> dict[str, Any]:
    made = alert(notice)
    ends_at = now + FIRING_FOR_S if notice.kind == "firing" else notice.incident["resolved_at"] or now
    return {
        "labels": {name: value for name, value in labels_of(notice).items() if value},  # an empty label is no label
        "annotations": made["annotations"],
        "startsAt": made["startsAt"],
        "endsAt": rfc3339(ends_at),
        "generatorURL": made["generatorURL"],
    }
