"""Safe renderer for the subset of Markdown that runbooks use.

Shapes:     str -> Markup
Thread:     any; pure functions

Supported: `#` headings, paragraphs, `-` and `1.` lists, fenced code, `inline code`, **bold**, *emphasis*, [links](url),
pipe tables, `>` quotes. Everything else is text. Text is escaped first, so no HTML passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_EMPHASIS = re.compile(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])")
_HEADING = re.compile(r"(#{1,4})\s+(.*)")
_BULLET = re.compile(r"\s*[-*]\s+(.*)")
_NUMBER = re.compile(r"\s*\d+[.)]\s+(.*)")
_RULE = re.compile(r"\|?[\s:|-]+\|[\s:|-]*")
_SAFE_URL = re.compile(r"(https?://|/(?!/)|#|[\w.-]+(\.md)?(#[\w-]+)?$)")
_RUNBOOK = re.compile(r"([a-z0-9-]+)\.md(#[\w-]+)?")


def _link(match: re.Match[str]) -> str:
    text, url = match[1], match[2]
    if not _SAFE_URL.match(url) or ":" in url.split("/")[0].removeprefix("https:").removeprefix("http:"):
        return text  # javascript: and similar schemes stay text
    other = _RUNBOOK.fullmatch(url)
    if other:  # runbooks link to each other as files, so that they also work on a code host
        url = f"/runbooks/{other[1]}{other[2] or ''}"
    return f'<a href="{url}">{text}</a>'


def inline(text: str) -> Markup:
    """Code, links, bold and emphasis within one line of text."""
    out: list[str] = []
    for i, part in enumerate(_CODE.split(text)):
        safe = str(escape(part))
        if i % 2:
            out.append(f"<code>{safe}</code>")
        else:
            safe = _BOLD.sub(r"<strong>\1</strong>", safe)
            safe = _EMPHASIS.sub(r"<em>\1</em>", safe)
            out.append(_LINK.sub(_link, safe))
    return Markup("".join(out))


def prose(text: str) -> Markup:
    """A sentence of the collector: `code` is code. The names in it are other people's, so that nothing else is read as markup."""
    parts = (f"<code>{escape(part)}</code>" if i % 2 else str(escape(part)) for i, part in enumerate(_CODE.split(text)))
    return Markup("".join(parts))


def _cells(line: str) -> list[str]:
    return [c.strip() for c in line.strip().strip("|").split("|")]


def _table(lines: list[str]) -> str:
    head = "".join(f"<th>{inline(c)}</th>" for c in _cells(lines[0]))
    rows = ("".join(f"<td>{inline(c)}</td>" for c in _cells(line)) for line in lines[2:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{r}</tr>' for r in rows)}</tbody></table>"


def _items(lines: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """Items of a list; an indented line belongs to the item above it."""
    item: list[str] = []
    for line in lines:
        match = pattern.fullmatch(line)
        if match:
            if item:
                yield " ".join(item)
            item = [match[1]]
        else:
            item.append(line.strip())
    yield " ".join(item)


def _block(lines: list[str]) -> str:
    if heading := _HEADING.fullmatch(lines[0]):
        level = len(heading[1])
        rest = _block(lines[1:]) if lines[1:] else ""
        return f"<h{level}>{inline(heading[2])}</h{level}>{rest}"
    if len(lines) > 1 and "|" in lines[0] and _RULE.fullmatch(lines[1]):
        return _table(lines)
    if all(line.startswith(">") for line in lines):
        return f"<blockquote><p>{inline(' '.join(line[1:].strip() for line in lines))}</p></blockquote>"
    for tag, pattern in (("ul", _BULLET), ("ol", _NUMBER)):
        if pattern.fullmatch(lines[0]):
            items = "".join(f"<li>{inline(item)}</li>" for item in _items(lines, pattern))
            return f"<{tag}>{items}</{tag}>"
        starts = next((i for i, line in enumerate(lines) if i and pattern.fullmatch(line)), None)
        if starts is not None:  # a list that follows its lead-in without an empty line
            return _block(lines[:starts]) + _block(lines[starts:])
    return f"<p>{inline(' '.join(line.strip() for line in lines))}</p>"


def render(source: str) -> Markup:
    """Render a runbook to HTML. Never raises: unsupported syntax is text."""
    html: list[str] = []
    block: list[str] = []
    fence: list[str] | None = None
    for line in [*source.replace("\r\n", "\n").split("\n"), ""]:
        if line.lstrip().startswith("```"):
            if fence is None:
                if block:
                    html.append(_block(block))
                    block = []
                fence = []
            else:
                html.append(f"<pre><code>{escape(chr(10).join(fence))}</code></pre>")
                fence = None
        elif fence is not None:
            fence.append(line)
        elif line.strip():
            block.append(line)
        elif block:
            html.append(_block(block))
            block = []
    if fence is not None:  # an unclosed fence
        html.append(f"<pre><code>{escape(chr(10).join(fence))}</code></pre>")
    return Markup("\n".join(html))
