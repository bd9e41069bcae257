"""An incident as a Slack message: Block Kit for an incoming webhook, with a plain text fallback.

Upstream:   fp8watch_server.incidents.messages    Downstream: fp8watch_server.notify.channels
Shapes:     outbox payload -> {"text", "blocks"}
Thread:     dispatcher

Limits of Slack: header 150 characters, section 3000, field 2000, 10 fields, button URL 3000, 50 blocks. Names of runs
and modules are hostile: `& < >` are escaped, so that no `<!channel>` or link comes out of a name. A text is cut before
it is escaped, never within an entity.
"""

from __future__ import annotations

from typing import Any

from fp8watch_server.incidents.explain import number

HEADER_CHARS = 150
SECTION_CHARS = 3000
FIELD_CHARS = 2000
URL_CHARS = 3000
MAX_FIXES = 3

_EMOJI = {"critical": "🔴", "warning": "🟠", "info": "🔵"}
_VERDICT = {"fp8": "FP8", "shared": "not FP8: BF16 would do the same", "unknown": "unknown: compare with BF16"}


def escape(text: object) -> str:
    """`& < >` as Slack wants them, everywhere."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


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


def place_words(place: dict[str, Any]) -> str:
    """`layers.1.mlp.down_proj input (fprop), tile (37, 5), element (37, 700), ranks 0–3`."""
    words = []
    if place.get("module"):
        words.append(f"{place['module']} {place.get('operand')} ({place.get('gemm')})")
    for name in ("tile", "element"):
        if place.get(name):
            words.append(f"{name} ({place[name][0]}, {place[name][1]})")
    words.append(_ranks(place.get("ranks") or []))
    return ", ".join(w for w in words if w)


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks, {min(ranks)} to {max(ranks)}"


def evidence_line(evidence: list[dict[str, Any]], max_items: int = 5) -> str:
    """`num_inf 1 (was 0), num_sentinel_tiles 1 (was 0), loss 2.31`."""
    items = []
    for e in evidence[:max_items]:
        value = _shown(e["value"])
        unit = f" {e['unit']}" if e.get("unit") and e["unit"] not in ("1", "x", "ratio", "elements", "tiles") else ""
        usual = e.get("baseline")
        items.append(f"{e['field']} {value}{unit}" + ("" if usual is None else f" (normal: {_shown(usual)})"))
    return ", ".join(items)


def _shown(value: object) -> str:
    return {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}.get(value, value) if isinstance(value, str) else number(value)


def message(payload: dict[str, Any], kind: str) -> dict[str, Any]:
    """The body to post.

    Args:
        payload: of the outbox: {"incident": ..., "run": {"id", "name"}, "note"}.
        kind: firing | resolved.
    """
    incident, run = payload["incident"], payload["run"]
    resolved = kind == "resolved"
    mark = "✅ Resolved" if resolved else f"{_EMOJI.get(incident['severity'], '🔵')} {incident['severity']}"
    step = f"step {incident['first_step']}"
    if incident["last_step"] != incident["first_step"]:
        step = f"steps {incident['first_step']} to {incident['last_step']}"
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
    if not resolved and fixes:
        blocks.append(_section("What to change", fixes))
    if payload.get("note"):
        blocks.append(_section("Note", payload["note"]))
    sites = "1 site" if incident["num_sites"] == 1 else f"{incident['num_sites']} sites"
    context = f"{incident['mode']} · {sites} · attempt {incident['attempt']} · {incident['id']}"
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": cut(context, 1000)}]})
    blocks += _links(incident)
    return {"text": cut(text, SECTION_CHARS), "blocks": blocks}


def _field(name: str, value: str) -> dict[str, str]:
    return {"type": "mrkdwn", "text": f"*{name}*\n{value}"}


def _section(name: str, text: str) -> dict[str, Any]:
    head = f"*{name}*\n"
    return {"type": "section", "text": {"type": "mrkdwn", "text": head + cut(text, SECTION_CHARS - len(head))}}


def _links(incident: dict[str, Any]) -> list[dict[str, Any]]:
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
