"""fp8watch export: what is read back from Parquet is what the API says."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

pytest.importorskip("pyarrow", reason="pip install 'fp8watch[export]'")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from collector.filled_run import an_incident
from collector.kit import on_sqlite
from store.filled_store import fill
from store.kit import HEAD, SITES, UP, Feed, made_up

from fp8watch_agent.record import Measured
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.export import parquet, tables
from fp8watch_server.export.command import NAMES, main
from fp8watch_server.store import queries
from fp8watch_server.store.fields import SERIES_FIELDS

LIGHT = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO)


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", database_url)


def as_written(chart: dict[str, Any]) -> list[tuple[int, Any]]:
    """Points of a chart of the API, with its non-finite values in their places."""
    values = list(chart["values"])
    for at, name in chart["nonfinite"]:
        values[at] = float(name)
    return list(zip(chart["steps"], values, strict=True))


def same(got: list[tuple[int, Any]], want: list[tuple[int, Any]]) -> bool:
    def key(value: Any) -> Any:
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    return [(s, key(v)) for s, v in got] == [(s, key(v)) for s, v in want]


def a_run_of_every_kind(feed: Feed) -> None:
    """Two ranks, compacted steps and some that wait for it, one start again, light records, logged values, an incident."""
    fill(feed, 300)
    feed.compact()
    rng = np.random.default_rng(3)
    again = feed.agent(attempt=2)
    feed.send(again, list(range(290, 310)), fields=made_up(rng, 20, 3), logs={"val": [0.5] + [math.nan] * 19})
    feed.send(again, [310, 311], [UP, HEAD], measured=LIGHT)
    with writing(feed.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident(place={"module": UP.module, "ranks": [1], "tile": [3, 4]})])


def test_every_number_is_that_of_the_api(feed: Feed, tmp_path: Path) -> None:
    a_run_of_every_kind(feed)
    assert main(["run-1", "-o", str(tmp_path / "out")]) == 0
    read = {name: pq.read_table(tmp_path / "out" / f"{name}.parquet") for name in NAMES}
    with feed.engine.connect() as conn:
        for site in SITES:
            rows = read["series"].filter(pa.compute.equal(read["series"]["site"], site.id)).to_pydict()
            assert set(rows["rank"]) == {None}
            assert set(rows["module"]) == {site.module}
            charts = queries.several_series(conn, "run-1", site.id, list(SERIES_FIELDS), points=10_000)
            for name, chart in charts.items():
                assert same(list(zip(rows["step"], rows[name], strict=True)), as_written(chart)), name
            hist = queries.histogram(conn, "run-1", site.id, points=10_000)
            there = [(s, h) for s, h in zip(rows["step"], rows["amax_hist"], strict=True) if h is not None]
            assert there == list(zip(hist["steps"], hist["counts"], strict=True))
            light = [s for s, full in zip(rows["step"], rows["full"], strict=True) if not full]
            assert light == ([] if site.module == "layers.0.down" else [310, 311])
            assert all(m is None for m, full in zip(rows["moment2"], rows["full"], strict=True) if not full)
        steps = read["steps"].to_pydict()
        for name in t.SCALAR_NAMES:
            got = list(zip(steps["step"], steps[name], strict=True))
            assert same(got, as_written(queries.scalars(conn, "run-1", name, points=10_000)))
        ends = list(zip(steps["num_ranks"], steps["attempt"], steps["status"], strict=True))
        assert ends == [(2, 1, "ok")] * 290 + [(2, 2, "ok")] * 10 + [(1, 2, "ok")] * 12
        logged = read["logged"].to_pydict()
        assert same(
            list(zip(logged["step"], logged["value"], strict=True)),
            as_written(queries.scalars(conn, "run-1", "val", points=10_000)),
        )
        (incident,) = queries.incidents(conn, "run-1")
        (row,) = read["incidents"].to_pylist()
        assert (row["ranks"], row["tile"], row["element"]) == ([1], [3, 4], None)
        assert json.loads(row["evidence"]) == incident["evidence"]
        for name in ("id", "mode", "severity", "state", "first_step", "sites", "opened_at", "resolved_at"):
            assert row[name] == incident[name]  # type: ignore[literal-required]
        assert [r["site"] for r in read["sites"].to_pylist()] == [s["id"] for s in queries.sites(conn, "run-1")]


def test_each_rank_has_rows_of_its_own_and_a_range_its_steps(feed: Feed, tmp_path: Path) -> None:
    a_run_of_every_kind(feed)
    out = tmp_path / "ranks.parquet"
    assert main(["run-1", "-o", str(out), "--per-rank", "--from", "200", "--to", "299"]) == 0
    rows = pq.read_table(out).to_pylist()
    with feed.engine.connect() as conn:
        for rank in (0, 1):
            got = [(r["step"], r["amax_max"]) for r in rows if r["rank"] == rank and r["site"] == HEAD.id]
            assert same(got, as_written(queries.series(conn, "run-1", HEAD.id, "amax_max", 200, 299, 10_000, rank)))
            assert len(got) == 100
    assert len(rows) == 600


@on_sqlite
def test_duckdb_reads_it_and_finds_what_is_not_finite(feed: Feed, tmp_path: Path) -> None:
    """A reader skips row groups by the extremes in a file, and those of floats leave NaN out."""
    duckdb = pytest.importorskip("duckdb", reason="pip install duckdb")
    agent = feed.agent()
    feed.send(agent, [1, 2], fields={"amax_max": [1.0, 2.0, 3.0, math.nan, 5.0, 4.0]})
    assert main(["run-1", "-o", str(tmp_path / "out")]) == 0
    db = duckdb.connect()

    def ask(sql: str) -> Any:
        return db.execute(sql.replace("{}", str(tmp_path / "out"))).fetchall()

    assert ask("SELECT step, module FROM '{}/series.parquet' WHERE isnan(amax_max)") == [(2, UP.module)]
    assert ask("SELECT count(*) FROM '{}/series.parquet' WHERE amax_max > 5") == [(1,)], "NaN is above all"
    sql = "SELECT i.gemm, max(s.step) FROM '{}/series.parquet' s JOIN '{}/sites.parquet' i USING (site) GROUP BY 1"
    assert ask(sql) == [("fprop", 2)]
    told = dict(ask("SELECT decode(key), decode(value) FROM parquet_kv_metadata('{}/series.parquet')"))
    assert json.loads(told["fp8watch:columns"])["tile_sqnr_db"]["unit"] == "dB"
    assert json.loads(told["fp8watch:run"])["id"] == "run-1"
    assert pq.read_schema(tmp_path / "out" / "series.parquet").field("signal_energy").metadata[b"unit"] == "x²".encode()


@on_sqlite
def test_a_run_that_is_still_written_is_exported_as_it_was_at_one_moment(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 280)
    feed.compact()
    late = feed.agent(rank=2)

    def steps(*given: Any) -> Any:
        yield from tables.steps(*given)
        feed.send(late, list(range(270, 290)))

    monkeypatch.setitem(tables.MAKERS, "steps", steps)
    assert main(["run-1", "-o", str(tmp_path / "out")]) == 0
    read = {name: pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pydict() for name in ("steps", "series")}
    assert set(read["series"]["step"]) == set(read["steps"]["step"]) == set(range(280))
    assert set(read["series"]["num_elements"]) == {2000}
    assert "has not ended" in capsys.readouterr().out


@on_sqlite
def test_a_long_run_is_written_in_row_groups_that_fit_into_memory(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(feed, 600)
    monkeypatch.setattr(parquet, "ROWS_A_GROUP", 200)
    monkeypatch.setattr(tables, "RECORDS_AT_ONCE", 100)
    largest: list[int] = []
    held: list[int] = []
    write_table = pq.ParquetWriter.write_table

    def told(self: Any, table: pa.Table, **given: Any) -> None:
        held.append(table.num_rows)
        write_table(self, table, **given)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", told)

    def series(*given: Any) -> Any:
        for part in tables.series(*given):
            largest.append(part.num_rows)
            yield part

    monkeypatch.setitem(tables.MAKERS, "series", series)
    for compacted in (False, True):
        out = tmp_path / f"{compacted}.parquet"
        if compacted:
            feed.compact(everything=True)
        assert main(["run-1", "-o", str(out)]) == 0
        written = pq.ParquetFile(out)
        groups = [written.metadata.row_group(i).num_rows for i in range(written.num_row_groups)]
        assert max(groups) <= 200
        assert sum(groups) == 1800
        keys = written.read(["site", "step"]).to_pydict()
        assert len(set(zip(keys["site"], keys["step"], strict=True))) == 1800
        assert max(largest) <= (256 if compacted else 100)
        assert max(held) < 200 + max(largest)


@on_sqlite
def test_there_is_a_whole_export_or_none(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 40)

    def says(*args: str) -> str:
        assert main([*args]) == 2
        return capsys.readouterr().err

    out = str(tmp_path / "out")
    assert "known are 'run-1'" in says("run-9", "-o", out)
    assert "make it" in says("run-1", "-o", f"{out}/deep/er")
    assert "after --to 1" in says("run-1", "-o", out, "--from", "2", "--to", "1")

    def full(*given: Any) -> Any:
        yield from tables.series(*given)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setitem(tables.MAKERS, "series", full)
        assert "No space left" in says("run-1", "-o", out)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    assert main(["run-1", "-o", out]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(f"{name}.parquet" for name in NAMES)
    assert "never written over" in says("run-1", "-o", out)
    with monkeypatch.context() as patch:
        for name in [n for n in sys.modules if n.startswith("fp8watch_server.export.")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "pyarrow", None)
        assert "pip install 'fp8watch[export]'" in says("run-1", "-o", f"{out}2")


@on_sqlite
def test_what_retention_has_let_go_of_is_said(feed: Feed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(feed, 512)
    feed.compact(everything=True)
    with writing(feed.engine) as conn:
        conn.execute(sa.update(t.cell).where(t.cell.c.step0 == 256).values(kept=t.KEPT_ROLLUP))
    assert main(["run-1", "-o", str(tmp_path / "a.parquet"), "--per-rank"]) == 0
    assert "1 cells of 256 steps are kept merged over ranks" in capsys.readouterr().out
