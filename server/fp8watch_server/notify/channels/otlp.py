"""Incidents as log records over OTLP/HTTP, one record for each that began, changed or ended.

Shapes:     outbox payload -> batch of opentelemetry log records -> POST {url}/v1/logs
Thread:     dispatcher, one per channel

It is a channel like the others, so a record outlives kills of the collector and receivers that are away, and of several
collectors on one database one sends it. `fp8watch.notification.key` is the same in a record that a crash repeated. The
receiver is named by the operator, as the database is: it may be in a private network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fp8watch_agent.version import __version__
from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.channels.base import Channel, Pace, channel
from fp8watch_server.notify.message import IncidentNotice, notices_of
from fp8watch_server.notify.phrases import evidence_line, place_words
from fp8watch_server.notify.safe_http import Answer, Unreachable
from fp8watch_server.otlp.client import SCOPE, Client, OtlpError, masked, resource, standard_secrets
from fp8watch_server.settings.otlp_target import check_endpoint, header_pairs
from fp8watch_server.settings.webhook_url import TargetError

EVENT = "fp8watch.incident"
SEVERITY = {"info": ("INFO", "info"), "warning": ("WARN", "warning"), "critical": ("ERROR2", "critical")}
"""Of an incident that began: OpenTelemetry's number, where syslog's critical is ERROR2, and its text."""
PACE = Pace(group_interval_s=0.0)
RESOLVED = ("INFO", "resolved")
MAX_TEXT_CHARS = 4000
_PERMANENT = frozenset({400, 401, 403, 404, 405, 413, 415, 422})


@channel("otlp", secrets=("url", "headers"), settings={"url": "otlp_endpoint", "headers": "otlp_headers"})
@dataclass(frozen=True)
class OtlpChannel:
    """A receiver of OTLP.

    Raises:
        TargetError: the package is not there, or the address or the headers cannot be used; never with either.
    """

    url: str = field(repr=False)
    headers: str = field(default="", repr=False)
    name: str = "otlp"
    pace: Pace = PACE
    _client: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            header_pairs(self.headers)
            client = Client("logs", check_endpoint(self.url), self.headers, says=False)
        except OtlpError as e:
            raise TargetError(str(e)) from None
        except ValueError:
            raise TargetError(
                "OTLP URL or headers cannot be read; give the receiver's root, like https://otlp.example:4318, and headers as "
                "name=value, separated by commas"
            ) from None
        object.__setattr__(self, "_client", client)

    @classmethod
    def of(cls, url: str, **given: Any) -> Channel:
        """From what a routes file or the environment gives. Raises TargetError."""
        return cls(url, **given)

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return masked(self.url)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        own = (self.headers, *header_pairs(self.headers).values()) if self.headers else ()
        return (self.url, *own, *standard_secrets())

    def send(self, payload: MessagePayload, kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        if self._client.export(records(payload, kind, idempotency_key)):
            return Answer(200, None, "")
        if self._client.status in _PERMANENT:
            return Answer(self._client.status, None, "")
        raise Unreachable(f"{self.masked}: {self._client.reason}")


def records(payload: MessagePayload, kind: str, idempotency_key: str) -> list[Any]:
    """Log records of OpenTelemetry's SDK, the most urgent notice first."""
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    who, scope = resource(__version__), InstrumentationScope(SCOPE, __version__)
    return [ReadableLogRecord(_record(n, idempotency_key), who, scope) for n in notices_of(payload, kind)]


def _record(notice: IncidentNotice, idempotency_key: str) -> Any:
    from opentelemetry._logs import LogRecord, SeverityNumber

    incident = notice.incident
    number, text = RESOLVED if notice.kind == "resolved" else SEVERITY.get(incident["severity"], SEVERITY["warning"])
    at = incident["resolved_at"] if notice.kind == "resolved" else incident["opened_at"]
    return LogRecord(
        timestamp=int((at or incident["opened_at"]) * 1e9),
        observed_timestamp=time.time_ns(),
        severity_number=SeverityNumber[number],
        severity_text=text,
        body=incident["title"][:MAX_TEXT_CHARS],
        event_name=EVENT,
        attributes=attributes(notice) | {"fp8watch.notification.key": idempotency_key},
    )


def attributes(notice: IncidentNotice) -> dict[str, Any]:
    """Facts of an incident; what is not known of its place is absent."""
    incident, place = notice.incident, notice.incident["place"]
    found: dict[str, Any] = {
        "fp8watch.run.id": notice.run["id"],
        "fp8watch.run.name": notice.run["name"],
        "fp8watch.incident.id": incident["id"],
        "fp8watch.incident.state": notice.kind,
        "fp8watch.incident.mode": incident["mode"],
        "fp8watch.incident.severity": incident["severity"],
        "fp8watch.incident.verdict": incident["verdict"],
        "fp8watch.incident.place": place_words(place),
        "fp8watch.incident.evidence": evidence_line(incident["evidence"]),
        "fp8watch.incident.cause": incident["cause"],
        "fp8watch.incident.fix": "\n".join(fix["text"] for fix in incident["fix"]),
        "fp8watch.incident.note": notice.note,
        "fp8watch.incident.url": incident["url"],
        "fp8watch.incident.runbook_url": incident["runbook_url"],
    }
    found |= {
        f"fp8watch.site.{name}": str(place.get(name) or "") for name in ("module", "operand", "direction", "gemm")
    }
    found = {name: text[:MAX_TEXT_CHARS] for name, text in found.items() if text}
    found |= {f"fp8watch.step.{name}": int(incident[f"{name}_step"]) for name in ("first", "last")}  # type: ignore[literal-required]
    ranks = place.get("ranks") or []
    return found | ({"fp8watch.ranks": [int(rank) for rank in ranks[:64]]} if ranks else {})
