"""What a token opens: scopes, the runs that it names, and until when.

Shapes:     frozen data
Thread:     any

The grant of a request travels in its ASGI scope, from the middleware that read the token to the routes that know which
run is meant: a batch names its run inside its body.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fp8watch_server.http.errors import Problem

ALL_RUNS = "*"
MAX_PATTERNS = 64
_KEY = "fp8watch.grant"


@dataclass(frozen=True)
class Grant:
    """One token's worth."""

    scopes: frozenset[str]
    runs: tuple[str, ...] = (ALL_RUNS,)
    """Shell patterns of run ids: `*`, `?` and `[...]`, case-sensitive."""
    expires_at: float | None = None
    """Seconds since 1970; None: never."""
    tenant: str = "default"
    """Whose token it is, for quotas."""

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and time.time() >= self.expires_at

    def names(self, run_id: str) -> bool:
        """Whether a run is one of its runs."""
        return self.runs == (ALL_RUNS,) or any(fnmatchcase(run_id, pattern) for pattern in self.runs)

    def require(self, run_id: str) -> None:
        """Refuse a run that it does not name.

        Raises:
            Problem: 403.
        """
        if not self.names(run_id):
            raise Problem(
                403,
                f"the token is for the runs {', '.join(self.runs)[:200]}, not for {run_id[:200]!r}",
                rule="a token is worth the runs that it names",
                remedy="use a token of this run: fp8watch token create NAME --runs PATTERN; FP8WATCH_RUN names the run",
                error="token-runs",
            )


OPEN = Grant(frozenset({"ingest", "read", "admin"}))
"""Of whoever comes while there are no tokens."""


def attach(scope: MutableMapping[str, Any], grant: Grant) -> None:
    """Note what a request was let in with."""
    scope[_KEY] = grant


def of(scope: MutableMapping[str, Any]) -> Grant:
    """What a request was let in with."""
    found = scope.get(_KEY, OPEN)
    assert isinstance(found, Grant)
    return found


def patterns_of(text: str) -> tuple[str, ...]:
    """Patterns out of a list with commas.

    Raises:
        ValueError: with the rule.
    """
    patterns = tuple(dict.fromkeys(p.strip() for p in text.split(",") if p.strip()))
    if not 1 <= len(patterns) <= MAX_PATTERNS or any(len(p) > 200 or not p.isprintable() for p in patterns):
        rule = f"must be 1 to {MAX_PATTERNS} shell patterns of at most 200 printable characters, separated by commas"
        raise ValueError(f"runs {text[:100]!r}: {rule}; such as 'team-a-*'")
    return patterns
