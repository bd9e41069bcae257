"""Facts that differ, as a finding: mode 10, recipe-mismatch.

Shapes:     changes of sites and sessions -> one finding
Thread:     detect worker
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fp8watch_agent.module_settings import SETTING
from fp8watch_server.detect.finding import Evidence, Finding, SiteFacts
from fp8watch_server.detect.remedies import switch_of
from fp8watch_server.detect.sessions import BLIND_FACT, FLAG, Change

MAX_CHANGES = 32
LOADED = "loaded_"
"""Begins the names of what is not as it was saved, see fp8watch.session.checkpoint_load."""
OF_TRAINING = frozenset({"loaded_weights", "loaded_moments"})
"""Facts of what was loaded that BF16 would compute with as well; codes and scales follow from the weights."""


_NAMES = re.compile(r"(?P<names>.+?)(?: and (?P<more>\d+) more)? of (?P<all>\d+)")


def loaded(changes: Iterable[Change], sites: Iterable[SiteFacts]) -> list[SiteFacts]:
    """The weights that a load changed, as far as it names them: where it is more than half of all, they are no place."""
    told = next((str(c.value) for c in changes if c.fact == "loaded_weights"), "")
    found = _NAMES.fullmatch(told)
    if found is None:
        return []
    names = found["names"].split(", ")
    if found["more"] and 2 * (len(names) + int(found["more"])) > int(found["all"]):
        return []
    modules = {name.removesuffix(".weight") for name in names}
    return [f for f in sites if f.operand == "weight" and f.direction == "rowwise" and f.module in modules]


def mismatch(
    changes: list[Change],
    step: int,
    rank: int,
    sites: list[SiteFacts] | None = None,
    resumed: bool = False,
    backend: str = "",
    facts: Mapping[str, Any] | None = None,
) -> Finding:
    """The finding for facts that differ: all of them, each under the name of what sets it.

    Args:
        backend: of the session, where no site says its own.
        facts: of the session, among them a trainer's flags.
    """
    sites = sorted(sites or [], key=lambda f: f.order)
    first = sites[0] if sites else None
    backend = first.backend if first is not None else backend
    by_flags = any(name.startswith(FLAG) for name in facts or {})
    # A fingerprint says that something changed, the facts say what.
    changes = sorted(changes, key=lambda c: c.fact == "fingerprint")[:MAX_CHANGES]
    blind = {c.fact for c in changes} == {BLIND_FACT}
    settings = bool(changes) and all(c.fact.startswith(SETTING) for c in changes)
    told = [(switch_of(c.fact, backend, by_flags), _text(c.value), _text(c.baseline), c.against) for c in changes]
    return Finding(
        mode="recipe-mismatch",
        severity="info" if settings else "warning",
        step=step,
        rank=rank,
        site=None if first is None else first.id,
        tile=None,
        element=None,
        evidence=tuple(Evidence(name, value, old, "", step) for name, value, old, _ in told),
        verdict="unknown" if blind else "shared" if settings or OF_TRAINING & {c.fact for c in changes} else "fp8",
        rank_in_flow=0,
        extra={
            "sites": [f.id for f in sites[:256]],
            "num_sites": len(sites),
            "operands": sorted({f.operand for f in sites}),
            "changes": told,
            "resumed": resumed,
            "blind": blind,
            "settings": settings,
            "loaded": any(c.fact.startswith(LOADED) for c in changes),
        },
    )


def _text(value: Any) -> float | int | str | None:
    return value if isinstance(value, int | float | str) or value is None else str(value)
