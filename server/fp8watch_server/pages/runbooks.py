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
