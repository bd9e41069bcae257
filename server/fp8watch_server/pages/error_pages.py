"""Error pages: what is wrong and what to do, never a stack trace.

Shapes:     PageProblem -> one HTML page with the right status code
Thread:     any
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link to continue from the page."""

    text: str
    url: str


class PageProblem(Exception):
    """Raised by a page handler; rendered as a page.

    Args:
        status: the HTTP status code.
        title: one short line, what is the matter.
        detail: the value and the rule.
        remedy: what to do about it.
        links: where to go from here.
        warning: what somebody has to look at, before everything else.
        code: a line to copy, where the remedy is a command or a line of code.
        watch: an address of live events; when one tells of another version, the page looks again by itself.
        version: the version that the page is of.
    """

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        remedy: str,
        links: tuple[Link, ...] = (),
        code: str = "",
        watch: str = "",
        version: str = "",
        warning: str = "",
    ) -> None:
        super().__init__(f"{title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.remedy = remedy
        self.links = links
        self.code = code
        self.watch = watch
        self.version = version
        self.warning = warning
