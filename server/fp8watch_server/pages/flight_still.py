"""The flight recorder as a still: SVG made by the server, without a browser, for reports and messages.

Shapes:     Flight -> SVG text; the panes and colours of static/flight_paint.js
Thread:     any
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
from sqlalchemy import Connection

from fp8watch_server.incidents.bidi import visible
from fp8watch_server.pages import assets
from fp8watch_server.store import flight, queries
from fp8watch_server.store.done_again import done_again
from fp8watch_server.store.flight_words import said

WIDTH, LEFT, GAP, TOP, RIGHT = 1100, 200, 16, 62, 8
MAX_HEIGHT, MOST, SHADES = 560, 32.0, 16
LINE_CHARS = 165
COLOURS = ("panel", "text", "muted", "faint", "grid", "critical", "accent", *(f"ramp-{k}" for k in range(5)))
PANES = (flight.FPROP, flight.BACKWARD)


def still(
    conn: Connection,
    incident: Mapping[str, Any],
    *,
    theme: str = "light",
    span: int = flight.SPAN,
    names: Mapping[str, str] | None = None,
) -> bytes:
    """The still of an incident: layers in the order of execution × steps around its first step.

    For a report or a message: a whole SVG document of some 10 to 200 kB, without scripts, fonts or links, that can be
    written to a file or put into HTML as it is. Ids of elements are prefixed with the incident's.

    Args:
        incident: as queries.incident gives it; run_id, id, attempt, place and its steps are read.
        theme: "light" or "dark": the colours of the pages.
        span: steps before and after the first one.
        names: module -> what is written instead of its name, where names must not leave the house.

    Raises:
        ValueError: a theme that there is not, or a run that is gone.
    """
    run = queries.run(conn, incident["run_id"])
    if run is None:
        raise ValueError(f"run {incident['run_id']!r} is not there; it was deleted with its steps")
    sites = queries.sites(conn, run["id"])
    if names is not None:
        sites = [{**s, "module": names.get(str(s["module"]), str(s["module"]))} for s in sites]
    found = flight.around(conn, run, sites, int(incident["first_step"]), span)
    data = flight.as_json(conn, run["id"], found)
    key = "f" + re.sub(r"[^0-9A-Za-z]", "", str(incident["id"]))
    again = done_again(conn, incident)
    return drawn(data, [*([again.words()] if again else []), *said(found)], key, theme).encode()


@lru_cache(maxsize=4)
def _colours(theme: str) -> dict[str, str]:
    sheet = assets.static_files()["fp8watch.css"].body.decode()
    block = re.search(rf'\[data-theme="{re.escape(theme)}"\] \{{(.*?)\n\}}', sheet, re.S)
    if block is None:
        raise ValueError(f"theme={theme!r}: one of dark, light; choose one of them")
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block[1]))
    return {name: found[name] for name in COLOURS}


def _ramp(of: Mapping[str, str]) -> list[str]:
    stops = [[int(of[f"ramp-{k}"][i : i + 2], 16) for i in (1, 3, 5)] for k in range(5)]
    out = []
    for i in range(SHADES):
        at = i / (SHADES - 1) * 4
        k = min(3, int(at))
        out.append(
            "#" + "".join(f"{round(a + (b - a) * (at - k)):02x}" for a, b in zip(*stops[k : k + 2], strict=True))
        )
    return out


def _shade(value: float) -> int:
    if value <= 1:
        return 0
    return min(SHADES - 1, round((0.3 + 0.7 * float(np.log2(value)) / float(np.log2(MOST))) * (SHADES - 1)))


def drawn(data: Mapping[str, Any], sentences: list[str], key: str, theme: str) -> str:
    """SVG of what flight.as_json gives."""
    of = _colours(theme)
    ramp, steps, rows = _ramp(of), data["steps"], data["rows"]
    pane = (WIDTH - LEFT - GAP - RIGHT) / 2
    x_of = {flight.FPROP: float(LEFT), flight.BACKWARD: LEFT + pane + GAP}
    cell = pane / max(1, len(steps))
    groups: dict[str, dict[str, list[int]]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row["label"], {p: [] for p in PANES})[row["pane"]].append(i)
    tall = {label: max(len(g[p]) for p in PANES) for label, g in groups.items()}
    height = max(2, min(9, (MAX_HEIGHT - len(groups)) // max(1, sum(tall.values()))))
    between = 2 if height >= 4 else 1
    places: list[tuple[float, float]] = [(0.0, 0.0)] * len(rows)
    parts, y, free = [], float(TOP), -1e9
    for label, group in groups.items():
        whole = tall[label] * height
        for p in PANES:
            for k, i in enumerate(group[p]):
                places[i] = (y + k * whole / len(group[p]), whole / len(group[p]))
        middle = y + whole / 2
        if middle - 5.5 >= free:
            free = middle + 6.5
            parts.append(f'<text class="m" x="{LEFT - 6}" y="{middle + 3.5:.1f}">{_text(_end(label))}</text>')
        y += whole + between
    fills: dict[str, list[str]] = {}
    for i, row in enumerate(rows):
        top, tall_px = places[i]
        left = x_of[row["pane"]]
        classes = [
            f"url(#{key}-u)" if v is None else f"url(#{key}-n)" if v < 0 else ramp[_shade(v)] for v in row["values"]
        ]
        j = 0
        while j < len(classes):
            first = j
            while j < len(classes) and classes[j] == classes[first]:
                j += 1
            w, h = (j - first) * cell, max(1.0, tall_px - (1 if height >= 4 else 0))
            fills.setdefault(classes[first], []).append(
                f"M{left + first * cell:.1f} {top:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z"
            )
    body = [f'<path fill="{fill}" d="{"".join(d)}"/>' for fill, d in fills.items()]
    for i, j, _, _ in data["marks"][:2000]:
        cx, cy = x_of[rows[i]["pane"]] + (j + 0.5) * cell, places[i][0] + places[i][1] / 2
        body.append(f'<path class="b" d="M{cx - 3.5:.1f} {cy - 3.5:.1f}h7v7h-7z"/>')
        body.append(f'<path class="x" d="M{cx - 2.4:.1f} {cy - 2.4:.1f}l4.8 4.8m0-4.8l-4.8 4.8"/>')
    at = data["at"] - steps[0] if steps else -1
    for name, words in ((flight.FPROP, "fprop, read down ↓"), (flight.BACKWARD, "backward, read up ↑")):
        x = x_of[name]
        body.append(f'<text class="h" x="{x:.1f}" y="{TOP - 8}">{words}</text>')
        if steps:
            body.append(f'<text x="{x:.1f}" y="{y + 14:.1f}">{steps[0]}</text>')
            body.append(f'<text x="{x + pane:.1f}" y="{y + 14:.1f}" text-anchor="end">{steps[-1]}</text>')
        if 0 <= at < len(steps):
            x += at * cell
            body.append(f'<path class="s" d="M{x:.1f} {TOP - 4}V{y + 3:.1f}M{x + cell:.1f} {TOP - 4}V{y + 3:.1f}"/>')
            if 50 < at * cell < pane - 50:
                body.append(f'<text x="{x + cell / 2:.1f}" y="{y + 14:.1f}" text-anchor="middle">{data["at"]}</text>')
    lines = [line for sentence in sentences for line in _wrapped(sentence)]
    bottom = y + 34
    for k, line in enumerate(lines):
        parts.append(f'<text class="t" x="8" y="{bottom + 4 + 16 * k:.1f}">{_text(line)}</text>')
    total = bottom + 16 * len(lines) + 4
    title = f"Flight recorder around step {data['at']}"
    legend = _legend(ramp, of, key)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" width="{WIDTH}" height="{total:.0f}" '
        f'role="img" aria-label="{_text(title)}: {_text(" ".join(sentences))}" class="{key}"><style>'
        f".{key} text{{font:11px system-ui,sans-serif;fill:{of['muted']}}}.{key} .m{{font:11px ui-monospace,monospace;fill:{of['text']};"
        f"text-anchor:end}}.{key} .h{{font-weight:600;font-size:12px;fill:{of['text']}}}.{key} .t{{font-size:12.5px;fill:{of['text']}}}"
        f".{key} .b{{fill:{of['critical']}}}.{key} .x{{stroke:{of['panel']};fill:none;stroke-width:1.2}}"
        f".{key} .s{{stroke:{of['critical']};fill:none;stroke-dasharray:2 3}}</style><defs>"
        f'<pattern id="{key}-u" width="5" height="5" patternUnits="userSpaceOnUse"><path d="M0 5L5 0" stroke="{of["faint"]}"/></pattern>'
        f'<pattern id="{key}-n" width="4" height="4" patternUnits="userSpaceOnUse"><path d="M0 0h4v4h-4z" fill="{of["grid"]}"/>'
        f'<path d="M0 0h1v1h-1z" fill="{of["faint"]}"/></pattern></defs><path fill="{of["panel"]}" d="M0 0h{WIDTH}v{total:.0f}h-{WIDTH}z"/>'
        f'<text class="h" x="8" y="20">{_text(title)}</text>{legend}{"".join(parts)}{"".join(body)}</svg>'
    )


def _legend(ramp: list[str], of: Mapping[str, str], key: str) -> str:
    x, out = 330.0, []
    for fill, words in (
        (ramp[0], "inside its band"),
        (ramp[_shade(2)], "2 ×"),
        (ramp[_shade(8)], "8 ×"),
        (ramp[-1], "32 × and more"),
        (of["critical"], "NaN, Inf or sentinel"),
        (f"url(#{key}-u)", "not looked at"),
        (f"url(#{key}-n)", "no band yet"),
    ):
        out.append(f'<path d="M{x} 11h11v11h-11z" fill="{fill}" stroke="{of["faint"]}" stroke-width=".5"/>')
        out.append(f'<text x="{x + 16}" y="20">{words}</text>')
        x += 30 + 6.4 * len(words)
    return "".join(out)


def _text(text: str) -> str:
    """Escaped, and without what XML forbids."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", visible(text)))


def _end(label: str, most: int = 28) -> str:
    return label if len(label) <= most else f"…{label[1 - most :]}"


def _wrapped(sentence: str) -> list[str]:
    lines, line = [], ""
    for word in sentence.split():
        word = word if len(word) <= LINE_CHARS else f"{word[:60]}…{word[-60:]}"
        if line and len(line) + 1 + len(word) > LINE_CHARS:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]
