"""What tests/incidents/test_roots.py and others share."""

from __future__ import annotations

from typing import Any

from incidents.store import RUN, TENANT, Store

from fp8watch_server.db.dialect import writing
from fp8watch_server.detect.finding import Evidence, Finding
from fp8watch_server.incidents.fold import close_quiet, fold

DOWN, OTHER = "layers.1.mlp.down_proj", "layers.0.attn.o_proj"


def finding(store: Store, mode: str, step: int, module: str = DOWN, severity: str = "warning", **extra: Any) -> Finding:
    site = store.run.sites[store.run.index(module, "input")]
    return Finding(
        mode=mode, severity=severity, step=step, rank=0, site=site.id, tile=None, element=None,
        evidence=(Evidence("clip_depth", 2.0, 1, "ratio", step),), verdict="fp8", rank_in_flow=site.order,
        extra={"sites": [site.id], "num_sites": 1, "operands": ["input"], "stride": 1, **extra},
    )  # type: ignore[arg-type]  # fmt: skip


def put(store: Store, *found: Finding, attempt: int = 1) -> None:
    store.now += 1
    with writing(store.db) as conn:
        fold(conn, RUN, TENANT, attempt, found, store.run.facts, store.now)


def modes(store: Store) -> list[str]:
    return [i["mode"] for i in store.incidents]


def comes_and_goes(store: Store, *found: Finding) -> None:
    """Each is over before the next comes, all within an hour."""
    for one in found:
        put(store, one)
        with writing(store.db) as conn:
            close_quiet(conn, RUN, TENANT, 1, one.step + 21, store.now)
