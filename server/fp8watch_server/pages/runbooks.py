"""Runbooks: one page per failure mode, shipped with the collector as Markdown.

Upstream:   fp8watch_server.incidents      Downstream: fp8watch_server.pages.routes
Shapes:     slug -> Markup
Thread:     any
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources

from markupsafe import Markup

from fp8watch_server.pages import markdown

_SLUG = re.compile(r"[a-z0-9-]{1,64}")


def slugs() -> list[str]:
    """Failure modes that have a runbook."""
    folder = resources.files("fp8watch_server.incidents").joinpath("runbooks")
    if not folder.is_dir():
        return []
    return sorted(f.name.removesuffix(".md") for f in folder.iterdir() if f.name.endswith(".md"))


@lru_cache(maxsize=64)
def runbook(slug: str) -> Markup | None:
    """The runbook of a failure mode, or None. A slug cannot leave the folder: it is letters, digits and dashes."""
    if not _SLUG.fullmatch(slug) or slug not in slugs():
        return None
    path = resources.files("fp8watch_server.incidents").joinpath("runbooks", f"{slug}.md")
    return markdown.render(path.read_text(encoding="utf-8"))
