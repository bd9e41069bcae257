"""docs/metrics.md says what /metrics does, and /metrics keeps to its budget at its worst."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client.metrics_core import Metric
from sqlalchemy.engine import Connection

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.db.shards import Shards
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.observability import metrics
from fp8watch_server.observability.metrics import MAX_RUNS, MAX_SERIES, FleetCollector
from fp8watch_server.observability.site_metrics import COUNTERS, GAUGES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
INFO_LABELS = ("recipe", "format", "backend")
NOW = 1_800_000_000.0


def families(url: str) -> list[Metric]:
    """All families, of a database that is empty."""
    engine = make_engine(url)
    migrations.upgrade(engine)
    found = list(FleetCollector(Shards(engine), IngestStats()).collect())
    engine.dispose()
    return found


def table(found: Iterable[Metric]) -> str:
    """The rows between the marks of the page."""
    rows = []
    for f in sorted(found, key=lambda f: f.name):
        suffix = {"counter": "_total", "info": "_info"}.get(f.type, "")
        labels = [*getattr(f, "_labelnames", ()), *(INFO_LABELS if f.type == "info" else ())]
        rows.append(f"| `{f.name}{suffix}` | {f.type} | {', '.join(f'`{n}`' for n in labels)} | {f.documentation} |")
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


def test_the_table_of_the_page_is_what_the_collector_exposes(tmp_path: Path) -> None:
    written = PAGE.read_text().split("<!-- metrics -->\n")[1].split("\n<!-- /metrics -->")[0]
    assert written == table(families(f"sqlite:///{tmp_path / 'x.db'}")), (
        "run python tests/dashboards/test_metrics_page.py"
    )


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"{MAX_SERIES:,} series" in text
    assert f"{MAX_RUNS} runs" in text
    assert f"every {metrics.CACHE_S:.0f} seconds" in text


def put_run(conn: Connection, run_id: str, created_at: float, last_seen_at: float) -> None:
    run = {"run_id": run_id, "name": "x", "created_at": created_at, "last_seen_at": last_seen_at, "last_step": 1}
    conn.execute(sa.insert(t.run).values(**run))


def put_sites(conn: Connection, run_id: str, num: int) -> None:
    """As many sites, each of a module of its own, with all that /metrics says of one."""
    kind = {"operand": "input", "direction": "rowwise", "gemm": "fprop", "format": "E4M3", "recipe": "", "backend": ""}
    shape = {"num_rows": 1, "num_columns": 1, "tile_rows": 1, "tile_columns": 1, "power_2_scale": True, "eps": 0.0}
    site = {"run_id": run_id, **kind, **shape, "evidence": {}, "updated_at": NOW}
    conn.execute(sa.insert(t.site), [{**site, "site": i, "module": f"m{i}", "flow_order": i} for i in range(num)])
    newest, counts = dict.fromkeys(GAUGES, 1.0), dict.fromkeys(COUNTERS, 1)
    total = {"run_id": run_id, "attempt": 1, "last_step": 1, "newest": newest, **counts}
    conn.execute(sa.insert(t.site_total), [{**total, "site": i} for i in range(num)])


def put_session(conn: Connection, run_id: str, ended: bool) -> None:
    session = {"run_id": run_id, "session": run_id, "rank": 0, "attempt": 1, "world_size": 1, "mesh": {}, "host": "h"}
    rest = {"pid": 1, "versions": {}, "recipe": "", "fingerprint": "", "backend": "", "facts": {}}
    times = {"registered_at": NOW, "last_seen_at": NOW}
    conn.execute(sa.insert(t.session).values(**session, **rest, **times, ended=ended))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = make_engine(f"sqlite:///{tmp_path / 'x.db'}")
    migrations.upgrade(made)
    yield made
    made.dispose()


def test_the_budget_holds_with_more_sites_runs_and_modes_than_fit(engine: sa.Engine) -> None:
    with writing(engine) as conn:
        for r in range(MAX_RUNS + 5):
            put_run(conn, f"r{r}", NOW + r, NOW)
        for r in (f"r{MAX_RUNS + 4}", f"r{MAX_RUNS + 3}"):
            put_sites(conn, r, 1000)
    collector = FleetCollector(Shards(engine), IngestStats(), clock=lambda: NOW)
    found = list(collector.collect())
    num_series = sum(len(f.samples) for f in found)
    assert 0.95 * MAX_SERIES < num_series <= MAX_SERIES
    (dropped,) = [s.value for f in found for s in f.samples if s.name == "fp8watch_series_dropped_total"]
    wanted = 4 * MAX_RUNS + 2 * 1000 * (len(COUNTERS) + len(GAUGES))
    assert dropped >= wanted - MAX_SERIES
    shown = {s.labels["run"] for f in found if f.name == "fp8watch_run" for s in f.samples}
    assert len(shown) == MAX_RUNS, "the newest"
    assert "r0" not in shown


def test_what_is_left_out_stays_left_out_whichever_run_was_heard_of_last(engine: sa.Engine) -> None:
    """Two runs in training of which one and a half fit, and one that has ended since it began."""
    with writing(engine) as conn:
        for i, (run_id, ended) in enumerate({"first": False, "second": False, "over": True}.items()):
            put_run(conn, run_id, NOW + i, NOW)
            put_sites(conn, run_id, 800)
            put_session(conn, run_id, ended)
    collector = FleetCollector(Shards(engine), IngestStats(), clock=lambda: NOW)

    def layers() -> set[tuple[str, str]]:
        found = [f for f in collector.collect() if f.name == "fp8watch_nonfinite_elements"]
        return {(s.labels["run"], s.labels["layer"]) for f in found for s in f.samples}

    exposed = layers()
    for later, run_id in enumerate(("first", "second", "over", "first")):
        with writing(engine) as conn:
            conn.execute(sa.update(t.run).where(t.run.c.run_id == run_id).values(last_seen_at=NOW + later + 1))
        assert layers() == exposed
    assert {run for run, _ in exposed} == {"first", "second"}, "what has ended comes behind what goes on"


def test_a_run_is_over_once_it_has_ended_or_was_silent_for_an_hour(engine: sa.Engine) -> None:
    with writing(engine) as conn:
        for run_id, ended, silent_s in (("goes-on", False, 3000), ("ended", True, 1), ("killed", False, 4000)):
            put_run(conn, run_id, NOW - 9000, NOW - silent_s)
            put_session(conn, run_id, ended)
    found = FleetCollector(Shards(engine), IngestStats(), clock=lambda: NOW).collect()
    said = {s.labels["run"]: s.value for f in found if f.name == "fp8watch_run_running" for s in f.samples}
    assert said == {"goes-on": 1, "ended": 0, "killed": 0}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = table(families(f"sqlite:///{folder}/x.db"))
    page = re.sub(
        r"(<!-- metrics -->\n).*?(<!-- /metrics -->)", lambda m: m[1] + made + "\n" + m[2], PAGE.read_text(), flags=re.S
    )
    PAGE.write_text(page)
