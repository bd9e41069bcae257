"""FP8 coverage of a run (what is quantised, by which backend, and what is left out), and its agents' health.

Shapes:     sites and sessions of a run -> dicts for templates
Thread:     any; pure functions
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fp8watch_agent.fact_lists import MAX_FACT_CHARS, without_number
from fp8watch_agent.fitting_text import FACTS_CUT_FACT
from fp8watch_agent.record import is_probe
from fp8watch_server.detect.finding import OBSERVED
from fp8watch_server.pages.formatting import ago_at, number
from fp8watch_server.store.queries import STALLED_AFTER_S
from fp8watch_server.store.rank_sessions import MANY_LATE_STEPS, OfRanks
from fp8watch_server.store.rows import RunWithSessions, SessionRow, SiteRow

Dict = dict[str, Any]
NUM_LEFT_OUT = 40
NUM_RANKS = 32
NUM_PRECISIONS = 16
PRECISION = "precision."
"""Facts of a session: what is kept in which precision."""
GEMMS = {
    "scaled_mm": "codes are multiplied by torch._scaled_mm",
    "emulated": "dequantised operands are multiplied in float32",
}
"""How the products of what computes in FP8 are made, by fact `gemm`."""
NAMED = ("left_out", "not_taken", "not_counted", "silent", "not_in_fp8")
"""Facts of a session that name modules, each with its reason."""
WARNINGS = (
    "silent_share", "configuration_warning", "declared_not_effective", "te_unread", "logits_unseen", FACTS_CUT_FACT,
)  # fmt: skip
"""Facts of a session that are said as they are."""
_ITEM = re.compile(r"([^;()]+?) \(((?:[^()]|\([^()]*\))*)\)(?:; |$)")


def newest_facts(sessions: Sequence[SessionRow]) -> Mapping[str, Any]:
    """Facts of the newest session: sessions are sorted by newest attempt, rank 0 first."""
    facts: Mapping[str, Any] = (sessions[0]["facts"] if sessions else None) or {}
    return facts


def merged_steps(sessions: Sequence[SessionRow]) -> int:
    """So many steps a record of any of these sessions may stand for: many ranks merge them."""
    said = ((s["facts"] or {}).get("merge_steps") for s in sessions)
    return max((int(n) for n in said if isinstance(n, (int, float)) and 1 < n < 1 << 16), default=1)


def left_out(text: object) -> list[tuple[str, str]]:
    """Module and reason of `a (reason); b (reason)`, as attach reports them. Unparsable text is kept whole."""
    if not isinstance(text, str) or not text.strip():
        return []
    found = [(m[1].strip(), m[2]) for m in _ITEM.finditer(text)]
    return found or [(text[:200], "")]


def goes_on(text: object) -> bool:
    """Whether there may be more than a fact of an older agent names: one more of its items had no room in it, or its last one is cut off."""
    items = text.split("; ") if isinstance(text, str) and not without_number(text)[1] else []
    return bool(items) and len(str(text)) + len("; ") + max(len(item) for item in items) > MAX_FACT_CHARS


def not_watching(facts: Mapping[str, Any] | None) -> str | None:
    """Reason reported by a session that never sees the end of a step; None when steps end."""
    said = (facts or {}).get("no_step_ended")
    return f"Attached, but {said}." if isinstance(said, str) and said else None


def observed(facts: Mapping[str, Any]) -> float | None:
    """Share of the model's GEMM FLOPs, if the session reported it."""
    share = facts.get("gemm_flops_observed")
    return float(share) if isinstance(share, (int, float)) and 0 <= share <= 1 else None


def coverage(run: RunWithSessions, sites: Sequence[SiteRow]) -> Dict:
    """Groups of sites that are quantised alike, and what attach left in high precision."""
    facts = newest_facts(run.get("sessions") or [])
    groups: dict[tuple[Any, ...], set[str]] = {}
    for site in sites:
        if is_probe(site["operand"], site["recipe"]):
            continue
        tile = "×".join(str(n) for n in site["tile"])
        scales = "power of two" if site["power_2_scale"] else "FP32"
        key = (site["operand"], site["direction"], site["format"], tile, scales, site["recipe"], site["backend"])
        groups.setdefault(key, set()).add(site["module"])
    names = ("operand", "direction", "format", "tile", "scales", "recipe", "backend")
    rows = [dict(zip(names, key, strict=True)) | {"num_modules": len(of)} for key, of in groups.items()]
    not_called = [name for name in without_number(str(facts.get("not_called") or ""))[0].split("; ") if name]
    probed = {s["module"] for s in sites if is_probe(s["operand"], s["recipe"])}
    watched = {s["module"] for s in sites if not is_probe(s["operand"], s["recipe"])}
    quantised = {s["module"] for s in sites if not is_probe(s["operand"], s["recipe"]) and s["recipe"] != OBSERVED}
    observe_only = bool(facts.get("observe_only"))
    return {
        "num_quantised": len(watched if observe_only else quantised),
        "num_observed": 0 if observe_only else len(watched - quantised),
        "num_probes": len(probed),
        "observe_only": observe_only,
        "gemm": GEMMS.get(str(facts.get("gemm") or ""), "") if quantised else "",
        "device": str(facts.get("device") or ""),
        "groups": rows[:24],
        "observed": observed(facts),
        **{name: left_out(facts.get(name)) for name in NAMED},
        "not_called": not_called,
        "num_unnamed": {name: without_number(str(facts.get(name) or ""))[1] for name in (*NAMED, "not_called")},
        "goes_on": [name for name in (*NAMED, "not_called") if goes_on(facts.get(name))],
        "num_shown": NUM_LEFT_OUT,
        "precisions": [
            (str(name).removeprefix(PRECISION), str(text))
            for name, text in facts.items()
            if str(name).startswith(PRECISION)
        ][:NUM_PRECISIONS],
        "gradients_unseen": str(facts.get("gradients_unseen") or ""),
        "warnings": [str(facts[k]) for k in WARNINGS if facts.get(k)],
    }


def _count(health: Mapping[str, Any], name: str) -> int:
    value = health.get(name)
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1e18 else 0


def agents(run: RunWithSessions, of: OfRanks, now: float | None = None) -> Dict:
    """Newest session of each rank with its agent's accounting; ranks with problems first."""
    now = time.time() if now is None else now
    rows = [_agent(session, now) for session in of.sessions]
    rows.sort(key=lambda r: (r["well"], r["rank"]))
    num_unwell = sum(not r["well"] for r in rows) + of.num_unread
    return {
        "rows": rows[:NUM_RANKS],
        "num_more": max(0, of.num_ranks - NUM_RANKS),
        "num_more_unwell": max(0, num_unwell - NUM_RANKS),
        "num_ranks": of.num_ranks,
        "num_missing": max(0, int(run.get("world_size") or 1) - of.num_ranks),
        "since": f" in attempt {run['attempt']}" if (run.get("attempt") or 1) > 1 else "",
        "num_unwell": num_unwell,
        "num_lost": sum(r["num_dropped"] for r in rows),
        "lost_more": of.num_unread > 0,
    }


def _agent(session: Mapping[str, Any], now: float) -> Dict:
    health = session["health"] or {}
    dropped = {k.removeprefix("dropped_"): _count(health, k) for k in health if k.startswith("dropped_")}
    dropped = {reason: n for reason, n in sorted(dropped.items()) if n}
    overhead = health.get("overhead_ratio")
    status = "ended" if session["ended"] else "silent" if now - session["last_seen_at"] > STALLED_AFTER_S else "sending"
    errors, spooled = _count(health, "internal_errors"), _count(health, "spooled")
    why = [f"silent, last seen {ago_at(session['last_seen_at'], now)}"] if status == "silent" else []
    if dropped:
        why.append(f"{number(sum(dropped.values()))} records lost ({', '.join(dropped)})")
    if errors:
        why.append(f"{errors} error{'' if errors == 1 else 's'} inside the agent")
    late = _late(session["num_late_steps"], session["last_late_step"])
    if session["num_late_steps"] >= MANY_LATE_STEPS:
        why.append(late)
    if spooled:
        where = (
            "lay on its disk when it ended; fp8watch sync sends what has not come"
            if session["ended"]
            else "wait on its disk"
        )
        why.append(f"{number(spooled)} records {where}")
    return {
        "rank": session["rank"],
        "host": session["host"],
        "attempt": session["attempt"],
        "status": status,
        "last_seen_at": session["last_seen_at"],
        "acknowledged": _count(health, "acknowledged"),
        "waiting": _count(health, "queued") + spooled,
        "spooled": spooled,
        "dropped": dropped,
        "num_dropped": sum(dropped.values()),
        "retries": _count(health, "retries"),
        "internal_errors": errors,
        "overhead": overhead,
        "versions": session["versions"] or {},
        "well": not why,
        "why": why,
        "late": late,
    }


def _late(num: int, last: int | None) -> str:
    if not num:
        return ""
    which = f"step {last}" if num == 1 else f"{number(num)} steps, the last of them {last},"
    return f"{which} came too late to be compared with other ranks"
