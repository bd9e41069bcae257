"""Which incident a finding belongs to: the same, its root, its consequence, or none yet.

Upstream:   fp8watch_server.detect.precedence    Downstream: fp8watch_server.incidents.fold
Shapes:     (open incidents, finding) -> incident or None
Thread:     detect worker; pure functions over rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fp8watch_server.detect.finding import NONFINITE_MODES, Finding, SiteFacts
from fp8watch_server.detect.precedence import explains

from .quiet import CLOSE_AFTER_STEPS

SPREADING = NONFINITE_MODES | {"optimizer-divergence"}
GLOBAL_ROOTS = SPREADING | {"silent-data-corruption", "cross-rank-disagreement", "recipe-mismatch", "scale-rounding"}
"""Causes whose consequences show anywhere; of the others, in the same module."""


@dataclass
class Open:
    """An open incident while findings are folded in."""

    row: dict[str, Any]
    flow: int
    weight_born: bool
    origin_rank: int
    num_events: int  # rows of incident_event
    stride: int = 1  # steps between the samples that its evidence comes from
    muted: frozenset[str] = frozenset()  # modes that it was found to explain
    ranks: frozenset[int] = frozenset()  # as stored
    told_severity: str = ""  # of the row as stored
    change: Literal["opened", "updated", "rerooted"] | None = None
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


def target_of(incidents: Sequence[Open], finding: Finding, window_steps: int) -> Open | None:
    """The open incident that this finding belongs to."""
    stride = int(finding.extra.get("stride", 1))
    window = window_steps * stride

    def near(i: Open) -> bool:
        return bool(i.row["first_step"] - window <= finding.step <= i.row["last_step"] + window)

    def here(i: Open) -> bool:
        """The same place, within the clean steps that would have closed it: whether or not the closing came by yet."""
        quiet = CLOSE_AFTER_STEPS * stride
        same_place = finding.site in i.row["sites"][:1]
        return same_place and bool(i.row["first_step"] - quiet < finding.step < i.row["last_step"] + quiet)

    same = [i for i in incidents if i.row["mode"] == finding.mode]
    for i in same:
        if near(i) or here(i):
            return i
    if finding.mode not in NONFINITE_MODES:
        return same[-1] if same and finding.extra.get("consequence") else None
    family = [i for i in incidents if i.row["mode"] in SPREADING and near(i)]
    for i in family:
        spread = finding.extra.get("weight_born") or finding.extra.get("consequence")
        if spread and finding.step >= i.row["first_step"]:
            return i
        if i.weight_born and finding.step <= i.row["first_step"]:
            return i  # its cause, from a rank that came later
        if finding.step == i.row["first_step"] and finding.rank != i.origin_rank:
            return i  # what is shared between ranks broke in all of them at once
    return same[-1] if same and finding.extra.get("consequence") else None


def covering(closed: Sequence[Open], finding: Finding, window_steps: int) -> Open | None:
    """The resolved incident that a finding belongs to: a rank, or a spool, that was later than the clean steps."""
    window = window_steps * int(finding.extra.get("stride", 1))
    for i in closed:
        after = 0 if finding.rank in i.ranks else window  # of a rank that was seen, what comes after it is news
        within = i.row["first_step"] - window <= finding.step <= i.row["last_step"] + after
        if within and i.row["mode"] == finding.mode:
            return i
    return None


def root_of(
    incidents: Sequence[Open], finding: Finding, sites: Mapping[int, SiteFacts], window_steps: int
) -> Open | None:
    """The open incident that explains this finding: it is muted."""
    for i in incidents:
        if explains(i.row["mode"], finding.mode) and _related(i, finding, sites, i.row["mode"], window_steps):
            return i
    return None


def explained_by(
    incidents: Sequence[Open], finding: Finding, sites: Mapping[int, SiteFacts], window_steps: int
) -> Open | None:
    """The open incident that this finding explains: it is taken over, and keeps its message."""
    if finding.extra.get("consequence"):
        return None
    for i in incidents:
        if explains(finding.mode, i.row["mode"]) and _related(i, finding, sites, finding.mode, window_steps):
            return i
    return None


def _related(i: Open, finding: Finding, sites: Mapping[int, SiteFacts], root: str, window_steps: int) -> bool:
    stride = max(int(finding.extra.get("stride", 1)), i.stride)
    quiet = (CLOSE_AFTER_STEPS + window_steps) * stride
    if not i.row["first_step"] - quiet <= finding.step <= i.row["last_step"] + quiet:
        return False
    if root in GLOBAL_ROOTS:
        return True
    modules = {sites[s].module for s in i.row["sites"] if s in sites}
    mine = {sites[s].module for s in finding.extra.get("sites", ()) if s in sites}
    if root == "attention-logit-growth":
        return bool({m.rpartition(".")[0] for m in modules} & {m.rpartition(".")[0] for m in mine}) or not modules
    return bool(modules & mine) or not modules or not mine
