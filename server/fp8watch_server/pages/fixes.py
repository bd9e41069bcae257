"""The sentence of a fix, with what can be pasted picked out of it.

Shapes:     str -> Markup, and the text that the copy button takes
Thread:     any; pure functions

Fixes are written as sentences ("FP8_QUANT_FWD_INP_AMAX_EPS=1e-12; if tiles still degenerate, 1e-10."): what belongs
into a shell or a script is found by its form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

from fp8watch_server.pages.markdown import prose

MAX_CHARS = 4000
_VALUE = r"[\w+-]+(?:\.\d+)?(?:e-?\d+)?"
_WORD = r"(?:hybrid|e4m3|e5m2|blockwise|tensorwise|delayed|mxfp8|max|most_recent)"
_ARGUMENTS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_SNIPPET = re.compile(
    rf"(?P<env>\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+={_VALUE})"  # a variable with its value
    rf"|(?P<flag>(?<![\w-])--[a-z][\w-]+(?:[ =](?:\d+(?:\.\d+)?|{_WORD})\b)?)"  # a trainer's flag, with its value
    rf"|(?P<call>\b[A-Za-z_][\w.]*{_ARGUMENTS})"  # a call, with up to three levels of parentheses
    r"|(?P<argument>\b[a-z]\w*=(?:True|False|None)\b)"  # an argument of a call
    r"|`(?P<code>[^`]+)`"
)


def _snippets(text: str) -> Iterator[str]:
    for match in _SNIPPET.finditer(text[:MAX_CHARS]):
        yield next(group for group in match.groups() if group is not None)


def to_copy(text: str) -> str:
    """What the copy button takes: the variables, flags and calls of a fix, else the whole sentence."""
    return " ".join(_snippets(text)) or text[:MAX_CHARS]


def has_code(text: str) -> bool:
    """Whether anything of it can be pasted."""
    return any(True for _ in _snippets(text))


def render(text: str) -> Markup:
    """The sentence, with what can be pasted set as code."""
    out: list[Markup] = []
    at = 0
    for match in _SNIPPET.finditer(text[:MAX_CHARS]):
        snippet = next(group for group in match.groups() if group is not None)
        out += [prose(text[at : match.start()]), Markup("<code>{}</code>").format(snippet)]
        at = match.end()
    rest = text[at:MAX_CHARS]
    return Markup("").join([*out, prose(rest), escape("…" if len(text) > MAX_CHARS else "")])
