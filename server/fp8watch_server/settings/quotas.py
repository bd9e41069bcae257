"""Quotas of tenants as a text: `team-a=records:50000,runs:20,bytes:100000000000 *=records:200000`.

Shapes:     text -> tenant -> Quota
Thread:     any; pure
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

NAMES = ("records", "runs", "bytes")


@dataclass(frozen=True)
class Quota:
    """What a tenant may have; 0: no limit."""

    records_s: float = 0.0
    runs: int = 0
    num_bytes: int = 0


def parse_quotas(text: str) -> dict[str, Quota]:
    """Tenant -> quota.

    Raises:
        msgspec.ValidationError: it cannot be read.
    """
    found: dict[str, Quota] = {}
    for word in text.split():
        tenant, equals, limits = word.partition("=")
        given: dict[str, int] = {}
        for limit in limits.split(","):
            name, _, value = limit.partition(":")
            if name not in NAMES or name in given or not (value.isascii() and value.isdecimal()) or int(value) < 1:
                raise msgspec.ValidationError
            given[name] = int(value)
        if not equals or not tenant or tenant in found:
            raise msgspec.ValidationError
        found[tenant] = Quota(float(given.get("records", 0)), given.get("runs", 0), given.get("bytes", 0))
    return found


def checked_text(text: str) -> str:
    """The text itself, where it can be read."""
    parse_quotas(text)
    return " ".join(text.split())
