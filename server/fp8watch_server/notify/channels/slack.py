"""A message for Slack: Block Kit for an incoming webhook, with a plain text fallback.

Upstream:   fp8watch_server.notify.channels.base
Shapes:     outbox payload -> {"text", "blocks"}
Thread:     dispatcher

One notice is told in full; of several each in a few lines, the most urgent first, and the rest is on the pages.

Limits of Slack: header 150 characters, section 3000, field 2000, 10 fields, button URL 3000, 50 blocks, some 13,000
characters in all. Names of runs
and modules are hostile: `& < >` are escaped, so that no `<!channel>` or link comes out of a name. A text is cut before
it is escaped, never within an entity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from fp8watch_server.incidents.bidi import visible
from fp8watch_server.incidents.payload import Incident, MessagePayload
from fp8watch_server.notify.channels.base import HttpChannel, Pace, channel
from fp8watch_server.notify.flight_text import LEGEND
from fp8watch_server.notify.message import SUMMARY, IncidentNotice, notices_of
from fp8watch_server.notify.phrases import evidence_line, place_words
from fp8watch_server.notify.safe_http import Answer

HEADER_CHARS = 150
SECTION_CHARS = 2600  # 3000 are allowed, but not in each section of one message
FIELD_CHARS = 2000
URL_CHARS = 3000
MAX_FIXES = 3
MAX_TOGETHER = 8
LINE_CHARS = 300

_EMOJI = {"critical": "🔴", "warning": "🟠", "info": "🔵"}
_VERDICT = {"fp8": "FP8", "shared": "not FP8: BF16 would do the same", "unknown": "unknown: compare with BF16"}


SLACK_PACE = Pace(min_interval_s=1.0, max_per_hour=60)
"""Slack allows one message a second per URL, and nobody reads more than one a minute."""


@channel(
    "slack",
    settings={"url": "slack_webhook_url"},
    too_fast="Slack takes one message a second at most; give 1 s or more",
)
@dataclass(frozen=True)
class SlackChannel(HttpChannel):
    """A Slack incoming webhook."""

    name: str = "slack"
    pace: Pace = SLACK_PACE
    shows_flight: ClassVar[bool] = True

    def send(self, payload: MessagePayload, kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        return self.post(msgspec.json.encode(message(payload, kind)), idempotency_key)


def escape(text: object) -> str:
    """`& < >` as Slack wants them, everywhere, and no character that turns the text around."""
    return visible(str(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut(text: object, max_chars: int) -> str:
    """Escape, and shorten so that the escaped text fits."""
    text = str(text)
    if len(escape(text)) <= max_chars:
        return escape(text)
    out, used = [], 0
    for c in text:
        used += len(escape(c))
        if used > max_chars - 1:
            break
        out.append(escape(c))
    return "".join(out) + "…"


def code(text: object, max_chars: int = 300) -> str:
    """Inline code; a name cannot end it."""
    return f"`{cut(str(text).replace('`', 'ʼ').replace(chr(10), ' '), max_chars)}`"


def message(payload: MessagePayload, kind: str) -> dict[str, Any]:
    """The body to post.

    Args:
        payload: of the outbox, as notify.message describes it.
        kind: firing | resolved | summary.
    """
    notices = notices_of(payload, kind)
    if len(notices) > 1 or kind == SUMMARY:
        return _several(notices, kind)
    return _one(notices[0], str(payload.get("flight") or ""))


def _one(notice: IncidentNotice, flight: str = "") -> dict[str, Any]:
    incident, run = notice.incident, notice.run
    resolved = notice.kind == "resolved"
    mark, step = _mark(notice), _steps(incident)
    place = place_words(incident["place"])
    evidence = evidence_line(incident["evidence"])
    fixes = "\n".join(f"{i}. {f['text']}" for i, f in enumerate(incident["fix"][:MAX_FIXES], 1))
    text = f"{mark}: {incident['title']} at {step} of run {run['name']}"
    if not resolved and incident["fix"]:
        text += f". Fix: {incident['fix'][0]['text']}"
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": cut(f"{mark}: {incident['title']}", HEADER_CHARS)}},
        {
            "type": "section",
            "fields": [
                _field("Where", code(place, 1200)),
                _field("When", cut(step, 200)),
                _field("Run", code(run["name"])),
                _field("Verdict", cut(_VERDICT.get(incident["verdict"], incident["verdict"]), 200)),
            ],
        },
    ]
    if not resolved:
        blocks.append(_section("Cause", incident["cause"]))
    blocks.append(_section("Evidence", evidence))
    if flight and not resolved:
        blocks += _flight(flight)
    if not resolved and fixes:
        blocks.append(_section("What to change", fixes))
    if notice.note:
        blocks.append(_section("Note", notice.note))
    sites = "1 site" if incident["num_sites"] == 1 else f"{incident['num_sites']} sites"
    context = f"{incident['mode']} · {sites} · attempt {incident['attempt']} · {incident['id']}"
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": cut(context, 1000)}]})
    blocks += _links(incident)
    return {"text": cut(text, SECTION_CHARS), "blocks": blocks}


def _several(notices: list[IncidentNotice], kind: str) -> dict[str, Any]:
    runs = list(dict.fromkeys(n.run["name"] for n in notices))
    num_firing = sum(n.kind == "firing" for n in notices)
    counted = [f"{num_firing} new"] if num_firing else []
    counted += [f"{len(notices) - num_firing} resolved"] if num_firing < len(notices) else []
    what = f"{_plural(len(notices), 'more incident' if kind == SUMMARY else 'incident')} ({', '.join(counted)})"
    where = f"run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    worst = _EMOJI.get(notices[0].incident["severity"], "🔵") if num_firing else "✅"
    head = f"{worst} {what} in {where}"
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": cut(head, HEADER_CHARS)}},
    ]
    if kind == SUMMARY:
        why = "They were held back: this channel has had its messages of the hour. Each has its page."
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": why}]})
    for notice in notices[:MAX_TOGETHER]:
        lines = [_line(notice, with_run=len(runs) > 1)]
        if notice is notices[0] and notice.kind == "firing":
            lines.append(cut(notice.incident["cause"], 600))
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": "\n".join(lines)}})
    left = len(notices) - MAX_TOGETHER
    if left > 0:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": f"{left} more on the pages"}]})
    titles = "; ".join(f"{_mark(n)}: {n.incident['title']}" for n in notices[:MAX_TOGETHER])
    return {"text": cut(f"{head}: {titles}", SECTION_CHARS), "blocks": blocks}


def _line(notice: IncidentNotice, *, with_run: bool) -> str:
    incident = notice.incident
    facts = [code(place_words(incident["place"]) or "whole run", LINE_CHARS), cut(_steps(incident), 100)]
    if with_run:
        facts.insert(0, code(notice.run["name"], 100))
    title = f"{_mark(notice)}: {incident['title']}"
    lines = [f"*{cut(title, LINE_CHARS)}*", " · ".join(facts)]
    if notice.kind == "firing" and incident["fix"]:
        lines.append(f"Fix: {cut(incident['fix'][0]['text'], LINE_CHARS)}")
    if notice.note:
        lines.append(cut(notice.note, LINE_CHARS))
    url = incident["url"]
    if url.startswith(("http://", "https://")) and len(url) <= LINE_CHARS and not set(url) & set("<>|"):
        lines.append(f"<{escape(url)}|Open incident>")
    return "\n".join(lines)


def _mark(notice: IncidentNotice) -> str:
    severity = notice.incident["severity"]
    return "✅ Resolved" if notice.kind == "resolved" else f"{_EMOJI.get(severity, '🔵')} {severity}"


def _steps(incident: Mapping[str, Any]) -> str:
    first, last = incident["first_step"], incident["last_step"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _plural(num: int, what: str) -> str:
    return f"{num} {what}" if num == 1 else f"{num} {what}s"


def _field(name: str, value: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": f"*{name}*\n{value}"}


def _section(name: str, text: str) -> dict[str, Any]:
    head = f"*{name}*\n"
    return {"type": "section", "text": {"type": "mrkdwn", "text": head + cut(text, SECTION_CHARS - len(head))}}


def _flight(lines: str) -> list[dict[str, Any]]:
    """The flight recorder in characters of one width; a name cannot end them."""
    shown = cut(lines.replace("`", "ʼ"), SECTION_CHARS - 40)
    text = f"*Flight recorder*\n```\n{shown}\n```"
    legend = {"type": "context", "elements": [{"type": "mrkdwn", "text": LEGEND}]}
    return [{"type": "section", "text": {"type": "mrkdwn", "text": text}}, legend]


def _links(incident: Incident) -> list[dict[str, Any]]:
    """Buttons where the addresses are whole (FP8WATCH_PUBLIC_URL is set); the paths as text where they are not."""
    links = [("Open incident", incident["url"], "incident"), ("Runbook", incident["runbook_url"], "runbook")]
    if all(url.startswith(("http://", "https://")) and len(url) <= URL_CHARS for _, url, _ in links):
        return [
            {
                "type": "actions",
                "elements": [
                    {"type": "button", "text": {"type": "plain_text", "text": text}, "url": url, "action_id": action}
                    for text, url, action in links
                ],
            }
        ]
    paths = " · ".join(f"{text}: {cut(url, 300)}" for text, url, _ in links)
    hint = "set FP8WATCH_PUBLIC_URL for links"
    return [{"type": "context", "elements": [{"type": "mrkdwn", "text": f"{paths} ({hint})"}]}]
