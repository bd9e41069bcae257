"""Facts of two runs that differ: recipe, versions, flags, hosts, learning rate, data, and how sites are quantised.

Shapes:     two sides -> [{fact, a, b}], as text; None where one side does not say it
Thread:     query pool
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.module_settings import SETTINGS_FACT, decode_settings
from fp8watch_server.compare.fact_kinds import is_consequence
from fp8watch_server.compare.sides import Scalar, Side
from fp8watch_server.db import schema as t

OF_SESSION = ("recipe", "fingerprint", "backend", "world_size", "attempt")
NOT_COMPARED = frozenset({"restart_count", "no_step_ended"})
OF_SITE = ("format", "recipe", "backend", "tile", "power_2_scale", "eps", "shape")
CHOSEN = ("recipe", "left_out", "backend", "world_size")
MAX_HOSTS = 6


def session_facts(conn: Connection, side: Side) -> dict[str, Any]:
    """What the newest session of a side said at attach, by name."""
    s = t.session.c
    where = [s.run_id == side.run_id, s.tenant == t.DEFAULT_TENANT]
    where += [s.rank == side.rank] if side.rank is not None else []
    row = conn.execute(sa.select(t.session).where(*where).order_by(s.attempt.desc(), s.rank).limit(1)).first()
    if row is None:
        return {}
    hosts = conn.execute(sa.select(s.host).where(*where, s.attempt == row.attempt, s.host != "").distinct())
    names = sorted(hosts.scalars())
    said = ", ".join(names[:MAX_HOSTS]) + (f" and {len(names) - MAX_HOSTS} more" if len(names) > MAX_HOSTS else "")
    versions = {f"{name} version": value for name, value in (row.versions or {}).items()}
    known = {name: row._mapping[name] for name in OF_SESSION}
    facts = dict(row.facts or {})
    settings = decode_settings(facts.pop(SETTINGS_FACT, None))  # each by its own name
    return {**facts, **settings, **versions, **known, **({"hosts": said} if names else {})}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, str | None]]:
    """Facts that differ, by name."""
    names = [n for n in sorted({*before, *after}) if before.get(n) != after.get(n) and n not in NOT_COMPARED]
    return [{"fact": name, "a": _said(before.get(name)), "b": _said(after.get(name))} for name in names]


def chosen_first(facts: Sequence[dict[str, str | None]]) -> list[dict[str, str | None]]:
    """What somebody chose before what follows from it; a fingerprint only repeats the others."""

    def rank(fact: str) -> int:
        if fact in CHOSEN:
            return CHOSEN.index(fact)
        return len(CHOSEN) + (0 if ", from step " in fact else 2 if fact == "fingerprint" else 1)

    return sorted(facts, key=lambda f: rank(str(f["fact"])))


def settings_first(facts: Sequence[dict[str, str | None]]) -> list[dict[str, Any]]:
    """The same with `follows`: whether a fact only follows from others; those come last."""
    other = any(f["fact"] == "recipe" for f in facts)
    told = [{**f, "follows": is_consequence(str(f["fact"]), other_recipe=other)} for f in facts]
    return sorted(told, key=lambda f: bool(f["follows"]))


def _said(value: object) -> str | None:
    return None if value in (None, "") else str(value)


def of_scalar(name: str, a: Scalar, b: Scalar) -> list[dict[str, str | None]]:
    """From which step on a scalar that the trainer chooses, such as the learning rate, is another one."""
    _, i, j = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    both = a.present[i] & b.present[j]
    x, y, steps = a.values[i][both], b.values[j][both], a.steps[i][both]
    other = np.flatnonzero(~np.isclose(x, y, rtol=1e-6, atol=0.0, equal_nan=True))
    if not len(other):
        return []
    k = int(other[0])
    return [{"fact": f"{name}, from step {int(steps[k])} on", "a": f"{x[k]:.6g}", "b": f"{y[k]:.6g}"}]


def of_data(
    a: Mapping[int, frozenset[str]], b: Mapping[int, frozenset[str]]
) -> tuple[list[dict[str, str | None]], int]:
    """From which step on the batches have other names; and at how many steps both named theirs."""
    both = sorted(a.keys() & b.keys())
    other = [step for step in both if a[step] != b[step]]
    if not other:
        return [], len(both)
    step = other[0]
    what: dict[str, str | None] = {"a": ", ".join(sorted(a[step])[:4]), "b": ", ".join(sorted(b[step])[:4])}
    return [{"fact": f"data, from step {step} on ({len(other)} of {len(both)} steps)", **what}], len(both)


def of_sites(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[dict[str, str | None]]:
    """How the sites of the same names are quantised otherwise: a line a property, with how many there are."""
    out: list[dict[str, str | None]] = []
    for name in OF_SITE:
        pairs = [(str(x[name]), str(y[name])) for x, y in zip(a, b, strict=True) if x[name] != y[name]]
        if pairs:
            out.append({"fact": f"{name} of {len(pairs)} of {len(a)} sites", "a": pairs[0][0], "b": pairs[0][1]})
    return out
