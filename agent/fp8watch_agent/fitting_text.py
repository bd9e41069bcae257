"""Text of a guest's program as a collector takes it: names of modules, hosts and scripts, facts. For one text that a collector
refuses it takes no record of a whole session.

Shapes:     str -> str of UTF-8 without NUL, of so many characters at most
Thread:     where attach runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fp8watch_agent.record import Site
from fp8watch_agent.session import Session

MAX_NAME_CHARS, MAX_TEXT_CHARS, MAX_FACT_CHARS = 512, 4096, 65536
"""As docs/wire.md has them."""

Fact = str | int | float | bool


def fitted(text: str, max_chars: int) -> str:
    """The text itself where it fits; else what cannot be written is escaped, and what is too long has its middle cut out."""
    if len(text) <= max_chars and text.isprintable():
        return text
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    if len(text) <= max_chars:
        return text
    half = (max_chars - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def fitted_site(site: Site) -> Site:
    """With the name of its module fitted."""
    module = fitted(site.module, MAX_NAME_CHARS)
    return site if module == site.module else replace(site, module=module)


def fitted_facts(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Names and texts fitted."""
    return {
        fitted(name, MAX_NAME_CHARS): fitted(value, MAX_FACT_CHARS) if isinstance(value, str) else value
        for name, value in facts.items()
    }


def fitted_session(session: Session) -> Session:
    """Texts fitted that are the program's and the host's."""
    return replace(
        session,
        run_name=fitted(session.run_name, MAX_TEXT_CHARS),
        host=fitted(session.host, MAX_TEXT_CHARS),
        facts=fitted_facts(session.facts),
    )
