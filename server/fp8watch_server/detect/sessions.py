"""What the sessions of a run say of themselves, compared.

Shapes:     SessionFacts, SiteFacts -> changes
Thread:     detect worker

Compared are: a session with the one before it on the same rank (a restart with other flags), ranks of one attempt with
each other, what was declared with what is in effect, forward with recomputation, and a run with the checkpoint that it
loaded. Two facts that go under other names say the same thing: `checkpoint.<fact>` and `declared.<fact>` are compared
with `<fact>`; `checkpoint_fingerprint` and `recompute_fingerprint` with the session's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fp8watch_agent.amax_group import AMAX_RANKS_FACT
from fp8watch_agent.experts import EXPERTS_FACT
from fp8watch_agent.fitting_text import FACTS_CUT_FACT
from fp8watch_agent.module_settings import SETTING, SETTINGS_FACT, decode_settings
from fp8watch_agent.roles import (
    EMBEDDING,
    NORM,
    OUTPUT_HEAD,
    ROLES_FACT,
    ROUTER,
)
from fp8watch_server.detect.finding import SiteFacts

MAX_NAMED = 8
FLAG = "flag."
"""A fact that a trainer's own flag gave."""
NOT_GIVEN = "not given"
"""Value of a flag that one of two sessions has and the other has not."""
NOT_TAKEN_FACT = "not_taken"
"""Fact of a session: weights that it does not watch, with the reason of each."""
SILENT_FACT = "silent"
"""... those that it was to watch, and that send nothing, with the reason of each."""
BLIND_FACT = "blind"
"""... that these are more than a tenth of what was announced, and who."""
_IGNORED = frozenset(
    {
        # told as coverage, by name
        *("left_out", "num_linears", "declared_not_effective", "configuration_warning", "te_unread"),
        # of the model, or of the loop
        *(
            "gemm_flops_observed",
            NOT_TAKEN_FACT,
            "not_called",
            SILENT_FACT,
            "silent_share",
            "not_counted",
            BLIND_FACT,
            "no_step_ended",
            *("logits_unseen", "gradients_unseen"),
            "replaced",
            "device",
            "restart_count",
            FACTS_CUT_FACT,
            AMAX_RANKS_FACT,  # of the group that this rank is in
            ROLES_FACT,
        ),
        EXPERTS_FACT,
        SETTINGS_FACT,  # told as what changed in it
        # of one load, and of what was written
        *("checkpoints", "loaded_weights", "loaded_codes", "loaded_scales", "loaded_delayed", "loaded_moments"),
    }
)
_SITE_FACTS = ("tile", "format", "power_2_scale", "eps", "recipe")
_END_OF_ITEM = re.compile(r"\)\s*(?:;|$)")
EXPECTED_LEFT_OUT = (OUTPUT_HEAD, EMBEDDING, ROUTER, NORM, "tied", "not multiples", "shape")
"""Reasons of the default filter: these are meant."""


@dataclass(frozen=True)
class SessionFacts:
    """One attach of one process, as registered."""

    session: str
    rank: int
    attempt: int = 1
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)  # this rank's coordinate on each axis: dp, tp, pp, ep, cp
    host: str = ""
    pid: int = 0
    recipe: str = ""
    backend: str = ""
    fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class SessionLike(Protocol):
    """What `sessions_of` reads: the agent's Session, or a row of the session table."""

    session: Any
    rank: Any
    world_size: Any
    mesh: Any
    host: Any
    recipe: Any
    backend: Any
    fingerprint: Any
    versions: Any
    facts: Any


def sessions_of(rows: Iterable[SessionLike]) -> list[SessionFacts]:
    """Facts from anything that has the attributes of `fp8watch_agent.session.Session`."""
    return [
        SessionFacts(
            session=str(r.session),
            rank=int(r.rank),
            attempt=int(getattr(r, "attempt", 1) or 1),
            world_size=int(r.world_size),
            mesh=dict(r.mesh or {}),
            host=str(r.host or ""),
            pid=int(getattr(r, "pid", 0) or 0),
            recipe=str(r.recipe or ""),
            backend=str(r.backend or ""),
            fingerprint=str(r.fingerprint or ""),
            versions=dict(r.versions or {}),
            facts=dict(r.facts or {}),
        )
        for r in rows
    ]


@dataclass(frozen=True)
class Change:
    """One fact that is not what it was, or not what it should be."""

    fact: str
    value: Any
    baseline: Any
    against: str  # the session before | rank N | the checkpoint | what was declared | the forward pass


def left_out(facts: Mapping[str, Any]) -> dict[str, str]:
    """Module -> reason, of the Linears that stay in high precision."""
    *items, _ = _END_OF_ITEM.split(str(facts.get("left_out", "")))  # what was cut off has no end
    parts = [item.rpartition("(") for item in items]
    return {name.strip(): reason for name, _, reason in parts if name.strip() and ")" not in reason}


def differences(new: SessionFacts, old: SessionFacts, against: str) -> list[Change]:
    """Facts of the numerics that differ between two sessions."""
    out: list[Change] = []
    if new.fingerprint and old.fingerprint and new.fingerprint != old.fingerprint:
        out.append(Change("fingerprint", new.fingerprint, old.fingerprint, against))
    for name in sorted({*new.facts, *old.facts}):
        if name in _IGNORED or name.partition(".")[0] in ("checkpoint", "declared", "precision"):
            continue
        value, before = (facts.get(name, NOT_GIVEN) for facts in (new.facts, old.facts))
        known = name in new.facts and name in old.facts
        if (known or name.startswith(FLAG)) and value != before:
            out.append(Change(name, value, before, against))
    for name in ("recipe", "backend"):
        a, b = getattr(new, name), getattr(old, name)
        if a and b and a != b and name not in new.facts:
            out.append(Change(name, a, b, against))
    return out


def settings_changed(new: SessionFacts, old: SessionFacts) -> list[Change]:
    """Numbers that modules of both sessions hold, and that are others now."""
    now, before = (decode_settings(session.facts.get(SETTINGS_FACT)) for session in (new, old))
    return [
        Change(SETTING + name, now[name], before[name], "the session before")
        for name in sorted(now)
        if name in before and now[name] != before[name]
    ]


def own_contradictions(session: SessionFacts) -> list[Change]:
    """What a session says against itself: declared, checkpointed, recomputed otherwise than in effect."""
    facts, out = session.facts, []
    for name in sorted(facts):
        kind, _, fact = name.partition(".")
        if kind in ("checkpoint", "declared") and fact in facts and facts[fact] != facts[name]:
            against = "the checkpoint" if kind == "checkpoint" else "what was declared"
            out.append(Change(fact, facts[fact], facts[name], against))
    for name in ("declared_not_effective", "configuration_warning"):
        if facts.get(name):
            out.append(Change(name, facts[name], "", "what was declared"))
    for name, against in (("checkpoint_fingerprint", "the checkpoint"), ("recompute_fingerprint", "the recomputation")):
        other = facts.get(name)
        if other and session.fingerprint and other != session.fingerprint:
            out.append(Change("fingerprint", session.fingerprint, other, against))
    return out


def blind(new: SessionFacts, known: SessionFacts | None) -> list[Change]:
    """That much of what a session announced sends nothing. Only running shows it, so a session that is known says it too."""
    said = new.facts.get(BLIND_FACT)
    if not said or (known is not None and known.facts.get(BLIND_FACT)):
        return []
    return [Change(BLIND_FACT, str(said), "", "what attach announced")]


def coverage(new: SessionFacts, old: SessionFacts | None) -> list[Change]:
    """Linears that were in FP8 and are not any more, or that a filter left out by surprise."""
    now = left_out(new.facts)
    if old is not None:
        before = left_out(old.facts)
        fresh = {m: r for m, r in now.items() if m not in before}
        against = "the session before"
    else:
        expected = {s.strip() for s in str(new.facts.get("checkpoint.left_out", "")).split(";") if s.strip()}
        if "checkpoint.left_out" not in new.facts and "checkpoint.num_linears" not in new.facts:
            return []
        named = {s.partition(" (")[0] for s in expected}
        fresh = {m: r for m, r in now.items() if m not in named and not any(e in r for e in EXPECTED_LEFT_OUT)}
        against = "the checkpoint"
    if not fresh:
        return []
    covered = int(new.facts.get("num_linears", 0))
    total = covered + len(fresh)
    names = ", ".join(list(fresh)[:MAX_NAMED]) + (
        f" and {len(fresh) - MAX_NAMED} more" if len(fresh) > MAX_NAMED else ""
    )
    return [
        Change("coverage", f"{covered}/{total}", f"{total}/{total}", against),
        Change("left_out", names, "in FP8", against),
    ]


def site_changes(new: SiteFacts, old: SiteFacts) -> list[Change]:
    """Facts of a site that changed."""
    return [
        Change(f"{new.operand}.{name}", _plain(getattr(new, name)), _plain(getattr(old, name)), "the step before")
        for name in _SITE_FACTS
        if not (new.is_probe and old.is_probe) and getattr(new, name) != getattr(old, name)
    ]


def _plain(value: Any) -> Any:
    return "x".join(map(str, value)) if isinstance(value, tuple) else value
