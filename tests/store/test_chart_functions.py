"""What the dashboards' functions sum up by block is what they would sum up record by record, NaN, gaps and all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import Feed, made_up
from support.database import fresh_database

from fp8watch_agent.record import Measured
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.schema import BLOCK_COUNTS
from fp8watch_server.db.sql_chart_views import OCTAVES, SMALLEST_IS_WORST
from fp8watch_server.db.sql_views import FIELDS

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def conn() -> Iterator[sa.Connection]:
    """Two whole cells and an uneven one, with NaN and Inf, of three sites."""
    with fresh_database("postgresql") as url:
        feed = Feed(make_engine(url))
        fill(feed, 520)
        rng = np.random.default_rng(1)
        uneven = [*range(520, 540), 550, 551, 560]
        fields = made_up(rng, len(uneven), 3)
        for name in ("scale_inv_min", "tile_noise_ratio_sum"):  # small is bad, and NaN is worse
            fields[name] = np.where(rng.random(3 * len(uneven)) < 0.1, np.nan, fields[name])
        feed.send(feed.agent(), uneven, fields=fields, seq=500)
        feed.compact(everything=True)
        with feed.engine.connect() as opened:
            yield opened
        feed.engine.dispose()


def ask(conn: sa.Connection, sql: str, **values: Any) -> Rows:
    return [dict(row) for row in conn.execute(sa.text(sql), values).mappings()]


def records(conn: sa.Connection, low: int, high: int) -> Rows:
    got = ask(conn, "SELECT * FROM grafana.value WHERE run_id = 'run-1' AND step BETWEEN :a AND :b", a=low, b=high)
    assert len(got) > 100
    return got


def plain(value: Any) -> Any:
    """Numbers that can be compared: NaN by its name, others as 32 bits hold them."""
    return (
        value if value is None or isinstance(value, str) else "nan" if math.isnan(value) else float(np.float32(value))
    )


def worst(field: str, values: list[Any]) -> Any:
    numbers = [float(v) for v in values if v is not None]
    if not numbers:
        return None
    if any(math.isnan(v) for v in numbers):
        return "nan"
    return plain(min(numbers) if field in SMALLEST_IS_WORST else max(numbers))


@pytest.mark.parametrize(("until", "num_steps"), [(None, 10_000), (400, 300), (555, 20), (300, 1)])
def test_the_health_of_sites(conn: sa.Connection, until: int | None, num_steps: int) -> None:
    high = 560 if until is None else until
    want: dict[int, Rows] = defaultdict(list)
    for row in ask(conn, "SELECT * FROM grafana.value WHERE step BETWEEN :a AND :b", a=high - num_steps + 1, b=high):
        want[row["site"]].append(row)
    got = ask(conn, "SELECT * FROM grafana.site_health('run-1', :until, :n)", until=until, n=num_steps)
    assert {row["site"] for row in got} == set(want)
    assert len(got) == 3
    for row in got:
        of_site = want[row["site"]]
        for field in FIELDS:
            values = [r[field] for r in of_site]
            there = [v for v in values if v is not None]
            expected = (sum(there) if there else None) if field in BLOCK_COUNTS else worst(field, values)
            assert plain(row[field]) == plain(expected), field
        bad = [r["step"] for r in of_site if (r["num_nonfinite"] or 0) > 0 or (r["num_sentinel_tiles"] or 0) > 0]
        assert row["first_bad_step"] == min(bad, default=None)


@pytest.mark.parametrize("field", FIELDS)
def test_the_worst_over_time(conn: sa.Connection, field: str) -> None:
    (span,) = ask(conn, "SELECT * FROM grafana.span('run-1', 555, 500, 40)")
    want: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for row in records(conn, span["low"], span["high"]):
        want[row["site"], row["step"] // span["width"] * span["width"]].append(row[field])
    cells = defaultdict(list)
    for (_, step), values in want.items():
        cells[step].append(worst(field, values))
    got = ask(conn, "SELECT * FROM grafana.worst_over_time('run-1', 555, 500, :field, 40, 3)", field=field)
    shown = [plain(row["value"]) for row in got]
    assert sorted(map(str, shown)) == sorted(str(v) for of_step in cells.values() for v in of_step)
    assert len({row["metric"] for row in got}) == 3


@pytest.mark.parametrize(
    ("operand", "points", "num_steps"), [("all", 120, 10_000), ("input", 7, 10_000), ("all", 7, 300)]
)
def test_octaves(conn: sa.Connection, operand: str, points: int, num_steps: int) -> None:
    chosen = {"points": points, "n": num_steps}
    (span,) = ask(conn, "SELECT * FROM grafana.span('run-1', NULL, :n, :points)", **chosen)
    sites = {row["site"]: row["operand"] for row in ask(conn, "SELECT site, operand FROM grafana.site")}
    want: dict[int, list[int]] = defaultdict(lambda: [0] * len(OCTAVES))
    for row in records(conn, span["low"], span["high"]):
        amax = row["amax_max"]
        if amax is not None and operand in ("all", sites[row["site"]]):
            place = len(OCTAVES) - 1 if math.isnan(amax) else sum(amax >= 2.0**k for k in OCTAVES[1:])
            want[row["step"] // span["width"] * span["width"]][place] += 1
    sql = "SELECT * FROM grafana.octaves('run-1', NULL, :n, :operand, :points)"
    got = ask(conn, sql, operand=operand, **chosen)
    assert sum(sum(of) for of in want.values()) > 300
    assert {row["step"]: [row[f"2^{k}"] for k in OCTAVES] for row in got} == {
        row["step"]: want[row["step"]] for row in got
    }
    assert {row["step"] for row in got} >= set(want)


@pytest.fixture(scope="module")
def gains() -> Iterator[tuple[sa.Connection, np.ndarray]]:
    """One site whose full statistics come in every third step, its gain errors on both sides of 0, NaN in one; [T]."""
    with fresh_database("postgresql") as url:
        feed = Feed(make_engine(url))
        num = 300
        gain = np.random.default_rng(2).integers(-40, 41, num) / 4096  # as few bits as the wire keeps
        gain[78] = np.nan
        full = (int(Measured.ENERGIES) | int(Measured.GAIN)) * (np.arange(num) % 3 == 0)
        of_steps = {
            "signal_energy": np.full(num, 4.0),
            "gain_energy": 4.0 * gain,
            "measured": int(Measured.AMAX) | full,
        }
        fields = {name: np.repeat(values, 3) for name, values in of_steps.items()}
        feed.send(feed.agent(), list(range(num)), fields=fields)
        feed.compact(everything=True)
        with feed.engine.connect() as opened:
            yield opened, np.where(np.arange(num) % 3 == 0, gain, np.inf)
        feed.engine.dispose()


@pytest.mark.parametrize("points", [5000, 10])
def test_the_gain_error_of_a_bucket_is_the_one_furthest_from_zero(
    gains: tuple[sa.Connection, np.ndarray], points: int
) -> None:
    conn, gain = gains
    width = max(1, math.ceil(len(gain) / points))
    want: dict[int, list[float]] = defaultdict(list)
    for step in np.flatnonzero(~np.isinf(gain)):
        want[int(step) // width * width].append(float(gain[step]))
    (first, *_) = ask(conn, "SELECT site FROM grafana.site ORDER BY flow_order")
    got = ask(conn, "SELECT * FROM grafana.gain_series('run-1', :s, NULL, 10000, :p)", s=first["site"], p=points)
    found = {step: "nan" if any(map(math.isnan, v)) else plain(max(v, key=abs)) for step, v in want.items()}
    assert {row["step"]: plain(row["gain_error"]) for row in got} == found
    assert min(row["gain_error"] for row in got) < 0


def test_a_block_without_full_statistics_holds_no_gain(conn: sa.Connection) -> None:
    assert ask(conn, "SELECT count(*) AS num FROM block WHERE gain_error IS NOT NULL") == [{"num": 0}]
    assert ask(conn, "SELECT * FROM grafana.gain") == []
