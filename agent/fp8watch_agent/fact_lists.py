"""Lists of modules in one fact of a session: whole items, and how many more there were no room for.

Shapes:     items -> "a (reason); b (reason); and 3 more", of MAX_FACT_CHARS at most
Thread:     any
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_FACT_CHARS = 2000
_MORE = re.compile(r"(?:^|; )and (\d{1,9}) more$")


def joined(items: Iterable[str]) -> str:
    """As many as fit into a fact, each of them whole, and the number of the others."""
    items = list(items)
    text = "; ".join(items)
    if len(text) <= MAX_FACT_CHARS:
        return text
    room, num = MAX_FACT_CHARS - len(f"and {len(items)} more"), 0
    while len(items[num]) + len("; ") <= room:
        room -= len(items[num]) + len("; ")
        num += 1
    return "; ".join([*items[:num], f"and {len(items) - num} more"])


def without_number(text: str) -> tuple[str, int]:
    """The items of a list alone, and how many more there are; 0 where all have room, and of agents that did not say it."""
    found = _MORE.search(text)
    return (text, 0) if found is None else (text[: found.start()], int(found[1]))
