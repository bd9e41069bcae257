"""Text of a guest's program as a collector takes it: names of modules, hosts and scripts, facts. For one text that a collector
refuses it takes no record of a whole session.

Shapes:     str -> str of UTF-8 without NUL, of so many characters at most
Thread:     where attach runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from fp8watch_agent.record import Site
from fp8watch_agent.session import Session

MAX_NAME_CHARS, MAX_TEXT_CHARS, MAX_FACT_CHARS = 512, 4096, 65536
"""As docs/wire.md has them."""
MAX_FACTS_BYTES = 48 << 10
"""Of all facts of a session at attach, as JSON: they lie in the head of the ring file."""
FACTS_CUT_FACT = "facts_cut"
"""Fact of a session: that its facts are too long together, and what became of how many."""
TOO_LONG = "what this session says of itself is too long"

MIN_CUT_CHARS = 128
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


def fitted_together(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """All of them where they fit in MAX_FACTS_BYTES; else the longest have their middle cut out, or the last are left out. It is said."""
    out, longest = dict(facts), MAX_FACT_CHARS
    while len(msgspec.json.encode(out)) > MAX_FACTS_BYTES and longest > MIN_CUT_CHARS:
        longest //= 2
        out = {k: fitted(v, longest) if isinstance(v, str) else v for k, v in facts.items()}
        num_cut = sum(out[k] != v for k, v in facts.items())
        out[FACTS_CUT_FACT] = f"{TOO_LONG}: {num_cut} of {len(facts)} were cut to {longest} characters"
    if len(msgspec.json.encode(out)) <= MAX_FACTS_BYTES:
        return out
    room, kept = MAX_FACTS_BYTES - 256, dict[str, Fact]()
    for name, value in out.items():
        room -= len(msgspec.json.encode({name: value}))
        if room < 0:
            break
        kept[name] = value
    num_left_out = len(facts) - len(kept)
    kept[FACTS_CUT_FACT] = (
        f"{TOO_LONG}: {num_left_out} of {len(facts)} were left out, the others cut to {longest} characters"
    )
    return kept


def fitted_session(session: Session) -> Session:
    """Texts fitted that are the program's and the host's."""
    return replace(
        session,
        run_name=fitted(session.run_name, MAX_TEXT_CHARS),
        host=fitted(session.host, MAX_TEXT_CHARS),
        facts=fitted_together(fitted_facts(session.facts)),
    )
