"""Lists over several databases: each gives its part, and the parts are merged as one database would have them.

Shapes:     connections, and a query for one -> what the query would give for all
Thread:     query pool
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy.engine import Connection

from fp8watch_server.store.queries import encode_cursor

Listed = TypeVar("Listed", bound=Mapping[str, Any])
Page = tuple[list[Listed], str | None]


def merged_page(
    conns: Sequence[Connection], page_of: Callable[[Connection], Page[Listed]], at: str, limit: int
) -> Page[Listed]:
    """A page of a list, the newest first, and the cursor of the page after it.

    Args:
        page_of: the page of one database, after the same cursor and of the same length.
        at: name of the time that the list is sorted by, before the id.
    """
    pages = [page_of(conn) for conn in conns]
    if len(pages) == 1:
        return pages[0]
    found = sorted((item for items, _ in pages for item in items), key=lambda i: (i[at], i["id"]), reverse=True)
    if len(found) <= limit and not any(following for _, following in pages):
        return found, None
    last = found[:limit][-1]
    return found[:limit], encode_cursor(float(last[at]), str(last["id"]))


def merged_choices(found: Iterable[dict[str, list[str]]], limit: int) -> dict[str, list[str]]:
    """What filters offer, of all databases, in alphabetical order."""
    out: dict[str, set[str]] = {}
    for choices in found:
        for name, values in choices.items():
            out.setdefault(name, set()).update(values)
    return {name: sorted(values)[:limit] for name, values in out.items()}
