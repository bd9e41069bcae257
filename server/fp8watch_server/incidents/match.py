"""Matches a finding to an incident: the same, its root cause, its consequence, or none.

Shapes:     (open incidents, finding) -> incident or None
Thread:     detect worker; pure functions over rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fp8watch_server.detect.finding import UNOBSERVED, Finding, SiteFacts
from fp8watch_server.detect.precedence import (
    GLOBAL_ROOTS,
    IN_EFFECT,
    NONFINITE_MODES,
    PRECURSORS,
    SAME_PARENT,
    SPREADING,
    explains,
    explains_there,
    latest,
)
from fp8watch_server.incidents.auto_resolve import CLOSE_AFTER_STEPS

UNEXPLAINED = ("quantiser-fault", "kernel-output-fault")
"""Modes that say where something is wrong; why may be found by a later look."""


@dataclass
class Open:
    """An open incident while findings are folded in."""

    row: dict[str, Any]
    flow: int
    weight_born: bool
    origin_rank: int
    num_events: int  # rows of incident_event
    kind: str = ""  # Finding.kind that it reports; "" for its mode
    topic: str | None = None  # Finding.topic that it reports; None where that is not known
    earliest: int | None = None  # step before which its cause cannot have begun; None for first_step
    opened: int | None = None  # step whose data opened it: by then it had begun; None where that is not known
    stride: int = 1  # steps between the samples that its evidence comes from
    muted: frozenset[str] = frozenset()  # modes that it explains
    names: frozenset[str] = frozenset()  # logged scalars that it tells of
    ranks: frozenset[int] = frozenset()  # as stored
    told_severity: str = ""  # as stored in the row
    change: Literal["opened", "updated", "rerooted"] | None = None
    was_told: tuple[str, str] | None = None  # mode and verdict as stored, where later evidence changed them
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """Its cause for the order of precedence."""
        return self.kind or str(self.row["mode"])


def target_of(
    incidents: Sequence[Open],
    finding: Finding,
    window_steps: int,
    sites: Mapping[int, SiteFacts] = MappingProxyType({}),
    after_clean_steps: int = CLOSE_AFTER_STEPS,
) -> Open | None:
    """The open incident that this finding belongs to."""
    stride = _stride(finding)
    window = window_steps * stride

    def near(i: Open) -> bool:
        return bool(i.row["first_step"] - window <= finding.step <= i.row["last_step"] + window)

    def here(i: Open) -> bool:
        """Same place, within the clean steps that would have resolved it, whether it is resolved by now or not."""
        quiet = after_clean_steps * stride
        same_place = finding.site in i.row["sites"][:1]
        return same_place and bool(i.row["first_step"] - quiet < finding.step < i.row["last_step"] + quiet)

    if finding.extra.get("why"):
        at = finding.extra.get("found_at")
        for i in incidents:  # told before its cause was known
            if i.row["mode"] in UNEXPLAINED and i.row["mode"] != finding.mode and at in i.row["sites"][:1] and near(i):
                return i
    same = [i for i in incidents if i.row["mode"] == finding.mode and _is_told(i, finding, sites)]
    for i in same:
        if near(i) or here(i):
            return i
    if finding.mode not in NONFINITE_MODES:
        return same[-1] if same and finding.extra.get("consequence") else None
    family = [i for i in incidents if i.row["mode"] in SPREADING and i.row["severity"] != "info" and near(i)]
    for i in family:
        spread = finding.extra.get("weight_born") or finding.extra.get("consequence")
        if spread and finding.step >= i.row["first_step"]:
            return i
        if i.weight_born and finding.step <= i.row["first_step"]:
            return i  # its cause, from a late rank
        if finding.step == i.row["first_step"] and finding.rank != i.origin_rank:
            return i  # a shared cause breaks all ranks at once
    return same[-1] if same and finding.extra.get("consequence") else None


def _is_told(i: Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> bool:
    """Whether an incident of its mode is about what a finding is about.

    What begins together is one failure, at however many places; but what a session says nobody observes has an end of its own. What begins
    later is another where it is of another topic, or a warning at a place that the first does not name, however long that one stays. Logged scalars have names for a place. Values that break spread: they
    are one failure wherever.
    """
    other = i.topic is not None and i.topic != finding.topic
    if other and UNOBSERVED in (i.topic, finding.topic):
        return False
    name = finding.scalar
    apart = abs(finding.onset - i.row["first_step"])
    together = apart <= CLOSE_AFTER_STEPS * max(_stride(finding), i.stride)
    if together or finding.mode in NONFINITE_MODES or finding.extra.get("consequence"):
        return True
    if name:
        return name in i.names
    if other:
        return False
    return finding.severity == "info" or not _is_elsewhere(i, finding, sites)


def covering(
    closed: Sequence[Open], finding: Finding, window_steps: int, sites: Mapping[int, SiteFacts] = MappingProxyType({})
) -> Open | None:
    """The resolved incident that covers a finding from a late rank or spool."""
    window = window_steps * _stride(finding)
    for i in closed:
        after = 0 if finding.rank in i.ranks else window  # from a rank already seen, a later finding is new
        within = i.row["first_step"] - window <= finding.step <= i.row["last_step"] + after
        if within and i.row["mode"] == finding.mode and _is_told(i, finding, sites):
            return i
    return None


def root_of(
    incidents: Sequence[Open], finding: Finding, sites: Mapping[int, SiteFacts], window_steps: int
) -> Open | None:
    """The open incident that explains this finding, which is then muted. A finding from before its cause has none; what is more than
    information is no matter of it."""
    for i in incidents:
        if i.row["severity"] == "info" and finding.severity != "info":
            continue
        there = explains_there(i.cause, finding.kind) and _at_one_place(i, finding, sites)
        if not (there or explains(i.cause, finding.kind)) or not _related(
            i, finding, sites, i.row["mode"], window_steps
        ):
            continue
        if i.cause == IN_EFFECT and finding.mode == "quantiser-fault" and not _may_be_set_so(i, finding, sites):
            continue
        begins = i.row["first_step"] if i.earliest is None else i.earliest
        if begins <= finding.latest(window_steps * _stride(finding)):
            return i
    return None


def explained_by(
    incidents: Sequence[Open], finding: Finding, sites: Mapping[int, SiteFacts], window_steps: int
) -> Open | None:
    """The open incident that this finding explains: it is taken over, and keeps its message.

    Where a kernel is looked at in turns its fault may have begun long before it was seen. Information on another module from
    that time stays what it was: a starved expert is no consequence because a quantiser may already have been broken.
    """
    if finding.extra.get("consequence"):
        return None
    for i in incidents:
        before_it_was_seen = finding.earliest(0) < finding.step and i.row["first_step"] < finding.step
        elsewhere = finding.site is not None and bool(i.row["sites"]) and not _same_module(finding, i, sites)
        if i.row["severity"] == "info" and before_it_was_seen and elsewhere:
            continue
        if not _accounts_for(finding, i, sites) or not _related(i, finding, sites, finding.mode, window_steps):
            continue
        if PRECURSORS.get(finding.mode) == i.row["mode"]:
            return i
        # each onset is as uncertain as the samples are apart that it was seen in
        begun = latest(i.cause, i.row["first_step"], window_steps * i.stride)
        looked = finding.mode in UNEXPLAINED and finding.extra.get("not_before") is not None
        if looked and i.opened is not None:  # in turns far apart, and its own place was good at the last of them
            begun = min(begun, i.opened + 1)
        if finding.earliest(window_steps * _stride(finding)) <= begun:
            return i
    return None


def _may_be_set_so(i: Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> bool:
    """Whether wrong codes may be those of a setting that is in effect: settings are of an operand, whatever its module; what
    has a cause of its own is another fault."""
    operands = {sites[s].operand for s in i.row["sites"][:1] if s in sites}
    return not finding.extra.get("why") and (not operands or set(finding.extra.get("operands", ())) <= operands)


def _accounts_for(finding: Finding, i: Open, sites: Mapping[int, SiteFacts]) -> bool:
    if PRECURSORS.get(finding.mode) == i.row["mode"]:
        return _same_module(finding, i, sites)
    there = explains_there(finding.kind, i.cause) and _at_one_place(i, finding, sites)
    return there or explains(finding.kind, i.cause)


def _same_module(finding: Finding, i: Open, sites: Mapping[int, SiteFacts]) -> bool:
    mine = sites.get(finding.site) if finding.site is not None else None
    return mine is not None and any(s in sites and sites[s].module == mine.module for s in i.row["sites"][:1])


def _at_one_place(i: Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> bool:
    """Whether both name modules, and one of them is the same; of an attention, one beside the other."""
    theirs, mine = _places(i, finding, sites)
    return bool(theirs & mine)


def _is_elsewhere(i: Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> bool:
    """Whether both name all of their modules, and none of them is the same."""
    theirs, mine = _places(i, finding, sites)
    ids = finding.extra.get("sites", ())
    all_named = i.row.get("num_sites", 0) <= len(i.row["sites"]) and int(finding.extra.get("num_sites", 0)) <= len(ids)
    return bool(theirs and mine and all_named and not theirs & mine)


def _places(i: Open, finding: Finding, sites: Mapping[int, SiteFacts]) -> tuple[set[str], set[str]]:
    """Modules of an incident and of a finding; their parents, where one of them is of an attention."""
    theirs = {sites[s].module for s in i.row["sites"] if s in sites}
    mine = {sites[s].module for s in finding.extra.get("sites", ()) if s in sites}
    if SAME_PARENT & {i.row["mode"], finding.mode}:
        theirs, mine = ({m.rpartition(".")[0] for m in modules} for modules in (theirs, mine))
    return theirs, mine


def _stride(finding: Finding) -> int:
    """Steps between the samples that a finding rests on."""
    return int(finding.extra.get("stride", 1))


def _related(i: Open, finding: Finding, sites: Mapping[int, SiteFacts], root: str, window_steps: int) -> bool:
    stride = max(_stride(finding), i.stride)
    other = finding.mode if root == i.row["mode"] else i.row["mode"]
    # Non-finite values follow their cause at once, or have another.
    quiet = (window_steps if other in NONFINITE_MODES else CLOSE_AFTER_STEPS + window_steps) * stride
    if not i.row["first_step"] - quiet <= finding.step <= i.row["last_step"] + quiet:
        return False
    if root in GLOBAL_ROOTS:
        return True
    modules = {sites[s].module for s in i.row["sites"] if s in sites}
    mine = {sites[s].module for s in finding.extra.get("sites", ()) if s in sites}
    if root in SAME_PARENT or (other in SAME_PARENT and explains_there(root, other)):
        return bool({m.rpartition(".")[0] for m in modules} & {m.rpartition(".")[0] for m in mine}) or not modules
    return bool(modules & mine) or not modules or not mine
