"""docs/metrics.md says what /metrics does, and /metrics keeps to its budget at its worst."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import sqlalchemy as sa
from prometheus_client.metrics_core import Metric

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.db.shards import Shards
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.observability import metrics
from fp8watch_server.observability.metrics import COUNTERS, GAUGES, MAX_RUNS, MAX_SERIES, FleetCollector

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
INFO_LABELS = ("recipe", "format", "backend")


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


def test_the_budget_holds_with_more_sites_runs_and_modes_than_fit(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 'x.db'}")
    migrations.upgrade(engine)
    now = 1_800_000_000.0
    newest = dict.fromkeys(GAUGES, 1.0)
    with writing(engine) as conn:
        for r in range(MAX_RUNS + 5):
            run = {"run_id": f"r{r}", "name": "x", "created_at": now, "last_seen_at": now + r, "last_step": 1}
            conn.execute(sa.insert(t.run).values(**run))
        for r in (f"r{MAX_RUNS + 4}", f"r{MAX_RUNS + 3}"):
            common = {
                "operand": "input",
                "direction": "rowwise",
                "gemm": "fprop",
                "format": "E4M3",
                "recipe": "",
                "backend": "",
            }
            common |= {
                "num_rows": 1,
                "num_columns": 1,
                "tile_rows": 1,
                "tile_columns": 1,
                "power_2_scale": True,
                "eps": 0.0,
            }
            site = {"run_id": r, **common, "evidence": {}, "updated_at": now}
            sites = [{**site, "site": i, "module": f"m{i}", "flow_order": i} for i in range(1000)]
            conn.execute(sa.insert(t.site), sites)
            total = {"run_id": r, "attempt": 1, "last_step": 1, "newest": newest, **dict.fromkeys(COUNTERS, 1)}
            conn.execute(sa.insert(t.site_total), [{**total, "site": i} for i in range(1000)])
    collector = FleetCollector(Shards(engine), IngestStats(), clock=lambda: now)
    found = list(collector.collect())
    engine.dispose()
    num_series = sum(len(f.samples) for f in found)
    assert 0.95 * MAX_SERIES < num_series <= MAX_SERIES
    (dropped,) = [s.value for f in found for s in f.samples if s.name == "fp8watch_series_dropped_total"]
    wanted = 3 * MAX_RUNS + 2 * 1000 * (len(COUNTERS) + len(GAUGES))
    assert dropped >= wanted - MAX_SERIES
    shown = {s.labels["run"] for f in found if f.name == "fp8watch_run" for s in f.samples}
    assert len(shown) == MAX_RUNS, "the newest"
    assert "r0" not in shown


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = table(families(f"sqlite:///{folder}/x.db"))
    page = re.sub(
        r"(<!-- metrics -->\n).*?(<!-- /metrics -->)", lambda m: m[1] + made + "\n" + m[2], PAGE.read_text(), flags=re.S
    )
    PAGE.write_text(page)
