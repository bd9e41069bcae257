"""A message as a title and plain text, for services that know no layout of ours.

Shapes:     outbox payload -> Plain
Thread:     dispatcher; pure

Names of runs and modules are hostile, and what a service makes of a text is not known: `<`, `>` and `@` are written so
that none takes them for markup, a link or a mention.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.message import SUMMARY, IncidentNotice, notices_of
from fp8watch_server.notify.phrases import evidence_line, place_words

TITLE_CHARS = 200
TEXT_CHARS = 3000
MAX_FIXES = 3
MAX_TOGETHER = 8
_VERDICT = {"fp8": "FP8", "shared": "not FP8: BF16 would do the same", "unknown": "unknown: compare with BF16"}
_HARMLESS = str.maketrans({"<": "‹", ">": "›", "@": "@\u200b"})


@dataclass(frozen=True)
class Plain:
    """What is sent."""

    title: str
    text: str
    level: str  # critical | warning | info | resolved


def message(payload: MessagePayload, kind: str) -> Plain:
    """The message of a payload. Raises KeyError on a payload that is none."""
    notices = notices_of(payload, kind)
    lead = notices[0]
    level = "resolved" if lead.kind == "resolved" else str(lead.incident["severity"])
    if len(notices) == 1 and kind != SUMMARY:
        title, text = _headline(lead), "\n".join(_lines(lead, whole=True))
    else:
        title = f"{len(notices)} incidents, first {_headline(lead)}"
        parts = ["\n".join([_headline(n), *_lines(n, whole=False)]) for n in notices[:MAX_TOGETHER]]
        left = len(notices) - MAX_TOGETHER
        text = "\n\n".join([*parts, f"{left} more on the pages"] if left > 0 else parts)
    return Plain(_harmless(title, TITLE_CHARS), _harmless(text, TEXT_CHARS), level)


def _headline(notice: IncidentNotice) -> str:
    mark = "Resolved" if notice.kind == "resolved" else notice.incident["severity"]
    return f"{mark}: {notice.incident['title']}"


def _lines(notice: IncidentNotice, *, whole: bool) -> list[str]:
    incident = notice.incident
    first, last = incident["first_step"], incident["last_step"]
    when = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [f"Run: {notice.run['name']}, {when}", f"Where: {place_words(incident['place']) or 'whole run'}"]
    if whole:
        lines.append(f"Verdict: {_VERDICT.get(incident['verdict'], incident['verdict'])}")
        lines.append(f"Evidence: {evidence_line(incident['evidence'])}")
    if notice.kind == "firing":
        if whole:
            lines.append(f"Cause: {incident['cause']}")
        fixes = incident["fix"][: MAX_FIXES if whole else 1]
        lines += [f"Fix: {fix['text']}" for fix in fixes]
    if notice.note:
        lines.append(notice.note)
    lines.append(f"Incident: {incident['url']}")
    if whole:
        lines.append(f"Runbook: {incident['runbook_url']}")
    return lines


def _harmless(text: str, max_chars: int) -> str:
    safe = "".join(c if c.isprintable() or c == "\n" else " " for c in text).translate(_HARMLESS)
    return safe if len(safe) <= max_chars else safe[: max_chars - 1] + "…"
