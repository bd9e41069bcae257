"""Very many ranks in one process: each is registered, each batch is its own, and a host asks for its run and sites once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from collector.kit import served

from fp8watch_agent.batch import Kind, Parcel
from fp8watch_agent.record import Measured, holds
from fp8watch_agent.session import Registration
from fp8watch_agent.transport import Transport
from fp8watch_agent.uploader import Uploader
from fp8watch_agent.wire import decode_batch
from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.load.command import main
from fp8watch_server.load.drive import session_of
from fp8watch_server.load.fleet import RECORDED_RANKS, Fleet, FleetPlan, record
from fp8watch_server.load.stream import LoadPlan, RankStream
from fp8watch_server.settings import Settings

PLAN = LoadPlan(num_ranks=20, num_sites=10, num_steps=4, steps_per_batch=2, merge_steps=16, run="fleet")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = make_engine(f"sqlite:///{tmp_path / 'x.db'}")
    yield engine
    engine.dispose()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path / 'x.db'}"))
    with served(app, lifespan="on") as address:
        yield address


@pytest.mark.parametrize("fleet", [[], ["--fleet", "1"]])
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_a_load_for_nobody_ends_and_says_so(url: str, fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url, "--ranks", "1", "--steps", "1", *fleet]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_each_rank_sends_what_a_recorded_one_has_under_its_own_name() -> None:
    recorded = record(PLAN)
    assert len(recorded) == RECORDED_RANKS
    (want, _) = [decode_batch(b.data) for b in RankStream(PLAN, 3)]
    got = decode_batch(recorded[3][0].sent_by("f" * 32, 19, 7, 1.5, "fleet"))
    assert (got.header.rank, got.header.session, got.header.seq, got.header.clock) == (19, "f" * 32, 7, 1.5)
    assert np.array_equal(got.steps, want.steps)
    for name in want.sent:
        assert np.array_equal(got.column(name), want.column(name)), name


def test_a_site_leaves_two_records_in_sixteen_steps_at_steps_of_its_own_and_its_ranks() -> None:
    plan = dataclasses.replace(PLAN, num_ranks=16, num_steps=32, steps_per_batch=32)
    counts = np.zeros((16, 32, 10), dtype=int)
    for rank in range(16):
        (body,) = RankStream(plan, rank)
        batch = decode_batch(body.data)
        assert len(batch.step) == 2 * 2 * 10
        full = holds(batch.column("measured"), Measured.ENERGIES)
        assert full.sum() * 2 == len(full)
        assert (batch.column("num_calls") == np.where(full, 1, 16)).all()
        ids = {site.id: i for i, site in enumerate(plan.sites)}
        np.add.at(counts[rank], (batch.step, [ids[s] for s in batch.site.tolist()]), 1)
    assert (counts.sum(axis=0) == 2).all()  # together they have each site in each step


def test_all_batches_of_a_fleet_are_stored_once_and_one_is_broken(url: str, database: sa.Engine) -> None:
    acked: list[tuple[int, int]] = []
    plan = FleetPlan(PLAN, broken=(17, 1))
    report = Fleet(plan, url, num_senders=2, on_ack=lambda rank, number: acked.append((rank, number))).run()
    assert (report.num_bodies, report.num_refused, report.num_requests) == (40, 0, 6)
    assert sorted(acked) == [(rank, number) for rank in range(20) for number in range(2)]
    b = t.hot_batch.c
    with database.connect() as conn:
        rows = conn.execute(sa.select(b.rank, b.seq, b.body)).all()
    assert sorted((rank, seq) for rank, seq, _ in rows) == [(rank, seq) for rank in range(20) for seq in (1, 2)]
    infs = {(rank, seq): int(decode_batch(body).column("num_inf").sum()) for rank, seq, body in rows}
    assert {key for key, num in infs.items() if num} == {(17, 2)}
    assert report.broken_at is not None
    assert any("acknowledged at" in line for line in report.lines())


def test_ranks_of_a_host_say_of_their_run_and_sites_once_and_again_when_it_was_deleted(
    url: str, database: sa.Engine
) -> None:
    uploader = Uploader(Transport(url))
    streams = [RankStream(PLAN, rank) for rank in range(3)]
    sent = [Registration(session_of(PLAN, s.rank, s.session), PLAN.sites) for s in streams]
    for registration in sent:
        assert uploader.register(registration) is None
    assert uploader.transport.num_requests == 1 + 3 + 1
    with writing(database) as conn:
        conn.execute(sa.delete(t.run))
    for stream, registration in zip(streams, sent, strict=True):
        body = next(iter(stream))
        receipt = uploader.send(Parcel(Kind.BATCH, body.seq, body.data, body.num_records), registration)
        assert receipt.acknowledged == body.num_records, receipt.answer
    with database.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(t.hot_batch)).scalar_one() == 3
        assert conn.execute(sa.select(sa.func.count()).select_from(t.site)).scalar_one() == 10


def test_the_command_drives_a_fleet(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--url", url, "--ranks", "9", "--sites", "5", "--steps", "2", "--run", "small"]
    assert main([*small, "--fleet", "0", "--merge-steps", "16"]) == 0
    assert "acknowledged 18 bodies" in capsys.readouterr().out
    assert httpx.get(f"{url}/api/v1/runs/small").json()["world_size"] == 9
    assert main([*small, "--break", "1:0"]) == 2
    assert "--fleet" in capsys.readouterr().err
