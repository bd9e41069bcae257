"""On the wire, in sheets, over ranks and on pages a field is absent where a record does not hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from collector.kit import ALL, Agent
from store.kit import DOWN, UP, Feed

from fp8watch_agent import record, wire
from fp8watch_agent.record import FIELD_BY_NAME, Measured, empty_rows
from fp8watch_server.db import migrations
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.detect.cross_rank_step import CrossRankStep
from fp8watch_server.detect.finding import facts_of
from fp8watch_server.detect.step_view import BatchColumns, SiteTable, StepView
from fp8watch_server.pages.formatting import field_label
from fp8watch_server.store import blocks, queries, sheets
from fp8watch_server.store.fields import SERIES_FIELDS, evaluate
from fp8watch_server.store.rank_merge import over_ranks
from fp8watch_server.store.records import Parts, dtype_of

NEW = ("num_made_up", "made_up_max")
GROUP = int(Measured["MADE_UP"])


def rows_with(*measured: int) -> np.ndarray:
    rows = empty_rows(len(measured))
    rows["measured"], rows["num_calls"], rows["num_made_up"] = measured, 1, [7 * bool(m & GROUP) for m in measured]
    return rows


def parts_of(rows: np.ndarray) -> Parts:
    """The records of one site, a step each."""
    n = len(rows)
    none, site = np.zeros(n, np.int64), np.ones(n, np.uint64)
    columns = {
        name: wire.encode_histogram(rows[name]) if name in record.HISTOGRAMS else rows[name].astype(dtype_of(name))
        for name in blocks.ALL_FIELDS
    }
    return Parts(site, np.arange(n), none, none, none, columns)


def test_it_travels_and_is_absent_where_it_was_not_measured() -> None:
    rows = rows_with(1 | GROUP, 1)
    steps = np.zeros(2, record.STEP)
    steps["step"] = [0, 1]
    header = wire.Header(run="r", session="s", rank=0, seq=0, step0=0, num_steps=2, num_records=2)
    batch = wire.decode_batch(wire.encode_batch(header, steps, np.arange(2), np.ones(2, np.uint64), rows))
    assert batch.column("num_made_up").tolist() == [7, 0]
    columns = {name: batch.column(name) for name in (*NEW, "measured")}
    values, present = evaluate(SERIES_FIELDS["num_made_up"], columns)
    assert (values.tolist(), present.tolist()) == ([7, 0], [True, False])


def test_sheets_keep_it() -> None:
    parts = parts_of(rows_with(1 | GROUP, 1, 1 | GROUP))
    (row,) = sheets.encode(parts, 0)
    stored = type("Row", (), {**row, "rank": 0, "attempt": 0})
    back = sheets.decode([stored], blocks.ALL_FIELDS)
    assert back.columns["num_made_up"].tolist() == [7, 0, 7]
    assert evaluate(SERIES_FIELDS["num_made_up"], back.columns)[1].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("of_ranks", "there"), [((1, 1), True), ((1, 0), False), ((0, 1), False), ((1, 0, 1), False), ((1, None), True)]
)
def test_what_one_rank_lacks_is_absent(of_ranks: tuple[int | None, ...], there: bool) -> None:
    """None: a record without a quantisation, such as that of a hash."""
    bits = [int(Measured.HASH) if knows is None else 1 | GROUP * knows for knows in of_ranks]
    parts = replace(parts_of(rows_with(*bits)), step=np.zeros(len(bits), np.int64), rank=np.arange(len(bits)))
    merged = over_ranks(parts)
    assert evaluate(SERIES_FIELDS["num_made_up"], merged.columns)[1].tolist() == [there]


@pytest.mark.parametrize(("of_ranks", "total"), [((1, 1), 14.0), ((1, 0), None)])
def test_detectors_see_it_where_every_rank_measured_it(of_ranks: tuple[int, ...], total: float | None) -> None:
    table, views = SiteTable(facts_of([UP, DOWN])), []
    for rank, knows in enumerate(of_ranks):
        fields = {"measured": [ALL | GROUP, ALL | GROUP * knows], "num_made_up": [7, 7 * knows]}
        batch = wire.decode_batch(Agent(None, run="r", session="s", rank=rank).body([UP, DOWN], [0], fields=fields))
        views.append(StepView(BatchColumns(batch, table), 0, slice(0, 2)))
    seen = CrossRankStep(views, table).column("num_made_up").tolist()
    assert seen == [14.0, pytest.approx(np.nan if total is None else total, nan_ok=True)]


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    engine = make_engine(f"sqlite:///{tmp_path / 'db'}")
    migrations.upgrade(engine)
    yield Feed(engine)
    engine.dispose()


def test_a_chart_shows_it_before_and_after_compaction_where_every_rank_measured_it(feed: Feed) -> None:
    first, second = feed.agent(rank=0), feed.agent(rank=1)
    steps, some = list(range(300)), np.repeat(np.arange(300) % 3 > 0, len(feed.sites))
    for agent, knows in ((first, np.ones_like(some)), (second, some)):
        measured = np.where(knows, ALL | GROUP, ALL)
        feed.send(agent, steps, fields={"measured": measured, "num_made_up": 7 * knows})

    def chart(rank: int | None) -> list[float | None]:
        with feed.engine.connect() as conn:
            shown = queries.series(conn, "run-1", feed.sites[0].id, "num_made_up", 0, 5, 1000, rank)
        return list(shown["values"])

    before = [chart(rank) for rank in (None, 0, 1)]
    assert before == [[None, 14, 14, None, 14, 14], [7] * 6, [None, 7, 7, None, 7, 7]]
    feed.compact(everything=True)
    assert [chart(rank) for rank in (None, 0, 1)] == before


def test_pages_have_a_name_for_it() -> None:
    assert field_label("num_made_up") == "made up"
    assert FIELD_BY_NAME["made_up_max"].label == ""
    assert field_label("made_up_max") == "made up max"
