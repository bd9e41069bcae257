"""Findings as incidents, by the rules of `incidents.fold`, without a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.precedence import SPREADING
from fp8watch_server.incidents.auto_resolve import CLOSE_AFTER_STEPS
from fp8watch_server.incidents.match import Open, explained_by, root_of, target_of

SEVERITIES = ("info", "warning", "critical")


@dataclass
class Folded:
    """One incident: what it says in the end, and when it said what."""

    first: Finding
    named: Finding
    severity: str
    last_step: int
    modes: dict[str, int] = field(default_factory=dict)  # mode -> step at which it said so first

    @property
    def mode(self) -> str:
        return self.named.mode


def fold(findings: Sequence[Finding], sites: Mapping[int, SiteFacts], window_steps: int = 6) -> list[Folded]:
    """Incidents of one run, in the order in which they opened."""
    done: list[Folded] = []
    opened: list[tuple[Open, Folded]] = []
    for f in findings:
        stride = int(f.extra.get("stride", 1))
        opened = [(o, i) for o, i in opened if f.step - i.last_step <= CLOSE_AFTER_STEPS * max(stride, o.stride)]
        rows = [o for o, _ in opened]
        by_id = {id(o): i for o, i in opened}
        if (same := target_of(rows, f, window_steps, sites)) is not None:
            _extend(same, by_id[id(same)], f)
        elif (root := root_of(rows, f, sites, window_steps)) is not None:
            told = by_id[id(root)]
            if f.mode in SPREADING:
                root.row["last_step"] = told.last_step = max(root.row["last_step"], f.step)
            root.row["severity"] = told.severity = max(told.severity, f.severity, key=SEVERITIES.index)
        elif (taken := explained_by(rows, f, sites, window_steps)) is not None:
            incident = by_id[id(taken)]
            incident.named = f
            incident.modes.setdefault(f.mode, f.step)
            taken.row["mode"], taken.kind, taken.topic = f.mode, f.kind, f.topic
            taken.earliest = f.earliest(window_steps * stride)
            _extend(taken, incident, f)
        elif not f.extra.get("consequence"):
            row: dict[str, Any] = {
                "mode": f.mode,
                "severity": f.severity,
                "first_step": f.onset,
                "last_step": f.step,
                "sites": _ids(f),
                "num_sites": int(f.extra.get("num_sites", 0)),
            }
            made = Open(
                row=row, flow=f.rank_in_flow, weight_born=bool(f.extra.get("weight_born")), origin_rank=f.rank,
                num_events=0, stride=stride, names=frozenset({f.scalar}), kind=f.kind, topic=f.topic, earliest=f.earliest(window_steps * stride),
                opened=f.step,
            )  # fmt: skip
            incident = Folded(f, f, f.severity, f.step, {f.mode: f.step})
            opened.append((made, incident))
            done.append(incident)
    return done


def _ids(f: Finding) -> list[int]:
    return list(dict.fromkeys([*([] if f.site is None else [f.site]), *f.extra.get("sites", [])]))


def _extend(o: Open, incident: Folded, f: Finding) -> None:
    o.row["last_step"] = incident.last_step = max(incident.last_step, f.step)
    o.names |= {f.scalar}
    o.row["first_step"] = min(o.row["first_step"], f.onset)
    o.row["sites"] = list(dict.fromkeys([*o.row["sites"], *_ids(f)]))[:256]
    o.row["severity"] = incident.severity = max(incident.severity, f.severity, key=SEVERITIES.index)
