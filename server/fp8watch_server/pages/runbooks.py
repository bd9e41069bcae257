"""Runbooks: one page per failure mode, shipped with the collector as Markdown.

Shapes:     slug -> Markup
Thread:     any
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from markupsafe import Markup

from fp8watch_server.detect.modes import SLUGS, folder_of
from fp8watch_server.pages import markdown

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_SLUG = re.compile(r"[a-z0-9-]{1,64}")


def slugs() -> list[str]:
    """Failure modes that have a runbook."""
    return sorted(slug for slug in SLUGS if _page(slug).is_file())


def _page(slug: str) -> Traversable:
    return resources.files("fp8watch_server.detect.modes").joinpath(folder_of(slug), "runbook.md")


@lru_cache(maxsize=64)
def runbook(slug: str) -> Markup | None:
    """The runbook of a failure mode, or None. A slug cannot leave the folder: it is letters, digits and dashes."""
    if not _SLUG.fullmatch(slug) or slug not in slugs():
        return None
    return markdown.render(_page(slug).read_text(encoding="utf-8"))


@lru_cache(maxsize=64)
def summary(slug: str) -> tuple[str, str]:
    """Title of a runbook that exists, and the first sentence of what the failure is."""
    text = _page(slug).read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    about = text.partition("## What it is\n")[2].partition("\n\n")[0].replace("\n", " ").strip()
    return title, re.split(r"(?<=[.:]) ", about, maxsplit=1)[0].rstrip(":")
